"""Compares published figures with predicted ones; every error is computed, none is typed in."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, Literal

from msgspec import Struct

from moesim.hwmodels.calibration import load_profile
from moesim.hwmodels.failure import load_failure_rate, load_restart
from moesim.hwmodels.frozen import Frozen
from moesim.hwmodels.network import load_network
from moesim.hwmodels.node import Node, load_node
from moesim.hwmodels.units import SECONDS_PER_DAY, parse_quantity
from moesim.simulator.cost.transfers import dispatcher_transfer
from moesim.simulator.dispatchers.protocol import Call, EpOperation, LinkBytes, Links, notify_seconds
from moesim.simulator.dispatchers.registry import dispatcher
from moesim.simulator.layout.routing import Gate, expected_targets
from moesim.simulator.model.precision import Format, row_bytes
from moesim.simulator.predict.driver import simulate
from moesim.simulator.predict.result import Result
from moesim.simulator.predict.step import prepare, run_step
from moesim.simulator.predict.summarise import run_report
from moesim.simulator.run.events import NS, simulate_events
from moesim.simulator.run.failures import (
    FailureModel,
    Stop,
    Tier,
    optimal_interval_s,
)
from moesim.simulator.run.report import RunReport
from moesim.simulator.scenario import Scenario, load_scenario, preset_names
from moesim.simulator.scenario.run_plan import OPTIMAL, load_run_plan
from moesim.simulator.scoring import published_data

REPLICAS = 40


class _Published(Frozen):
    id: str
    quantity: str
    unit: str
    value: float


class _Phases(_Published):
    of: tuple[str, ...]


class _Total(_Published):
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

    @classmethod
    def of(
        cls,
        id_: str,
        source: str,
        words: tuple[str, str],
        figures: tuple[float, float],
        calibrated: bool = False,
    ) -> Row:
        """The row of `words` (quantity, unit) with `figures` (published, predicted)."""
        published, predicted = figures
        return cls(
            id=id_,
            source=source,
            quantity=words[0],
            unit=words[1],
            published=published,
            predicted=predicted,
            relative_error=predicted / published - 1.0,
            used_for_calibration=calibrated,
        )


@lru_cache(maxsize=1)
def published_runs() -> PublishedRuns:
    """The published figures of whole runs."""
    return published_data(PublishedRuns, "runs.yaml")


def score_report(report: RunReport, suffix: str = "") -> list[Row]:
    """Compare a report of the run plan `deepseek-v3` with DeepSeek-V3's published GPU-hours and dollars.

    `suffix`: added to the ids.
    """
    data = published_runs()
    hours = {row.phase: row.gpu_hours_with_stops for row in report.phases}
    predicted = [math.fsum(hours[name] for name in p.of) / 1e3 for p in data.phases]
    for total in data.totals:
        value: Any = report
        for part in total.path.split("."):
            value = getattr(value, part)
        predicted.append(value * total.scale)
    rows: list[_Published] = [*data.phases, *data.totals]
    return [
        Row.of(row.id + suffix, data.report, (row.quantity, row.unit), (row.value, one))
        for row, one in zip(rows, predicted, strict=True)
    ]


def score_goodput() -> list[Row]:
    """Compare published effective training times with simulated ones, none of which was fitted."""
    return [
        Row.of(c.id, f"{c.source} ({c.assumed})", (c.quantity, "1"), (c.value, goodput(c)))
        for c in published_runs().goodput
    ]


def goodput(case: GoodputCase) -> float:
    """Mean simulated share of wall time that is training."""
    between = load_failure_rate(case.failures).mean_time_between_s(case.nodes)
    stall = parse_quantity(case.stall, "s")
    if case.restart is not None:
        restart = load_restart(case.restart)
        assert restart.recovery is not None
        detection, recovery = restart.detection.value, restart.recovery.value
    else:
        detection, recovery = 0.0, parse_quantity(case.recovery or "", "s")
    work = case.days * SECONDS_PER_DAY
    optimal = case.interval == OPTIMAL
    interval = optimal_interval_s(stall, between) if optimal else parse_quantity(case.interval, "s")
    model = FailureModel(
        (Stop("any", 1.0 / between, detection, recovery),), (Tier(interval_s=interval, stall_s=stall),)
    )
    runs = simulate_events([work], model, REPLICAS, seed=0)
    return work * REPLICAS / math.fsum(run.wall_ns[0] / NS for run in runs)


class ContextRow(Struct, frozen=True):
    """GPU-hours of the two context extensions under one plan; `fits`: whether they fit into memory."""

    name: str
    first_gpu_hours: float
    second_gpu_hours: float
    fits: bool


PROFILES = ("h800-trace", "h800-published", "h800-from-h200")
"""Profiles that are scored; the first is the preset's default (docs/decisions/0002-default-profile.md).

The last one was derived by rule from a calibration of H200. From H800 it takes the rates of the NICs, the gap
between launches and the shortest kernel, but no kernel rate."""


class Figure(_Published):
    """A published figure, with the path of its prediction in a result."""

    source: str
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
    figures = published_data(_Figures, "deepseek-v3.yaml").figures
    rows = []
    for profile in PROFILES:
        results: dict[tuple[str, ...], Result] = {}
        for figure in figures:
            key = (figure.scenario, *figure.override)
            if key not in results:
                progress(f"{figure.scenario} with {profile}")
                overrides = [f"profile={profile}", *figure.override]
                results[key] = simulate(load_scenario(figure.scenario, overrides))
            rows.append(_row(figure, results[key]))
        rows += score_run(profile, progress)
    return [*rows, *score_deepep(), *score_goodput()]


def score_run(profile: str, progress: Progress = lambda what: None) -> list[Row]:
    """Score DeepSeek-V3's whole run, phase by phase."""
    progress(f"the whole run with {profile}")
    data = published_runs()
    result = simulate(load_scenario(data.scenario, [f"profile={profile}", f"run={data.plan}"]))
    assert result.run.report is not None
    return score_report(result.run.report, f"@{result.profile}")


