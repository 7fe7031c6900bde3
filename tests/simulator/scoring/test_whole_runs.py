"""Whole runs beside what was published: GPU-hours, dollars, goodput. Nothing was fitted to these rows."""

from __future__ import annotations

import pytest

from moesim.simulator.run.report import PhaseReport, RunReport
from moesim.simulator.scenario.run_plan import load_run_plan
from moesim.simulator.scoring.published import (
    ContextRow,
    Row,
    goodput,
    published_runs,
    score_goodput,
    score_report,
)

HOME = "deepseek-v3-2048xh800"


def phase(name: str, hours: float) -> PhaseReport:
    return PhaseReport(
        phase=name, stated=False, steps=1, tokens=1.0, sequences=1, sequence_length=1, step_time_s=1.0,
        days=1.0, gpu_hours=hours, gpu_hours_with_stops=hours, cost_usd=None, interpolation_error=0.0,
    )  # fmt: skip


def test_published_hours_add_up() -> None:
    data = published_runs()
    assert sum(row.value for row in data.phases) + 5 == data.totals[0].value
    assert data.totals[0].value * 1e3 * 2 == data.totals[1].value * 1e6
    names = {p.name for p in load_run_plan(data.plan).phases} | {"main"}
    assert {name for row in data.phases for name in row.of} <= names


def test_goodput_is_within_a_twentieth_of_every_published_figure() -> None:
    rows = {row.id: row for row in score_goodput()}
    assert len(rows) == 5
    for row in rows.values():
        assert row.predicted == pytest.approx(row.published, rel=0.05), row.id
        assert 0.0 < row.predicted < 1.0
    assert rows["goodput.llama3.megascale"].predicted < rows["goodput.llama3.rsc"].predicted


def test_goodput_follows_the_ettr_formula_of_the_paper() -> None:
    """RSC: 1 - nodes rate (u0 + interval / 2), for free checkpoints and rare failures."""
    case = next(c for c in published_runs().goodput if c.id == "goodput.rsc1")
    simple = 1.0 - 384 * 6.5e-3 * (12.5 + 30.0) / 1440.0
    assert goodput(case) == pytest.approx(simple, abs=0.005)


def test_reports_are_scored_by_phase() -> None:
    scored = {row.id: row.predicted for row in score_report(REPORT)}
    assert scored["v3-report.run.pre_training"] == 10.0
    assert scored["v3-report.run.context_extension"] == 50.0


def _report() -> RunReport:
    from moesim.simulator.run.report import GpuHours, RunSpread

    one = RunSpread(predicted=1.0, p10=1.0, p50=1.0, p90=1.0)
    hours = dict.fromkeys(GpuHours.model_fields, 0.0) | {"productive": 6e4, "total": 6e4, "billed": 6e4}
    names = ("main", "context extension to 32K", "context extension to 128K")
    return RunReport(
        phases=tuple(phase(name, 10e3 * (i + 1)) for i, name in enumerate(names)),
        days=one, finish=None, goodput=one, goodput_expected=1.0, interruptions=one, causes=(),
        checkpoint=None, gpu_hours=GpuHours(**hours),
        cost_usd=one, cost_parts_usd={}, price="", energy_kwh=None, electricity_usd=None, co2_kg=None,
        assumptions=(), replicas=1, seed=0,
    )  # fmt: skip


REPORT = _report()


def test_context_extension_brackets_the_published_hours(context_rows: list[ContextRow]) -> None:
    """The plan was not published: legal ones lie on both sides of the 119 thousand hours."""
    assert len(context_rows) == len(published_runs().context_plans)
    hours = [(row.first_gpu_hours + row.second_gpu_hours) / 1e3 for row in context_rows if row.fits]
    assert len(hours) >= 3
    assert min(hours) < 119 < max(hours)


def test_the_home_case_run_is_scored(published_rows: list[Row]) -> None:
    rows = {row.id: row for row in published_rows}
    for name, limit in (
        ("pre_training", 0.06),
        ("context_extension", 0.10),
        ("gpu_hours", 0.06),
        ("dollars", 0.06),
    ):
        row = rows[f"v3-report.run.{name}@h800-trace"]
        assert abs(row.relative_error) <= limit, f"{row.id}: {row.relative_error:+.1%}"
        assert not row.used_for_calibration
