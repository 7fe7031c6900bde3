"""Operators of a model, calls of the host and loss beside NCCL, of a synthetic machine."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from synthetic_machine import (
    ALL,
    HOST_S,
    interrupted,
    run,
)

from moesim.hwmodels.calibration import load_profile
from moesim.hwmodels.drift import compare
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.host import load_host
from moesim.kernels.calibrate import build_plan, operators
from moesim.kernels.calibrate.operators import averaged
from moesim.kernels.calibrate.protocol import (
    Facts,
)

OPERATORS: tuple[dict[str, int | float | str], ...] = (
    {"use": "permute/eager_expand", "bytes": 1e9, "launches": 1, "tokens": 4096, "top_k": 8, "hidden": 2048},
    {"use": "permute/eager_expand", "bytes": 4e9, "launches": 1, "tokens": 16384, "top_k": 8, "hidden": 2048},
    {"use": "topk/eager_forward", "bytes": 1e8, "launches": 16, "tokens": 16384, "experts": 128, "top_k": 8},
    {"use": "gemm", "bytes": 1e8, "launches": 1, "m": 4096, "n": 5120, "k": 2048, "groups": 1},
    {"use": "wgrad_gemm", "bytes": 1e8, "launches": 64, "m": 1536, "n": 2048, "k": 65536, "groups": 64},
    {"use": "scan/unknown", "bytes": 1e8, "launches": 1},
)


OPERATED: dict[str, Any] = {"operators": lambda _: OPERATORS}


def test_operators_of_a_model_come_before_those_of_fixed_sizes(tmp_path: Path) -> None:
    asked: list[str] = []

    def of_model(accelerator: str) -> tuple[dict[str, int | float | str], ...]:
        asked.append(accelerator)
        return OPERATORS

    profile, _, _ = run(tmp_path / "mine.yaml", 1, quick=True, operators=of_model)
    assert asked == ["h200-sxm"]
    curves = {use: c for c in profile.curves for use in c.used_for}
    assert curves["permute/eager_expand"].curve.ys == pytest.approx([2e12, 2e12], rel=0.02)
    assert curves["topk/eager_forward"].curve.ys == pytest.approx([2e12], rel=0.1)  # without its sixteen gaps
    assert "scan/unknown" not in curves and "scan/unknown" in (profile.evidence or "")
    tables = {t.cls: t for t in profile.gemm_tables if t.dtype == "bf16"}
    rows = {row[:4]: row[4] for row in tables["gemm"].points}
    assert rows[4096, 5120, 2048, 1] == pytest.approx(600, rel=0.02)
    assert len(rows) > 1  # those of fixed sizes are in the same table
    assert tables["wgrad_gemm"].points[0][:4] == (1536, 2048, 65536, 64)


class _Gpu:
    """Stands for torch and a session: remembers for how many cycles the GPU was told to wait."""

    devices, repeats, float32, bfloat16, uint8 = (0,), 2, "float", "bf16", "u8"

    def __init__(self) -> None:
        self.waits: list[int] = []
        self.cuda = self

    def Event(self, enable_timing: bool) -> _Gpu:  # noqa: N802 - as torch names it
        return self

    def _sleep(self, cycles: int) -> None:
        self.waits.append(cycles)

    def keep(self, key: object, build: Any) -> Any:
        return lambda: time.sleep(0.01)

    def elapsed_time(self, other: _Gpu) -> float:
        return 1.0

    def empty(self, *args: Any, **kwargs: Any) -> _Gpu:
        return self

    def nothing(self, *args: Any) -> None:
        pass

    set_device = zero_ = record = synchronize = nothing


def test_the_gpu_waits_as_long_as_the_host_needs_to_launch_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the host's time would be taken for the piece's."""
    gpu = _Gpu()
    monkeypatch.setattr(operators, "torch", lambda: gpu)
    sample = operators._on_gpu(gpu, {"use": "copy/pack", "bytes": 6e9, "launches": 1, "elements": 8})
    assert sample.times_s == (1e-3, 1e-3)
    assert gpu.waits[0] == operators.SPIN_CYCLES
    assert all(wait >= 2 * 0.01 * operators.SPIN_HZ for wait in gpu.waits[1:])


