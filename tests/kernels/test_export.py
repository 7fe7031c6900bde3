from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesim.hwmodels.calibration import CalibrationProfile, load_profile
from moesim.hwmodels.errors import InputError
from moesim.kernels.export import (
    Origin,
    carried,
    curve,
    gemm_table,
    law,
    profile_mapping,
    profile_text,
    residual,
    significant,
    write_profile,
)

ORIGIN = Origin(
    title="moesim calibrate on 8x NVIDIA H200",
    date="2026-11-20",
    device="NVIDIA H200",
    driver="580.159.04",
    clocks="1,980 MHz at most, 1,725 sustained",
    cuda="13.0",
    kernels_hash="0123456789ab",
    command="moesim calibrate --quick",
)


def profile(**changes: object) -> CalibrationProfile:
    error = residual(0.0321, "left out")
    fields: dict[str, object] = {
        "name": "test",
        "accelerator": "h200-sxm",
        "software": "made up",
        "description": "made up for a test",
        "evidence": "made up for a test",
        "curves": (
            curve(
                "ep.dispatch.sm_rate",
                [(8, 150.123456), (4, 78.0)],
                x=("communication SMs", "SMs"),
                y=("payload", "GB/s"),
                origin=ORIGIN,
                what="dispatch",
                error=error,
            ),
        ),
        "laws": (
            law(
                "x.gemm_told", "gemm_sm_aware", [(0, 1.0), (8, 1.1)], origin=ORIGIN, what="gemm", error=error
            ),
        ),
        "gemm_tables": (
            gemm_table(
                "x.gemm",
                "gemm",
                "bf16",
                [(4096, 4096, 7168, 1, 772.3456e12)],
                sm_aware=False,
                origin=ORIGIN,
                what="gemm",
                error=error,
                conditions=ORIGIN.conditions(compute_sms=132),
            ),
        ),
    }
    return CalibrationProfile.model_validate({**fields, **changes})


@pytest.mark.parametrize("extension", ["yaml", "json"])
def test_a_written_profile_loads_back_equal(tmp_path: Path, extension: str) -> None:
    path = write_profile(profile(), tmp_path / f"p.{extension}")
    loaded = load_profile(str(path))
    assert loaded == profile()
    assert loaded.curve("ep.dispatch.sm_rate").curve.at(8).value == pytest.approx(150.12e9)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]  # no temporary file is left


SHIPPED = ("h800-trace", "h200-power", "deepep-kernels", "generic-priors", "hopper-launch")


@pytest.mark.parametrize("name", SHIPPED)
def test_every_part_of_a_shipped_profile_survives_the_round_trip(name: str, tmp_path: Path) -> None:
    shipped = load_profile(name).model_copy(update={"include": ()})
    assert load_profile(write_profile(shipped, tmp_path / "p.yaml")) == shipped


def test_equal_profiles_give_equal_bytes() -> None:
    text = profile_text(profile())
    assert text == profile_text(profile()) and text.endswith("\n")
    assert profile_mapping(load_profile("hopper-launch"))["launch_gap"]["value"] == "1.93 us"
    assert "- [4, 78]" in text and "residual: {relative: 0.0321, meaning: left out}" in text


def test_every_entry_says_machine_driver_clocks_kernels_and_command() -> None:
    for entry in profile().entries():
        for part in ("8x NVIDIA H200", "580.159.04", "13.0", "0123456789ab", "moesim calibrate --quick"):
            assert part in entry.source
        assert entry.date == "2026-11-20" and entry.kind == "measured"
        assert entry.conditions.device == "NVIDIA H200" and "1,725" in (entry.conditions.clocks or "")
        assert entry.residual.relative == 0.0321


def test_places_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist; create it first"):
        write_profile(profile(), tmp_path / "missing" / "p.yaml")
    with pytest.raises(InputError, match=r"\.yaml"):
        write_profile(profile(), tmp_path / "p.txt")


@pytest.mark.parametrize(
    ("points", "unit", "words"),
    [([(4, 1.0), (4, 2.0)], "GB/s", "increase strictly"), ([(4, 1.0)], "furlongs", "unknown unit")],
)
def test_what_no_curve_can_be_is_refused(points: list[tuple[float, float]], unit: str, words: str) -> None:
    fields: dict[str, Any] = {"origin": ORIGIN, "what": "test", "error": residual(0.1, "made up")}
    with pytest.raises(InputError, match=words):
        curve("a.b.c", points, x=("n", "SMs"), y=("rate", unit), **fields)


@given(st.floats(1e-12, 1e15))
def test_significant_digits_stay_within_their_precision(value: float) -> None:
    assert significant(value) == pytest.approx(value, rel=5.1e-5)


def test_values_are_finite_and_errors_neither_zero_nor_one() -> None:
    with pytest.raises(InputError, match="measure it again"):
        significant(float("nan"))
    assert [residual(error, "stated").relative for error in (0.0, 7.0)] == [0.001, 0.95]


def test_a_carried_entry_says_where_it_stood() -> None:
    entry = carried(profile().curves[0], "hopper-communication")
    assert entry.note == "carried unchanged from the profile hopper-communication"
    assert entry.source == profile().curves[0].source