def context_plans() -> list[ContextRow]:
    """GPU-hours of DeepSeek-V3's context extensions under several plans, as its own is not published."""
    data, rows = published_runs(), []
    plan, prepared = load_run_plan(data.plan), prepare(load_scenario(data.scenario))
    for choice in data.context_plans:
        first, second, *_ = plan.phases
        changed = (
            first.model_copy(update={"override": choice.first}),
            second.model_copy(update={"override": choice.second}),
        )
        run = plan.model_copy(update={"ramp": None, "phases": changed})
        planned = prepared.under(prepared.scenario.model_copy(update={"run": run}))
        report = run_report(planned, 1.0)  # the main phase is not used
        hours = [row.gpu_hours for row in report.phases[1:]]
        fits = not any("does not fit" in text for text in report.assumptions)
        rows.append(ContextRow(choice.name, hours[0], hours[1], fits))
    return rows


def _row(figure: Figure, result: Result) -> Row:
    figures = figure.value, lookup(result, figure.path) * figure.scale
    calibrated = result.profile in figure.calibrated_by
    words = figure.quantity, figure.unit
    return Row.of(f"{figure.id}@{result.profile}", figure.source, words, figures, calibrated)


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
    figures = published_data(_Figures, "deepseek-v3.yaml").figures
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
    table, rows = published_data(_DeepEpTable, "deepep-h800.yaml"), []
    setup = DeepEpSetup(**table.model_dump(exclude={"rows"}))
    for row in table.rows:
        counted = "NVLink" if row.ep <= 8 else "RDMA"
        words = f"{row.operation} EP{row.ep} stand-alone, logical {counted} bandwidth", "GB/s"
        figures = row.gb_per_s, deepep_bandwidth(row.operation, row.ep, row.kernels, setup)
        id_ = f"{row.kernels}.ep{row.ep}.{row.operation}"
        rows.append(Row.of(id_, row.source, words, figures, row.calibrated))
    return rows


class DeepEpSetup(Struct, frozen=True):
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


# -- stand-alone benchmarks of expert-parallel kernels ---------------------------------------------------

Timed = Literal["kernel only", "torch API"]
"""What a benchmark times: the kernel, or the call of its Python interface with all that it does."""
COPY_SHARE = 0.8
"""Share of the memory's nominal rate at which the interface copies the payload out of, or into, its buffer
(training reads and writes the buffer instead)."""


class KernelBenchmark(Struct, frozen=True):
    """One stand-alone benchmark of expert-parallel kernels; machine and profile are given by name."""

    operation: EpOperation
    kernels: str
    ranks: int
    tokens: float
    """Tokens of one rank."""
    hidden: int
    gate: Gate
    wire: Format
    sms: int
    node: str
    network: str
    profile: str
    timed: Timed

    @property
    def machine(self) -> Node:
        """The node itself."""
        return load_node(self.node)

    @property
    def nodes(self) -> int:
        """NVLink domains of the group."""
        return max(1, self.ranks // self.machine.n_gpus)

    @property
    def call(self) -> Call:
        """The call that it repeats; every dispatch is prepared anew."""
        return Call(
            self.ranks,
            self.nodes,
            self.sms,
            tokens=self.tokens,
            row_bytes=row_bytes(self.hidden, self.wire),
            wire=self.wire,
            row=self.hidden,
            choices=self.gate.top_k,
            experts=self.gate.experts,
            targets=partial(expected_targets, self.gate, self.ranks, min(self.ranks, self.machine.n_gpus)),
            phase="dispatch F" if self.operation == "dispatch" else "combine F",
        )

    @property
    def traffic(self) -> LinkBytes:
        """Bytes that one rank sends in a dispatch, or receives in a combine."""
        return dispatcher(self.kernels).traffic(self.call)

    @property
    def logical_bytes(self) -> float:
        """Bytes that the benchmark counts: to all nodes across nodes, else to all ranks, its own included."""
        return self.traffic.logical_ib_bytes if self.nodes > 1 else self.traffic.logical_nvlink_bytes


def benchmark_seconds(run: KernelBenchmark) -> float:
    """Predicted seconds of a benchmark on idle GPUs, of the kernel alone or of the whole call."""
    kind, links, traffic = dispatcher(run.kernels), _links(run), run.traffic
    transfer = dispatcher_transfer(kind, run.call, traffic, links, load_profile(run.profile))
    memory = run.machine.accelerator.hbm_bandwidth.value
    copied_s = 2.0 * traffic.logical_nvlink_bytes / (COPY_SHARE * memory)
    return kind.benchmark_s(
        transfer.launch_s,
        transfer.payload_s,
        notify_seconds(links, run.nodes),
        None if run.timed == "kernel only" else copied_s,
    )


def _links(run: KernelBenchmark) -> Links:
    node, fabric = run.machine, load_network(run.network).fabric
    return Links(
        scale_up_bytes_per_s=node.scale_up_bytes_per_s,
        scale_up_latency_s=node.scale_up_latency_s,
        nic_bytes_per_s=node.scale_out_bytes_per_s,
        nic_latency_s=fabric.latency_cross_leaf.value if fabric else 0.0,
        gpus_per_node=node.n_gpus,
        ep_per_node=run.ranks // run.nodes,
        adapter=node.adapter or "",
    )
