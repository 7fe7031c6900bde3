"""Compares published figures with predicted ones; every error is computed, none is typed in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal, TypeVar

from pydantic import BaseModel

from moesim.hwmodels.frozen import Frozen
from moesim.hwmodels.node import load_node
from moesim.hwmodels.validation import validate_model
from moesim.hwmodels.yaml_io import parse_mapping
from moesim.simulator.dispatchers.protocol import EpOperation
from moesim.simulator.layout.routing import Gate
from moesim.simulator.model.precision import Format
from moesim.simulator.predict.compile import prepare
from moesim.simulator.predict.result import Result
from moesim.simulator.predict.run_report import run_report
from moesim.simulator.predict.simulate import simulate
from moesim.simulator.predict.step import run_step
from moesim.simulator.run.report import RunReport
from moesim.simulator.scenario import Scenario, load_scenario, preset_names
from moesim.simulator.scenario.run_plan import RunPlan
from moesim.simulator.scoring.expert_kernels import KernelBenchmark, benchmark_seconds
from moesim.simulator.scoring.whole_runs import (
    ContextRow,
    Scored,
    context_plan_sensitivity,
    published_runs,
    score_goodput,
    score_report,
)

PROFILES = ("h800-trace", "h800-published", "h800-from-h200")
"""Profiles that are scored; the first is the preset's default (docs/decisions/0002-default-profile.md).

The last one was derived by rule from a calibration of H200. From H800 it takes the rates of the NICs, the gap
between launches and the shortest kernel, but no kernel rate."""

DataT = TypeVar("DataT", bound=BaseModel)


class Row(Frozen):
    """One published quantity and its prediction; `relative_error` = predicted / published - 1."""

    id: str
    source: str
    quantity: str
    unit: str
    published: float
    predicted: float
    relative_error: float
    used_for_calibration: bool


class Figure(Frozen):
    """A published figure, with the path of its prediction in a result."""

    id: str
    source: str
    quantity: str
    unit: str
    value: float
    scenario: str
    override: tuple[str, ...] = ()
    path: str
    scale: float
    calibrated_by: tuple[str, ...] = ()


class _Figures(Frozen):
    figures: tuple[Figure, ...]


class _DeepEpRow(Frozen):
    kernels: str
    ep: int
    operation: Literal["dispatch", "combine"]
    gb_per_s: float
    calibrated: bool
    source: str


class _DeepEpTable(Frozen):
    tokens: int
    hidden: int
    experts: int
    top_k: int
    sms: int
    node: str
    network: str
    profile: str
    rows: tuple[_DeepEpRow, ...]


Progress = Callable[[str], None]


def score(progress: Progress = lambda what: None) -> list[Row]:
    """Score the home case with each profile, then stand-alone kernels and goodput.

    `progress` is called with a short text before each simulation.
    """
    figures = _read(_Figures, "deepseek-v3.yaml").figures
    rows = []
    for profile in PROFILES:
        rows += _score_profile(figures, profile, progress) + score_run(profile, progress)
    return [*rows, *score_deepep(), *(_run_row(scored) for scored in score_goodput())]


def score_run(profile: str, progress: Progress = lambda what: None) -> list[Row]:
    """Score DeepSeek-V3's whole run, phase by phase."""
    progress(f"the whole run with {profile}")
    data = published_runs()
    result = simulate(load_scenario(data.scenario, [f"profile={profile}", f"run={data.plan}"]))
    assert result.run.report is not None
    return [_run_row(scored, f"@{result.profile}") for scored in score_report(result.run.report)]


def _run_row(scored: Scored, suffix: str = "") -> Row:
    return Row(
        id=scored.id + suffix,
        source=scored.source,
        quantity=scored.quantity,
        unit=scored.unit,
        published=scored.published,
        predicted=scored.predicted,
        relative_error=scored.predicted / scored.published - 1.0,
        used_for_calibration=False,
    )


def context_plans(progress: Progress = lambda what: None) -> list[ContextRow]:
    """GPU-hours of DeepSeek-V3's context extension under several plans, as its own is not published."""
    prepared = prepare(load_scenario(published_runs().scenario))

    def report_of(plan: RunPlan) -> RunReport:
        planned = prepared.under(prepared.scenario.model_copy(update={"run": plan}))
        return run_report(planned, 1.0)  # the main phase is not used

    return context_plan_sensitivity(report_of, progress)


def _read(cls: type[DataT], name: str) -> DataT:
    text = resources.files("moesim.simulator").joinpath("data", "published", name).read_text("utf-8")
    return validate_model(cls, parse_mapping(text, name), name)


def _score_profile(figures: tuple[Figure, ...], profile: str, progress: Progress) -> list[Row]:
    results: dict[tuple[str, ...], Result] = {}
    rows = []
    for figure in figures:
        key = (figure.scenario, *figure.override)
        if key not in results:
            progress(f"{figure.scenario} with {profile}")
            overrides = [f"profile={profile}", *figure.override]
            results[key] = simulate(load_scenario(figure.scenario, overrides))
        rows.append(_row(figure, results[key]))
    return rows


def _row(figure: Figure, result: Result) -> Row:
    predicted = lookup(result, figure.path) * figure.scale
    return Row(
        id=f"{figure.id}@{result.profile}",
        source=figure.source,
        quantity=figure.quantity,
        unit=figure.unit,
        published=figure.value,
        predicted=predicted,
        relative_error=predicted / figure.value - 1.0,
        used_for_calibration=result.profile in figure.calibrated_by,
    )


