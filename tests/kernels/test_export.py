from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesim.hwmodels.calibration import CalibrationProfile, list_profiles, load_profile
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


@pytest.mark.parametrize("extension", ["yaml", "yml", "json"])
def test_a_written_profile_loads_back_equal(tmp_path: Path, extension: str) -> None:
    path = write_profile(profile(), tmp_path / f"p.{extension}")
    loaded = load_profile(str(path))
    assert loaded == profile()
    assert loaded.curve("ep.dispatch.sm_rate").curve.at(8).value == pytest.approx(150.12e9)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]  # no temporary file is left


@pytest.mark.parametrize("name", list_profiles())
def test_every_shipped_profile_survives_the_round_trip(name: str, tmp_path: Path) -> None:
    shipped = load_profile(name).model_copy(update={"include": ()})
    assert load_profile(write_profile(shipped, tmp_path / "p.yaml")) == shipped


def test_equal_profiles_give_equal_bytes() -> None:
    text = profile_text(profile())
    assert text == profile_text(profile()) and text.endswith("\n")
    assert "- [4, 78]" in text and "residual: {relative: 0.0321, meaning: left out}" in text


def test_every_entry_says_machine_driver_clocks_kernels_and_command() -> None:
    for entry in profile().entries():
        for part in ("8x NVIDIA H200", "580.159.04", "13.0", "0123456789ab", "moesim calibrate --quick"):
            assert part in entry.source
        assert entry.date == "2026-11-20" and entry.kind == "measured"
        assert entry.conditions.device == "NVIDIA H200" and "1,725" in (entry.conditions.clocks or "")
        assert entry.residual.relative == 0.0321


def test_an_interrupted_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_profile(profile(), tmp_path / "p.yaml")
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(InputError, match="No space left"):
        write_profile(profile(description="another description"), path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["p.yaml"]


def test_places_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist; create it first"):
        write_profile(profile(), tmp_path / "missing" / "p.yaml")
    with pytest.raises(InputError, match=r"\.yaml"):
        write_profile(profile(), tmp_path / "p.txt")


def test_points_that_are_no_function_are_refused() -> None:
    with pytest.raises(InputError, match="increase strictly"):
        curve(
            "a.b.c",
            [(4, 1.0), (4, 2.0)],
            x=("n", "SMs"),
            y=("rate", "GB/s"),
            origin=ORIGIN,
            what="test",
            error=residual(0.1, "made up"),
        )
    with pytest.raises(InputError, match="unknown unit"):
        curve(
            "a.b.c",
            [(4, 1.0)],
            x=("n", "SMs"),
            y=("rate", "furlongs"),
            origin=ORIGIN,
            what="test",
            error=residual(0.1, "made up"),
        )


@given(st.floats(1e-12, 1e15))
def test_significant_digits_stay_within_their_precision(value: float) -> None:
    assert significant(value) == pytest.approx(value, rel=5.1e-5)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_no_profile_holds_a_value_that_is_not_finite(value: float) -> None:
    with pytest.raises(InputError, match="measure it again"):
        significant(value)


def test_a_residual_is_never_zero_nor_one() -> None:
    assert residual(0.0, "perfect").relative == 0.001
    assert residual(7.0, "hopeless").relative == 0.95


def test_a_carried_entry_says_where_it_stood() -> None:
    entry = carried(profile().curves[0], "hopper-communication")
    assert entry.note == "carried unchanged from the profile hopper-communication"
    assert entry.source == profile().curves[0].source


def test_a_launch_gap_keeps_its_unit() -> None:
    shipped = load_profile("hopper-launch")
    assert profile_mapping(shipped)["launch_gap"]["value"] == "1.93 us"
