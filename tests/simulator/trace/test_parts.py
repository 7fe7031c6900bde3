from __future__ import annotations

import json

import pytest

from moesim.cli import scores
from moesim.simulator.trace.parts import (
    PartRow,
    ScoredParts,
    median_gap,
    scenario_of,
    score_parts,
    traced,
    traced_runs,
)

RUNS = {run.name: run for run in traced_runs().runs}


def test_every_run_has_the_parts_of_its_trace() -> None:
    stored = traced()
    assert stored.keys() == RUNS.keys()
    whole = {name: sum(parts.values()) / 1e9 for name, parts in stored.items()}
    assert whole["q30"] == pytest.approx(0.514214, abs=1e-6)  # wall time of the profiled step
    assert whole["h800-pair"] == pytest.approx(0.129012, abs=1e-6)
    for name, run in RUNS.items():
        assert 0.97 < whole[name] / run.step_s < 1.15, name  # a profiler slows the host


def test_no_scenario_of_a_traced_run_takes_rates_from_a_trace_but_the_h800s() -> None:
    profiles = {name: scenario_of(run).profile for name, run in RUNS.items()}
    assert profiles.pop("h800-pair") == "h800-trace"
    assert set(profiles.values()) == {"h100-from-h200", "h200-8gpu"}


def test_parts_of_a_dense_run_on_h100_are_right_and_add_up() -> None:
    scored = score_parts(RUNS["l8b"], traced()["l8b"])
    assert sum(row.predicted_ns for row in scored.rows) == pytest.approx(scored.predicted_s * 1e9, abs=10)
    assert sum(row.difference_ns for row in scored.rows) / 1e9 == pytest.approx(
        scored.predicted_s - scored.traced_s
    )
    assert abs(scored.gap) <= scored.parts_gap < 0.12
    assert abs(scored.step_error) < 0.05 and not scored.far


def test_one_pair_of_the_h800_is_set_beside_its_timeline() -> None:
    scored = score_parts(RUNS["h800-pair"], traced()["h800-pair"])
    assert scored.predicted_s == pytest.approx(0.1301, rel=0.01)
    assert not {row.part for row in scored.rows if row.predicted_ns} & {"optimizer", "reduce_scatter"}


def test_only_large_parts_that_are_off_are_far(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = (
        PartRow(part="gemm", kind="compute", traced_ns=600, predicted_ns=500),
        PartRow(part="norm", kind="compute", traced_ns=360, predicted_ns=400),
        PartRow(part="rope", kind="compute", traced_ns=40, predicted_ns=80),
    )
    one = ScoredParts(
        name="x", title="", hardware="", step_s=1e-6, traced_s=1e-6, predicted_s=0.98e-6, step_error=-0.02,
        gap=-0.02, parts_gap=0.18, compute_gap=0.18, rows=rows,
    )  # fmt: skip
    assert [row.part for row in one.far] == ["gemm"]
    assert median_gap([one]) == 0.18
    monkeypatch.setattr(scores, "score_all_parts", lambda: iter([one]))
    scores.print_parts(False)
    said = capsys.readouterr().out
    assert (
        "-16.7 %" in said and "18.0%" in said and said.count("gemm") == 2
    )  # its row, and among the far ones
    scores.print_parts(True)
    assert json.loads(capsys.readouterr().out)[0]["rows"][0]["predicted_ns"] == 500
