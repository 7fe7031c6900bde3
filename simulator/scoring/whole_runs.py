"""Compares published figures of whole runs with simulated ones, and varies the unpublished plans."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any

from moesim.hwmodels.failure import load_failure_rate, load_restart
from moesim.hwmodels.frozen import Frozen
from moesim.hwmodels.units import SECONDS_PER_DAY, parse_quantity
from moesim.hwmodels.validation import validate_model
from moesim.hwmodels.yaml_io import parse_mapping
from moesim.simulator.run.checkpoint import optimal_interval_s
from moesim.simulator.run.failures import FailureModel, simulate_failures
from moesim.simulator.run.report import RunReport
from moesim.simulator.scenario.run_plan import OPTIMAL, RunPlan, load_run_plan

FILE = "data/published/runs.yaml"
REPLICAS = 200


class _Phases(Frozen):
    id: str
    quantity: str
    unit: str
    value: float
    of: tuple[str, ...]


class _Total(Frozen):
    id: str
    quantity: str
    unit: str
    value: float
    path: str
    scale: float


class GoodputCase(Frozen):
    """A published goodput with the published rates of the same run; `assumed` states the other inputs."""

    id: str
    source: str
    quantity: str
    value: float
    nodes: int
    days: float
    failures: str
    restart: str | None = None
    recovery: str | None = None
    """Recovery time without detection, in place of `restart`."""
    interval: str
    stall: str
    assumed: str


class ContextPlan(Frozen):
    """Overrides of the two context extensions of the run plan."""

    name: str
    first: tuple[str, ...]
    second: tuple[str, ...]


class PublishedRuns(Frozen):
    """The file `data/published/runs.yaml`."""

    plan: str
    scenario: str
    report: str
    phases: tuple[_Phases, ...]
    totals: tuple[_Total, ...]
    goodput: tuple[GoodputCase, ...]
    context_plans: tuple[ContextPlan, ...]


@dataclass(frozen=True, slots=True)
class Scored:
    """One published figure of a run and its prediction."""

    id: str
    source: str
    quantity: str
    unit: str
    published: float
    predicted: float


@lru_cache(maxsize=1)
def published_runs() -> PublishedRuns:
    """The published figures of whole runs."""
    text = resources.files("moesim.simulator").joinpath(FILE).read_text("utf-8")
    return validate_model(PublishedRuns, parse_mapping(text, FILE), FILE)


def score_report(report: RunReport) -> list[Scored]:
    """Compare a report of the run plan `deepseek-v3` with DeepSeek-V3's published GPU-hours and dollars."""
    data = published_runs()
    hours = {row.phase: row.gpu_hours_with_stops for row in report.phases}
    rows = [
        Scored(p.id, data.report, p.quantity, p.unit, p.value, math.fsum(hours[name] for name in p.of) / 1e3)
        for p in data.phases
    ]
    for total in data.totals:
        value: Any = report
        for part in total.path.split("."):
            value = getattr(value, part)
        rows.append(
            Scored(total.id, data.report, total.quantity, total.unit, total.value, value * total.scale)
        )
    return rows


def score_goodput() -> list[Scored]:
    """Compare published effective training times with simulated ones, none of which was fitted."""
    return [
        Scored(case.id, f"{case.source} ({case.assumed})", case.quantity, "1", case.value, goodput(case))
        for case in published_runs().goodput
    ]


def goodput(case: GoodputCase) -> float:
    """Mean simulated share of wall time that is training."""
    between = load_failure_rate(case.failures).mean_time_between_s(case.nodes)
    stall = parse_quantity(case.stall, "s")
    if case.restart is not None:
        restart = load_restart(case.restart)
        detection, recovery = restart.detection.value, restart.recovery.value
    else:
        detection, recovery = 0.0, parse_quantity(case.recovery or "", "s")
    work = case.days * SECONDS_PER_DAY
    model = FailureModel(
        rate_per_s=1.0 / between,
        interval_s=optimal_interval_s(stall, between)
        if case.interval == OPTIMAL
        else parse_quantity(case.interval, "s"),
        stall_s=stall,
        detection_s=detection,
        restart_s=recovery,
    )
    wall = simulate_failures([work], model, REPLICAS, seed=0).wall[0]
    return work * REPLICAS / math.fsum(wall.tolist())


@dataclass(frozen=True, slots=True)
class ContextRow:
    """GPU-hours of the two context extensions under one plan; `fits`: whether they fit into memory."""

    name: str
    first_gpu_hours: float
    second_gpu_hours: float
    fits: bool


def context_plan_sensitivity(
    report_of: Callable[[RunPlan], RunReport], progress: Callable[[str], None] = lambda what: None
) -> list[ContextRow]:
    """GPU-hours of DeepSeek-V3's context extensions under several plans, as its own is not published."""
    data, rows = published_runs(), []
    plan = load_run_plan(data.plan)
    for choice in data.context_plans:
        progress(f"context extension: {choice.name}")
        first, second, *_ = plan.phases
        changed = (
            first.model_copy(update={"override": choice.first}),
            second.model_copy(update={"override": choice.second}),
        )
        report = report_of(plan.model_copy(update={"ramp": None, "phases": changed}))
        hours = [row.gpu_hours for row in report.phases[1:]]
        rows.append(
            ContextRow(
                choice.name, hours[0], hours[1], not any("does not fit" in a for a in report.assumptions)
            )
        )
    return rows
