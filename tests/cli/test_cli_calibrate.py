"""The calibration commands without a GPU: clear refusals, imports and transfers that work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moesim.cli.calibrate import _print_drift
from moesim.hwmodels.calibration import load_profile


def test_a_profile_for_a_sibling_names_every_entry(run: Callable[..., Any]) -> None:
    transfer = ("transfer", "h200-measured", "h800-sxm", "-o", "made.yaml")
    shown = run(*transfer)
    made = load_profile("made.yaml")
    assert shown.code == 0 and made.accelerator == "h800-sxm"
    assert all(entry.id in shown.out for entry in made.entries())
    assert run(*transfer).code == 2


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("calibrate -o mine.yaml", "moesim: error:"),  # there is no GPU here
        ("calibrate -o profile.txt", "profile.txt"),
        ("transfer h200-measured a100-sxm -o x.yaml", "a100-sxm"),
        ("import deepep log.txt -o x.yaml --accelerator h200-sxm", "log.txt"),
    ],
)
def test_what_cannot_be_made_is_refused(run: Callable[..., Any], command: str, named: str) -> None:
    Path("log.txt").write_text("hello\n")
    outcome = run(*command.split())
    assert outcome.code == 2 and named in outcome.err and "Traceback" not in outcome.err
    assert not any(Path(name).exists() for name in ("mine.yaml", "x.yaml"))


def test_an_nccl_tests_table_becomes_a_profile(run: Callable[..., Any]) -> None:
    fixtures = Path(__file__).parents[1] / "kernels" / "importer_fixtures"
    logs = sorted(p for p in fixtures.iterdir() if "nccl" in p.name or "all_gather" in p.name)
    assert logs, "the importer's fixtures moved"
    shown = run("import", "nccl-tests", str(logs[0]), "-o", "mine.yaml", "--accelerator", "h200-sxm")
    assert shown.code == 0, shown.err
    assert "nccl." in shown.out and load_profile("mine.yaml").curves


def test_calibrate_says_which_shapes_drifted(capsys: pytest.CaptureFixture[str]) -> None:
    old = load_profile("h800-trace")
    table = max((t for t in old.gemm_tables if t.dtype == "fp8"), key=lambda t: len(t.points))
    rows = tuple((*r[:4], r[4] * (2.0 if t == 0 else 1.0), *r[5:]) for t, r in enumerate(table.points))
    tables = tuple(t.model_copy(update={"points": rows}) if t is table else t for t in old.gemm_tables)
    _print_drift(old, old.model_copy(update={"gemm_tables": tables}))
    out = capsys.readouterr().out
    assert "1 of " in out and "common entries changed" in out
    assert f"1 of {len(rows)} changed: " in out and table.id.removeprefix("h800-trace.") in out