def test_without_a_model_its_operators_are_named_as_not_measured() -> None:
    plan = build_plan(Facts(1, ALL), quick=True)
    assert "operators of the model's step (needs --model)" in plan.not_measured
    for name in ("operators", "compiled", "host"):
        with pytest.raises(InputError, match=rf"{name} needs --model"):
            build_plan(Facts(1, ALL), only=[name])
    with pytest.raises(InputError, match="--only leaves out"):
        build_plan(Facts(1, ALL, operators=OPERATORS), only=["hbm"])


def test_a_size_gives_back_its_own_time_also_where_times_fall_with_more_bytes() -> None:
    assert averaged([(1e6, 4.0), (2e6, 2.0), (2e6, 4.0), (8e6, 1.0)]) == [(1e6, 4.0), (2e6, 3.0), (8e6, 1.0)]


COMPILED: tuple[dict[str, int | float | str], ...] = (
    {"use": "rope/", "bytes": 1e9, "launches": 1, "tokens": 4096, "heads": 8, "width": 128, "compiled": 1},
    {"use": "norm/forward", "bytes": 2e9, "launches": 1, "rows": 4096, "width": 2048, "compiled": 1},
)


def test_compiled_operators_need_triton_and_a_compiler_and_have_curves_of_their_own(tmp_path: Path) -> None:
    asked = {**OPERATED, "operators": lambda _: (*OPERATORS, *COMPILED)}
    without, _, _ = run(tmp_path / "a.yaml", 1, **asked)
    assert "torch.compile compiles (needs triton and C compiler)" in without.evidence
    assert not {"rope/", "norm/forward"} & {use for c in without.curves for use in c.used_for}
    profile, _, _ = run(tmp_path / "b.yaml", 1, libraries=ALL | {"triton", "C compiler"}, **asked)
    curves = {use: c for c in profile.curves for use in c.used_for}
    assert curves["rope/"].curve.ys == pytest.approx([1e12], rel=0.02)
    assert "torch.compile's code" in curves["norm/forward"].source
    assert "torch.compile's" not in curves["permute/eager_expand"].source


def test_operators_interrupted_between_two_of_them_go_on_and_their_drift_is_told(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    interrupted(path, 3, **OPERATED)
    profile, (context,), _ = run(path, quick=True, **OPERATED)
    done = {task.key for task in context.done}
    plan = build_plan(Facts(8, ALL, operators=OPERATORS), quick=True)
    assert len(done) == len(plan.tasks) - 3 and {task.key for task in plan.tasks[3:]} == done
    curve = next(c for c in profile.curves if "permute/eager_expand" in c.used_for)
    slower = type(curve).model_validate(
        {**curve.model_dump(), "points": tuple((p[0], p[1] / 2) for p in curve.points)}
    )
    kept = [slower if c is curve else c for c in profile.curves]
    found = compare(profile, profile.model_copy(update={"curves": tuple(kept)}))
    assert found[0].id == "permute.eager_expand" and found[0].drifted and found[0].points == 2


def test_the_calls_of_the_host_become_a_host_that_a_scenario_can_name(tmp_path: Path) -> None:
    _, _, seen = run(tmp_path / "mine.yaml", 1, quick=True, **OPERATED)
    assert any("mine.host.yaml: name it as `software.host`" in progress.message for progress in seen)
    host, like = load_host(str(tmp_path / "mine.host.yaml")), load_host("emerald-rapids-vm")
    assert host.like == like.name and host.factor is not None and host.factor.between is not None
    ratio = like.in_block["routed"]
    assert host.call_s("norm", True, "routed") == pytest.approx(HOST_S * ratio.forward, rel=0.02)
    assert host.call_s("norm", False, "routed") == pytest.approx(2 * HOST_S * ratio.backward, rel=0.02)
    # A call that one GPU cannot show takes the mean ratio of the others.
    assert host.call_s("fsdp", True) == pytest.approx(host.factor.value * like.call_s("fsdp", True))
    assert host.call_s("gate", False) == pytest.approx(
        host.factor.value * like.call_s("gate", False), rel=1e-3
    )


def test_compute_lost_beside_nccl_is_measured_where_two_gpus_are(tmp_path: Path) -> None:
    profile, _, _ = run(tmp_path / "two.yaml", 2, quick=True)
    assert profile.lost_beside_nccl.value == 0.2 and profile.lost_beside_nccl.between == (0.15, 0.3)
    alone, _, _ = run(tmp_path / "one.yaml", 1, quick=True)
    assert alone.lost_beside_nccl == load_profile("hopper-communication").lost_beside_nccl
