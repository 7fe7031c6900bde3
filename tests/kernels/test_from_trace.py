"""Profiles from the plain table of a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from moesim.hwmodels.calibration import CalibrationProfile, load_profile
from moesim.hwmodels.errors import InputError
from moesim.kernels.calibrate.from_trace import MATCHED, TraceTable, profile_from_trace
from moesim.kernels.export import write_profile
from moesim.simulator.cost.library_collectives import overlap_delay
from moesim.simulator.dispatchers.protocol import Links
from moesim.simulator.trace.read import fingerprints, own_rates


def row(seconds: float, use: str, flop: float = 0.0, **sizes: Any) -> dict[str, Any]:
    return {
        "measurement": "operators", "parameters": {"use": use, "launches": 1, **sizes}, "seconds": seconds,
        "low_s": seconds, "high_s": seconds * 1.1, "count": 9, "sizes_from": "tensor shapes",
        "values": {"flop": flop} if flop else {},
    }  # fmt: skip


FACTS: dict[str, Any] = {
    "source": "run.json", "gpu": "NVIDIA H100 80GB HBM3", "ranks": 1, "steps": 2, "gap_s": None,
    "gap_quartiles_s": None, "gaps": 0,
    "host_launch_s": 1e-5, "synchronisations": 3.0,
    "synchronisation_s": 1e-3,
    "jitter": 0.01, "lost_beside": 0.2, "lost_beside_calls": 20,
}  # fmt: skip
TABLE = TraceTable(
    [
        row(1e-3, "gemm", 2.0 * 4096**3, m=4096, n=4096, k=4096, groups=1),
        row(1e-3, "norm/eager_forward", bytes=1e9),
    ],
    FACTS,
    ["rope/eager (no sizes)"],
    [("run.json", "a" * 64)],
    "2026-11-26",
)


def test_a_profile_names_its_trace_and_its_base(tmp_path: Path) -> None:
    profile = profile_from_trace(TABLE, "mine")
    assert profile.trace is not None
    assert (profile.trace.files[0].sha256, profile.trace.base) == ("a" * 64, "h100-layers")
    assert "run.json (SHA-256 aaaaaaaaaaaa)" in profile.curve("mine.norm.eager_forward").source
    assert "rope/eager (no sizes)" in profile.evidence
    assert profile.lost_beside_nccl.value == 0.2
    carried = profile.curve("collective.scale_up_fraction")
    assert "carried unchanged from the profile h100-layers" in str(carried.note)
    assert load_profile(write_profile(profile, tmp_path / "mine.yaml")) == profile


def test_beyond_the_sizes_of_the_run_the_base_s_curve_is_scaled() -> None:
    """Norms of 1 GB were traced; those of 10 MB keep the ratio of the base's times between both."""
    base = next(c for c in load_profile("h100-layers").curves if "norm/eager_forward" in c.used_for)
    curve = profile_from_trace(TABLE, "mine").curve("mine.norm.eager_forward")
    small = base.points[0]
    assert curve.points[-1] == (1000.0, 1000.0)
    assert curve.points[0] == pytest.approx((small[0], small[1] * 1000.0 / base.points[-1][1]), rel=1e-3)
    assert "traced at 1000 MB" in str(curve.note)


def test_a_transfer_in_a_step_is_not_slowed_again_beside_compute() -> None:
    def rates(how: str) -> CalibrationProfile:
        gather = {"operation": "all_gather", "ranks": 2, "bytes": 2.0**28}
        traced = {**row(1e-3, ""), "measurement": "collective", "parameters": gather, "sizes_from": how}
        facts = {**FACTS, "gpu": "NVIDIA H200"}
        return profile_from_trace(
            replace(TABLE, rows=[*TABLE.rows, traced], facts=facts), "mine", base="h200-8gpu"
        )

    links = Links(450e9, 3.33e-6, 50e9, 3.7e-6, 8)
    alone, inside = (rates(how) for how in ("shortest of equal collectives, an upper bound", MATCHED))
    assert overlap_delay("all_gather", 2.0**28, 2, 8, links, alone).seconds > 0.0
    assert overlap_delay("all_gather", 2.0**28, 2, 8, links, inside).seconds == 0.0


def test_bytes_that_memory_cannot_move_are_left_out_and_said() -> None:
    """10 GB in a millisecond on an H100: the scenario was not that of the run."""
    rows = [*TABLE.rows, row(1e-3, "optimizer/adamw", bytes=1e10)]
    profile = profile_from_trace(replace(TABLE, rows=rows), "mine")
    assert "optimizer/adamw (10.0 TB/s" in profile.evidence
    assert "mine.optimizer.adamw" not in {curve.id for curve in profile.curves}


def test_a_base_of_another_gpu_is_refused_with_the_remedy() -> None:
    with pytest.raises(InputError, match=r"is for .*h100-sxm.*moesim transfer"):
        profile_from_trace(TABLE, "mine", base="h200-8gpu")


@pytest.mark.parametrize("gpu", ["AMD Instinct MI300X", ""])
def test_an_unknown_gpu_needs_an_accelerator(gpu: str) -> None:
    table = replace(TABLE, facts={**FACTS, "gpu": gpu})
    with pytest.raises(InputError, match="--accelerator"):
        profile_from_trace(table, "mine")
    assert profile_from_trace(table, "mine", accelerator="h100-sxm").accelerator == "h100-sxm"


def test_a_profile_says_that_a_file_is_its_own(tmp_path: Path) -> None:
    """The note names the file; another trace has none."""
    own, other = tmp_path / "run.json", tmp_path / "other.json"
    own.write_text("{}")
    other.write_text("[]")
    files, _ = fingerprints(own)
    profile = profile_from_trace(replace(TABLE, files=files), "mine")
    assert "run.json" in own_rates(profile, own)
    assert own_rates(profile, other) == ""
