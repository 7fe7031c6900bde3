"""The calibration commands without a GPU: clear refusals, imports and transfers that work."""

from __future__ import annotations

from pathlib import Path

import pytest

from moesim.cli import main
from moesim.cli.calibrate import _print_drift
from moesim.hwmodels.calibration import load_profile


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    return int(end.value.code or 0)


def test_without_a_gpu_calibrate_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "mine.yaml"
    assert run("calibrate", "-o", str(output)) == 2
    error = capsys.readouterr().err
    assert "moesim: error:" in error and "Traceback" not in error
    assert not output.exists()


def test_an_output_that_is_no_profile_is_refused_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("calibrate", "-o", "profile.txt") == 2
    assert "profile.txt" in capsys.readouterr().err


def test_a_profile_for_a_sibling_names_every_entry(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    output = tmp_path / "h800-from-h200.yaml"
    assert run("transfer", "h200-measured", "h800-sxm", "-o", str(output)) == 0
    shown = capsys.readouterr().out
    made = load_profile(output)
    assert made.accelerator == "h800-sxm"
    assert all(entry.id in shown for entry in made.entries())
    assert run("transfer", "h200-measured", "h800-sxm", "-o", str(output)) == 2
    assert "--force" in capsys.readouterr().err


def test_a_transfer_to_another_die_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("transfer", "h200-measured", "a100-sxm", "-o", str(tmp_path / "x.yaml")) == 2
    assert "a100-sxm" in capsys.readouterr().err


def test_an_nccl_tests_table_becomes_a_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fixtures = Path(__file__).parents[1] / "kernels" / "importer_fixtures"
    logs = sorted(p for p in fixtures.iterdir() if "nccl" in p.name or "all_gather" in p.name)
    assert logs, "the importer's fixtures moved"
    output = tmp_path / "imported.yaml"
    code = run("import", "nccl-tests", str(logs[0]), "-o", str(output), "--accelerator", "h200-sxm")
    shown = capsys.readouterr()
    assert code == 0, shown.err
    assert "nccl." in shown.out and load_profile(output).curves


def test_a_log_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log.txt"
    log.write_text("hello\n")
    assert run("import", "deepep", str(log), "-o", str(tmp_path / "x.yaml"), "--accelerator", "h200-sxm") == 2
    assert "log.txt" in capsys.readouterr().err


def test_calibrate_says_which_shapes_drifted(capsys: pytest.CaptureFixture[str]) -> None:
    old = load_profile("h800-trace")
    table = max((t for t in old.gemm_tables if t.dtype == "fp8"), key=lambda t: len(t.points))
    rows = tuple((*r[:4], r[4] * (2.0 if t == 0 else 1.0), *r[5:]) for t, r in enumerate(table.points))
    tables = tuple(t.model_copy(update={"points": rows}) if t is table else t for t in old.gemm_tables)
    _print_drift(old, old.model_copy(update={"gemm_tables": tables}))
    out = capsys.readouterr().out
    assert "1 of " in out and "common entries changed" in out
    assert f"1 of {len(rows)} changed: " in out and table.id.removeprefix("h800-trace.") in out
