"""Compares published figures with predicted ones; every error is computed, none is typed in."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from moesim.hwmodels.cluster import load_cluster
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.failure import load_failure_rate, load_restart, load_storage
from moesim.hwmodels.frozen import Frozen
from moesim.hwmodels.node import load_node
from moesim.hwmodels.units import SECONDS_PER_DAY, parse_quantity
from moesim.hwmodels.validation import validate_model
from moesim.simulator.dispatchers.protocol import EpOperation
from moesim.simulator.layout.routing import Gate
from moesim.simulator.model.precision import PRECISIONS, Format
from moesim.simulator.predict.driver import simulate
from moesim.simulator.predict.result import Result
from moesim.simulator.predict.step import prepare, run_step
from moesim.simulator.predict.summarise import run_report
from moesim.simulator.run.events import NS, simulate_events
from moesim.simulator.run.failures import (
    FailureModel,
    Groups,
    Stop,
    Tier,
    expected_wall_s,
    optimal_interval_s,
)
from moesim.simulator.run.report import RunReport
from moesim.simulator.run.simulate_run import interruptions
from moesim.simulator.scenario import Scenario, load_scenario, preset_names
from moesim.simulator.scenario.run_plan import OPTIMAL, RunPlan, load_run_plan
from moesim.simulator.scoring import file_records, published_data, published_records
from moesim.simulator.scoring.expert_kernels import KernelBenchmark, benchmark_seconds

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


# -- reliability of other runs ----------------------------------------------------------------------------

RELIABILITY = "reliability-rows.csv"
RELIABILITY_COLUMNS = frozenset(
    ("source", "system", "model", "n_gpus", "conditions", "metric", "unit", "value", "use")
)
WITHIN_SHARE, WITHIN_POINTS = 0.30, 3.0
"""How far a judged time (relative) and a judged percentage (points) may be off."""
FAULTS, OTHER_FAULTS = "llama3-16k-h100", "meta-rsc1"
GPUS_A_NODE, BYTEDANCE_GPUS_A_NODE = 8, 16
BYTES_A_PARAMETER = 12.0
"""FP32 master weights and moments, as Megatron keeps them."""
PEER_BYTES_PER_S, HOST_BYTES_PER_S = 50e9, 63e9
"""NIC and host link of an H100, for rows that do not say what they ran on."""
TOLERANT_GROUPS = 128
METHODS = {"requeue": "requeued", "reschedul": "requeued", "standby": "warm", "oracle": "warm",
           "in-place": "in place", "hot update": "in place"}  # fmt: skip
"""How a job comes back, by words of the row's conditions."""


class ReliabilityRow(Frozen):
    """A published restart, blocking time or goodput beside its prediction.

    `error`: relative, or in points for a percentage. `judged`: whether the source states what the prediction
    needs. `basis`: what it stands on, or why there is none.
    """

    source: str
    quantity: str
    n_gpus: int | None
    unit: str
    published: float
    predicted: float | None
    error: float | None
    judged: bool
    within: bool | None
    basis: str


def reliability_rows(file: Path | None = None) -> list[ReliabilityRow]:
    """Score the outcome rows of the shipped table or of a file with the same columns.

    Raises InputError for a value that is no number.
    """
    records = published_records(RELIABILITY) if file is None else file_records(file)
    stalls = {r["conditions"]: _number(r, "value") * 60.0 for r in records if r["metric"] == "stall_time"}
    return [_reliability_row(r, stalls) for r in records if r["use"] == "outcome"]


def _number(record: Mapping[str, str], key: str) -> float:
    try:
        value = float(record[key])
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise InputError(f"{record['source']}, {record['conditions']}: {key}={record[key]!r} is no number")
    return value


def _reliability_row(record: Mapping[str, str], stalls: Mapping[str, float]) -> ReliabilityRow:
    published = _number(record, "value")
    gpus = int(_number(record, "n_gpus")) if record["n_gpus"].strip() else None
    predicted, judged, basis = _predicted(record, gpus, stalls)
    error = within = None
    if predicted is not None:
        points = record["unit"].startswith("%")
        error = predicted - published if points else predicted / published - 1.0
        within = abs(error) <= (WITHIN_POINTS if points else WITHIN_SHARE) if judged else None
    return ReliabilityRow(
        source=record["source"].split(",")[0],
        quantity=f"{record['metric'].replace('_', ' ')}: {record['model']}, {record['conditions']}",
        n_gpus=gpus, unit=record["unit"], published=published, predicted=predicted, error=error,
        judged=judged and predicted is not None, within=within, basis=basis,
    )  # fmt: skip


Prediction = tuple[float | None, bool, str]