def beside_published(scenario: Scenario, result: Result) -> list[Row]:
    """Compare a result of a preset with the published figures; empty if the scenario was changed.

    The profile and the seed may differ from the preset's, as the published job is still the same.
    """
    if scenario.name not in preset_names():
        return []
    preset = load_scenario(scenario.name).model_copy(
        update={"profile": scenario.profile, "seed": scenario.seed}
    )
    if preset.model_dump() != scenario.model_dump():
        return []
    figures = _read(_Figures, "deepseek-v3.yaml").figures
    return [_row(f, result) for f in figures if f.scenario == scenario.name and not f.override]


def lookup(result: Result, path: str) -> float:
    """The number at a dotted path of a result; a phase of the overlapped pair is given by its name."""
    value: Any = result
    for part in path.split("."):
        if isinstance(value, tuple):
            value = next(item for item in value if item.phase == part)
        else:
            value = getattr(value, part)
    return float(value)


def score_deepep() -> list[Row]:
    """Score DeepEP's H800 table, predicted from link rates and the SM curve (docs/model.md, eq. X2)."""
    table = _read(_DeepEpTable, "deepep-h800.yaml")
    return [_deepep_row(table, row) for row in table.rows]


def _deepep_row(table: _DeepEpTable, row: _DeepEpRow) -> Row:
    setup = DeepEpSetup(
        table.tokens, table.hidden, table.experts, table.top_k, table.sms, table.node, table.network,
        table.profile,
    )  # fmt: skip
    predicted = deepep_bandwidth(row.operation, row.ep, row.kernels, setup)
    counted = "NVLink" if row.ep <= 8 else "RDMA"
    return Row(
        id=f"{row.kernels}.ep{row.ep}.{row.operation}",
        source=row.source,
        quantity=f"{row.operation} EP{row.ep} stand-alone, logical {counted} bandwidth",
        unit="GB/s",
        published=row.gb_per_s,
        predicted=predicted,
        relative_error=predicted / row.gb_per_s - 1.0,
        used_for_calibration=row.calibrated,
    )


@dataclass(frozen=True, slots=True)
class DeepEpSetup:
    """Setup of a stand-alone test of expert-parallel kernels; machine and profile are given by name.

    `tokens`: tokens of one GPU. `gate` and `wire`: None for those of DeepEP's tests (its own gate; FP8
    dispatch, BF16 combine).
    """

    tokens: int
    hidden: int
    experts: int
    top_k: int
    sms: int
    node: str
    network: str
    profile: str
    gate: Gate | None = None
    wire: Format | None = None


def deepep_bandwidth(operation: EpOperation, ep: int, kernels: str, setup: DeepEpSetup) -> float:
    """Logical bandwidth (GB/s) as DeepEP's tests count it: NVLink inside one node, RDMA across nodes.

    Logical bytes include those of the local node (or own rank). The time is notify plus payload on idle GPUs.
    """
    nodes = max(1, ep // load_node(setup.node).n_gpus)
    run = KernelBenchmark(
        operation, kernels, ep, setup.tokens, setup.hidden,
        setup.gate or Gate.deepep_test(nodes, setup.experts, setup.top_k),
        setup.wire or ("fp8" if operation == "dispatch" else "bf16"),
        setup.sms, setup.node, setup.network, setup.profile, "torch API",
    )  # fmt: skip
    return run.logical_bytes / benchmark_seconds(run) / 1e9


class Placement(Frozen):
    """One layer-to-stage placement and the step time it predicts."""

    name: str
    layers: tuple[int, ...]
    time_s: float
    relative_to_default: float


def placement_sensitivity(scenario: Scenario, progress: Progress = lambda what: None) -> list[Placement]:
    """Step time under the default placement of the layers, which comes first, and under others.

    The published reports do not say which layers a stage holds; this shows how much the choice matters.
    """
    stages = prepare(scenario).stages
    default = stages.layers_per_stage
    alternatives = {"default: balanced by compute": default, **_alternatives(default)}
    rows: list[Placement] = []
    for name, layers in alternatives.items():
        progress(f"stage placement: {name}")
        explicit = scenario.stages.model_copy(update={"layers": layers, "blocks": None})
        time_s = run_step(scenario.model_copy(update={"stages": explicit})).time_s
        base = rows[0].time_s if rows else time_s
        rows.append(
            Placement(name=name, layers=layers, time_s=time_s, relative_to_default=time_s / base - 1.0)
        )
    return rows


def _alternatives(default: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Other plausible placements of the layers."""
    n, total = len(default), sum(default)
    if n < 3:
        return {}
    base, extra = divmod(total, n)
    inner, inner_extra = divmod(total, n - 1)
    return {
        "layers even, extra ones first": tuple(base + (i < extra) for i in range(n)),
        "layers even, extra ones last": tuple(base + (i >= n - extra) for i in range(n)),
        "no layer beside the head": (*(inner + (i < inner_extra) for i in range(n - 1)), 0),
        "no layer beside the head, extra ones late": (
            *(inner + (i >= n - 1 - inner_extra) for i in range(n - 1)), 0,
        ),
    }  # fmt: skip