def _predicted(record: Mapping[str, str], gpus: int | None, stalls: Mapping[str, float]) -> Prediction:
    """(prediction, whether its inputs are stated, what it stands on or why there is none)."""
    metric, words = record["metric"], record["conditions"].lower()
    if metric == "restart_time" and gpus is not None:
        return _restart_time(record, gpus, words)
    if metric == "init_time":
        size = gpus or _thousands(words)
        parts = load_restart("by-parts").parts
        if size and parts is not None:
            return size * parts.communicators.value, True, "2.7 ms a GPU, for all groups of a training job"
    if metric == "blocking_time" and gpus is not None:
        return _blocking_time(record, gpus, words)
    if metric == "relative_MFU":
        return None, False, "the step time is not stated"
    if metric == "mean_time_between_failures" and gpus is not None:
        minutes, other = (
            load_failure_rate(name).mean_time_between_s(gpus // GPUS_A_NODE) / 60.0
            for name in (FAULTS, OTHER_FAULTS)
        )
        return minutes, False, f"rate {FAULTS}; {other:.1f} with {OTHER_FAULTS}; the cards are not stated"
    if metric == "effective_training_time":
        return _effective_time(gpus or 98_304, words, stalls)
    return None, False, "neither failure rate, restart nor length of the jobs is stated"


def _thousands(words: str) -> int:
    found = re.search(r"(\d+)k gpus", words)
    return int(found[1]) * 1024 if found else 0


def _restart_time(record: Mapping[str, str], gpus: int, words: str) -> Prediction:
    parts = load_restart("by-parts").parts
    how = next((how for word, how in METHODS.items() if word in words), None)
    if parts is None or how is None:
        return None, False, "this way to restart is not in the model"
    each = BYTEDANCE_GPUS_A_NODE if record["system"].startswith("ByteDance") else GPUS_A_NODE
    seconds = parts.seconds(gpus // each, gpus, 0.0, how)
    return (
        seconds.total - seconds.isolation, True,
        f"restart by-parts, {how}, without isolation and loading; machines of {each} GPUs",
    )  # fmt: skip


def _blocking_time(record: Mapping[str, str], gpus: int, words: str) -> Prediction:
    found = re.match(r"(\d+(?:\.\d+)?)B", record["model"])
    if found is None:
        return None, False, "the size of the model is not stated"
    size = float(found[1]) * 1e9 * BYTES_A_PARAMETER
    if "megatron" in words:
        write = load_storage("deepseek-3fs").write_bytes_per_s(gpus // BYTEDANCE_GPUS_A_NODE)
        return size / write, False, "a write to 3FS; the storage and the plan are not stated"
    if "memory" in words:
        return size / gpus / PEER_BYTES_PER_S, False, "a copy over an H100's NIC; the cards are not stated"
    return size / gpus / HOST_BYTES_PER_S, False, "a copy over an H100's host link; the cards are not stated"


def _effective_time(gpus: int, words: str, stalls: Mapping[str, float]) -> Prediction:
    """Goodput in % of Llama 3 405B on so many GPUs, with the stall that the source states."""
    tolerant = "synchronous" not in words
    stall = next((s for name, s in stalls.items() if ("synchronous" in name) != tolerant), None)
    if stall is None:
        return None, False, "the stall of a recovery is not stated"
    write = 405e9 * BYTES_A_PARAMETER / load_storage("deepseek-3fs").write_bytes_per_s(gpus // GPUS_A_NODE)
    shares = []
    for name in (FAULTS, OTHER_FAULTS):
        between = load_failure_rate(name).mean_time_between_s(gpus // GPUS_A_NODE)
        tier = Tier(interval_s=optimal_interval_s(write, between), stall_s=write)
        stop = Stop("any", 1.0 / between, 0.0, stall)
        model = FailureModel((stop,), (tier,))
        if tolerant:
            nodes = gpus // GPUS_A_NODE // TOLERANT_GROUPS
            parts = load_restart("by-parts")
            back = parts.recovery_s(nodes, nodes * GPUS_A_NODE, 0.0, "requeued")
            groups = Groups(TOLERANT_GROUPS, 1, True, nodes, stall_s=stall)
            model = FailureModel((replace(stop, restart_s=back),), (Tier(),), groups=groups)
        work = 30 * SECONDS_PER_DAY
        shares.append(100.0 * work / expected_wall_s([work], model))
    what = f"{TOLERANT_GROUPS} groups" if tolerant else "checkpoints of 405B at the best interval to 3FS"
    basis = f"the stated stall, rate {FAULTS}, {what}; {shares[1]:.1f} with {OTHER_FAULTS}"
    return shares[0], False, f"{basis}; cards, model and checkpoints are not stated"


class LlamaRow(Frozen):
    """Llama 3 on 16,384 H100 in 54 days by one failure rate: stops and effective training time."""

    rate: str
    kind: Literal["identity", "prediction"]
    stops: float
    goodput: float


def llama_rows() -> list[LlamaRow]:
    """The 419 stops of Llama 3 from its own table (an identity), and from rates of RSC (predictions).

    The effective time has restarts by parts and checkpoints at the best interval to Tectonic.
    """
    rows = []
    cluster = load_cluster("h100-1024").model_copy(update={"nodes": 2048})
    for name in (FAULTS, OTHER_FAULTS, "meta-rsc2", "meta-rsc1-1024-gpu-jobs"):
        keys = {"tokens": 15.6e12, "failures": name, "restart": "by-parts",
                "checkpoint": {"interval": OPTIMAL, "storage": "llama3-tectonic"}}  # fmt: skip
        plan = validate_model(RunPlan, keys, "llama")
        stops = interruptions(plan, cluster, 405_000_000_000, PRECISIONS["bf16"])
        work = 54 * SECONDS_PER_DAY
        share = work / stops.expected_seconds([work])
        runs = simulate_events([work * share], stops.model, REPLICAS, seed=0)
        wall = math.fsum(run.wall_ns[0] / NS for run in runs)
        count = sum(sum(run.stops.values()) for run in runs)
        standing = math.fsum(run.seconds("detection") for run in runs)  # in which the model has no faults
        kind: Literal["identity", "prediction"] = "identity" if name == FAULTS else "prediction"
        rows.append(
            LlamaRow(rate=name, kind=kind, stops=count / (wall - standing) * work,
                     goodput=work * share * REPLICAS / wall)
        )  # fmt: skip
    return rows


@dataclass(frozen=True, slots=True)
class ContextRow:
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
