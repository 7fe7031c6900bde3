"""Results of a plan search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from msgspec import Struct
from msgspec.structs import asdict, replace

from moesim.hwmodels.arrays import FloatArray
from moesim.hwmodels.cluster import Cluster
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.summary_text import gib, percent, short, table_lines
from moesim.hwmodels.units import SECONDS_PER_DAY, SECONDS_PER_HOUR
from moesim.simulator.common.tables import html_table
from moesim.simulator.engine.program import NS, CompiledTemplate
from moesim.simulator.engine.records import Execution
from moesim.simulator.memory.gpu import Verdict, is_admitted, verdict_of
from moesim.simulator.model.operator import BlockKind, Phase
from moesim.simulator.model.precision import PRECISIONS
from moesim.simulator.model.recompute import recompute_label
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.planner.placements import placement_name, with_placement
from moesim.simulator.planner.plan_arrays import Candidates
from moesim.simulator.planner.refusals import Refusal
from moesim.simulator.predict.placement import fullest_of, memory_of
from moesim.simulator.predict.pools import pool_results
from moesim.simulator.predict.report import breakdowns, compute_ns, spans_ns
from moesim.simulator.predict.result_parts import MemoryResult, PoolResult
from moesim.simulator.predict.step import Prepared, PreparedPool, run_step
from moesim.simulator.predict.work_size import Band
from moesim.simulator.scenario import Scenario
from moesim.simulator.scenario.inputs import Inputs
from moesim.simulator.scenario.sections import Stages
from moesim.simulator.schedules.template import EP_PHASES
from moesim.simulator.studies.compare import step_draws

if TYPE_CHECKING:
    import pandas as pd


MOST_PLANS = 4
"""Ranked plans that a printed search shows."""

PLAN_COLUMNS = ("place", "plan", "step (s)", "from", "behind", "memory (GiB)", "days", "cost")

Source = Literal["simulated", "closed form"]


@dataclass(frozen=True, slots=True, repr=False)
class PlanRow:
    """One plan with its step time, memory and cost.

    `time_s` is the engine's if `source` is "simulated", else that of the closed form. `margin`: relative
    distance of its objective from the best. `variants`: number of legal plans that fit and differ from this
    one only in precision, recompute, communication SMs or ZeRO stage (each counted once, whatever its
    placement). `causes_s`: seconds of the simulated step by mechanism.
    """

    tp: int
    pp: int
    ep: int
    cp: int
    vpp: int
    dp: int
    expert_tp: int
    microbatch: int
    microbatches: int
    schedule: str
    zero_stage: int
    recompute: str
    precision: str
    sms: int
    placement: str
    """Placement of the experts as a space writes it: `in order`, or a policy with its redundant experts."""
    layers: tuple[int, ...]
    changed: Mapping[str, Any]
    """Scenario keys of `PlanSpace.variants`, with this plan's values."""
    time_s: float
    source: Source
    closed_form_s: float | None
    lower_bound_s: float | None
    """None for the scenario's own plan, which is not from the space."""
    memory_bytes: float
    """Bytes in use on the fullest GPU."""
    reserved_bytes: float
    """Most bytes that framework and allocator may reserve there (docs/model.md, eq. M10)."""
    capacity_bytes: float
    memory_by_kind_bytes: Mapping[str, float]
    days: float
    gpu_hours: float
    cost_usd: float | None
    energy_j: float | None
    """Energy of the run with every accelerator at its board's power limit, times the site's PUE if stated.

    None if the power limit is not published.
    """
    margin: float
    variants: int
    causes_s: Mapping[str, float]
    scenario: Scenario = field(repr=False, compare=False)
    pools: tuple[PoolResult, ...] = ()
    """The simulated step of each pool of a fleet; empty for a single cluster."""
    place: int | None = None
    """Place among the ranked plans, which tied plans share: no sign of their difference (eq. U2) is sure."""
    spread: Band | None = None
    """Step time over the predicted one; None where no interval was computed."""
    behind: Band | None = None
    """`margin` with its interval, from draws that both plans share; None where there is no interval."""

    @property
    def verdict(self) -> Verdict:
        """`fits`, `at risk` or `does not fit`, as in the memory of a prediction."""
        return verdict_of(self.memory_bytes, self.reserved_bytes, self.capacity_bytes)

    @property
    def headroom_bytes(self) -> float:
        """Memory left on the fullest GPU."""
        return self.capacity_bytes - self.memory_bytes

    @property
    def label(self) -> str:
        """The plan in the field's shorthand, such as TP1 PP8 EP64 DP32."""
        placed = "" if self.placement == "in order" else f" experts {self.placement}"
        etp = f" ETP{self.expert_tp}" if self.expert_tp > 1 else ""
        return (
            f"TP{self.tp} PP{self.pp} EP{self.ep} CP{self.cp} VPP{self.vpp} DP{self.dp}{etp} "
            f"MBS{self.microbatch} {self.schedule}{placed}"
        )

    def __repr__(self) -> str:
        """The plan with its step time, memory and cost."""
        return _row_text(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain values; the scenario becomes a mapping that can be saved as a scenario file."""
        values = {f: getattr(self, f) for f in self.__dataclass_fields__ if f != "scenario"}
        plain = {k: dict(v) if isinstance(v, Mapping) else v for k, v in values.items()}
        plain["layers"] = list(self.layers)
        if plain.pop("pools"):
            plain["pools"] = [pool.model_dump(mode="json") for pool in self.pools]
        for key in ("spread", "behind"):
            band: Band | None = getattr(self, key)
            plain[key] = None if band is None else band.model_dump()
        plain |= {"headroom_bytes": self.headroom_bytes, "verdict": self.verdict}
        plain["scenario"] = self.scenario.model_dump(mode="json", exclude_none=True)
        return plain


class PoolAlone(Struct, frozen=True):
    """The best plan of one pool alone with the same batch; `reason` says why there is none."""

    accelerator: str
    n_gpus: int
    plan: PlanRow | None
    reason: str = ""


class FleetVerdict(Struct, frozen=True):
    """Comparison of a fleet with each of its pools alone.

    `wins`: whether the fleet's step is shorter than that of every pool alone. `ideal_s`: step time if all
    pools shared the work without loss, each at the pace that it has alone (docs/model.md, eq. S5); None if
    one of them cannot run alone. `reached`: `ideal_s` over the fleet's step time.
    """

    alone: tuple[PoolAlone, ...]
    wins: bool
    ideal_s: float | None
    reached: float | None
    sentences: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        rows = [
            {
                "accelerator": row.accelerator,
                "n_gpus": row.n_gpus,
                "plan": None if row.plan is None else row.plan.to_dict(),
                "reason": row.reason,
            }
            for row in self.alone
        ]
        return {**asdict(self), "alone": rows, "sentences": list(self.sentences)}


class TrainerVerdict(Struct, frozen=True):
    """What limiting a search to one trainer costs.

    `replaced`: sentences on keys that the trainer runs in another way than the scenario says, priced as it
    runs them. `best_of_all`: the best plan of a search without the trainer's limits, for the scenario as it
    is written; None if no such plan fits. `reasons`: why the trainer cannot run it; empty where it can.
    """

    trainer: str
    replaced: tuple[str, ...]
    best_of_all: PlanRow | None
    reasons: tuple[str, ...]
    gain: float
    """Share of the objective that the best of all saves against the best that the trainer can run."""

    @property
    def sentences(self) -> tuple[str, ...]:
        """What the best of all plans would gain, and why the trainer cannot run it."""
        other = self.best_of_all
        if other is None:
            return ()
        if not self.reasons or self.gain <= 0.0:
            return (f"no other plan saves more than {max(0.0, self.gain):.1%} of the objective",)
        return (
            f"the best of all plans, {other.label} at {other.time_s:.2f} s a step, would save "
            f"{self.gain:.1%} of the objective; {self.trainer} cannot run it:",
            *self.reasons,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        best = None if self.best_of_all is None else self.best_of_all.to_dict()
        return {**asdict(replace(self, best_of_all=None)), "best_of_all": best}


@dataclass(frozen=True, slots=True, repr=False)
class PlanResult:
    """The best plans of a space, its Pareto front, and the reasons why other plans were refused.

    `considered` plans are either refused or `fitting`. Of the fitting plans, `estimated` were priced in
    closed form and `simulated` in the engine. Every fitting plan that was not estimated has a lower bound of
    at least `proven_s` seconds (None: all were estimated). `rivals`: families that were not simulated
    although their closed form is within its error of the best, so that the engine might have preferred one
    of them. For a fleet, memory is counted only for plans that may be ranked, so refused and fitting plans
    may be fewer than `considered`, and `pareto` is empty.
    """

    objective: str
    ranked: tuple[PlanRow, ...]
    pareto: tuple[PlanRow, ...]
    refused: tuple[Refusal, ...]
    own: PlanRow | None
    """The scenario's own plan, simulated; None where it is illegal or does not fit."""
    own_rank: int | None
    """Rank of the scenario's own plan: one plus the number of families with a faster estimate."""
    considered: int
    legal: int
    fitting: int
    estimated: int
    simulated: int
    price_tables: int
    proven_s: float | None
    rivals: int
    notes: tuple[str, ...]
    evaluated_per_s: float = field(compare=False)
    """Plans bounded per second of wall time; not part of `to_dict`."""
    seconds: Mapping[str, float] = field(compare=False)
    """Seconds of wall time by part of the search; not part of `to_dict`."""
    fleet: FleetVerdict | None = None
    """Comparison of a fleet with each of its pools alone; None for a single cluster."""
    trainer: TrainerVerdict | None = None
    """What limiting the search to a trainer costs; None for a search over all plans."""
    inputs: Inputs | None = None
    """What was planned: the scenario with its own plan. Each row has the scenario of its plan."""
    headroom: float | None = None
    """Share of the memory that the bytes in use leave free; None: no plan is at risk."""
    kept: tuple[str, ...] = ()
    """Sentences on the head-room, and on what the search kept or left unused of what the scenario states."""

    @property
    def best(self) -> PlanRow:
        """The first ranked plan."""
        return self.ranked[0]

    def __repr__(self) -> str:
        """The first ranked plans and what the search counted, in about ten lines."""
        # What was planned, without the plan of its own, which the rows replace.
        inputs = self.inputs
        lines = [
            *([] if inputs is None else [f"{inputs.name}:", *inputs.lines(plan=False)]),
            f"plans by {self.objective}: {self.considered:,} considered, {self.legal:,} legal, "
            f"{self.fitting:,} fit, {self.simulated:,} simulated",
            *table_lines([list(PLAN_COLUMNS), *self._table()], MOST_PLANS),
        ]
        if self.trainer is not None:
            lines.append(f"  {self.trainer.trainer}: {next(iter(self.trainer.sentences), 'searched alone')}")
        if self.own is not None:
            rank = "" if self.own_rank is None else f" (rank {self.own_rank})"
            lines.append(f"  the scenario's own plan{rank}: {_row_text(self.own)}{tied_text(self.own)}")
        if self.rivals:
            lines.append(f"  {self.rivals:,} further families are within the error of the closed form")
        lines += [f"  {sentence}" for sentence in self.kept]
        lines += [f"  note: {note}" for note in self.notes[:2]]
        return "\n".join([*lines, "  more: .best, .ranked, .pareto, .refused, .to_pandas()"])

    def _repr_html_(self) -> str:
        """The ranked plans as a table, for notebooks."""
        return html_table([dict(zip(PLAN_COLUMNS, cells, strict=True)) for cells in self._table()])

    def _table(self) -> list[list[str]]:
        return [_cells(row, self.ranked) for row in self.ranked]

    def to_dict(self) -> dict[str, Any]:
        """Plain values without wall times, so that equal inputs give equal values."""
        counts = (
            "considered", "legal", "fitting", "estimated", "simulated", "price_tables", "proven_s", "rivals",
        )  # fmt: skip
        return {
            **({} if self.inputs is None else {"inputs": self.inputs.model_dump(mode="json")}),
            "objective": self.objective,
            "ranked": [row.to_dict() for row in self.ranked],
            "pareto": [row.to_dict() for row in self.pareto],
            "refused": [asdict(refusal) for refusal in self.refused],
            "own": None if self.own is None else self.own.to_dict(),
            "own_rank": self.own_rank,
            **{key: getattr(self, key) for key in counts},
            "headroom": self.headroom,
            "kept": list(self.kept),
            "notes": list(self.notes),
            **({} if self.fleet is None else {"fleet": self.fleet.to_dict()}),
            **({} if self.trainer is None else {"trainer": self.trainer.to_dict()}),
        }

    def to_pandas(self) -> pd.DataFrame:
        """The ranked plans as a table. Raises InputError, with the remedy, where pandas is missing."""
        try:
            import pandas as pd
        except ImportError:
            raise InputError("to_pandas() needs pandas: pip install pandas") from None
        rows = [row.to_dict() for row in self.ranked]
        return pd.DataFrame([{k: v for k, v in row.items() if k != "scenario"} for row in rows])


def step_text(seconds: float) -> str:
    """Seconds of a step with four digits, so that a printed step is exact to 0.05 %."""
    return f"{seconds:#.4g}".rstrip(".") if seconds < 1e4 else f"{seconds:.0f}"


def place_text(row: PlanRow, rows: Sequence[PlanRow]) -> str:
    """The place of a row among others, with "=" where it shares the place: such plans are tied."""
    shared = sum(other.place == row.place for other in rows) > 1
    return "" if row.place is None else f"{row.place}{'=' if shared else ''}"


def tied_text(row: PlanRow) -> str:
    """What says that a plan cannot be told apart from the best; empty where it can, or nobody knows."""
    return ", tied with the best" if row.behind is not None and not row.behind.has_sign else ""


def _row_text(row: PlanRow) -> str:
    """One plan in a line: step time with its source, memory, duration and cost."""
    figures = dict(zip(PLAN_COLUMNS, _cells(row, (row,)), strict=True))
    return (
        f"{figures['plan']}, {row.recompute}, {row.precision}, {row.sms} SMs, ZeRO {row.zero_stage}: "
        f"{figures['step (s)']} s ({row.source}), {figures['memory (GiB)']} GiB, {figures['days']} days, "
        f"{figures['cost']}"
    )


def _cells(row: PlanRow, rows: Sequence[PlanRow]) -> list[str]:
    """The cells of a plan of `rows` below `PLAN_COLUMNS`."""
    return [
        place_text(row, rows),
        row.label,
        step_text(row.time_s),
        row.source,
        percent(row.margin),
        f"{gib(row.memory_bytes)} of {gib(row.capacity_bytes)}"
        + ("" if row.verdict == "fits" else f", {row.verdict}"),
        f"{row.days:.1f}",
        "no price" if row.cost_usd is None else f"${short(row.cost_usd)}",
    ]


# -- rows --------------------------------------------------------------------------------------------
# Turns a candidate into a scenario, simulates its step and makes the row of the result.


@dataclass(frozen=True, slots=True)
class PlanStep:
    """Time, memory and layout of a plan's step; `time_s` is None if the plan was not simulated."""

    time_s: float | None
    memory: MemoryResult
    causes: dict[str, float]
    layers: tuple[int, ...]
    microbatches: int
    pools: tuple[PoolResult, ...] = ()
    """The results of each pool of a fleet."""
    draws: FloatArray | None = field(default=None, repr=False, compare=False)
    """`studies.compare.relative_draws` of the plan, where they were asked for."""

    def keeps(self, headroom: float | None) -> bool:
        """Whether the plan leaves the head-room of a search on every pool (see `is_admitted`)."""
        counted = [pool.memory for pool in self.pools] or [self.memory]
        return all(is_admitted(m.total_bytes, m.range_bytes[1], m.capacity_bytes, headroom) for m in counted)


def simulate_plan(scenario: Scenario, *, draws: bool = False) -> PlanStep:
    """Simulate a plan (in a worker process), with its `step_draws` if asked. Raises InputError if illegal."""
    step = run_step(scenario)
    prepared, execution = step.prepared, step.executions[0]
    return PlanStep(
        step.time_s,
        prepared.memory,
        step_causes(prepared, execution),
        prepared.stages.layers_per_stage,
        prepared.schedule.microbatches,
        pool_results(prepared, execution) if prepared.of_fleet else (),
        step_draws(step) if draws else None,
    )


def scenario_of(
    base: Scenario, candidates: Candidates, number: int, placement: int | None = None
) -> Scenario:
    """The scenario of a candidate, ready for `simulate`, with its own placement or another one."""
    frame, p, r, s, z = candidates.axes(number)
    space = candidates.space
    which = int(candidates.placement[number]) if placement is None else placement
    return with_placement(base, space.placement[which]).model_copy(
        update={
            "parallel": frame.plan.model_copy(update={"zero_stage": space.zero_stage[z]}),
            "schedule": frame.schedule,
            "precision": space.precision[p],
            "recompute": space.recompute[r],
            "communication": base.communication.model_copy(update={"sms": space.sms[s]}),
            "stages": Stages(layers=candidates.assignment(number, which).layers_per_stage),
        }
    )


def closed_form_memory(
    scenario: Scenario,
    shape: ModelShape,
    cluster: Cluster,
    candidates: Candidates,
    number: int,
    placement: int | None = None,
) -> PlanStep:
    """Memory by kind of a plan that was not simulated, with its own placement or another one.

    `shape` and `cluster` are what the scenario names, loaded once for all plans.
    """
    frame = candidates.axes(number)[0]
    assignment = candidates.assignment(number, placement)
    report = memory_of(scenario, shape, cluster, assignment, frame.in_flight, frame.microbatches)
    memory = fullest_of(report, range(len(report.by_rank)))
    return PlanStep(None, memory, {}, assignment.layers_per_stage, frame.microbatches)


def make_row(
    scenario: Scenario,
    cluster: Cluster,
    step: PlanStep,
    closed_form_s: float | None = None,
    lower_bound_s: float | None = None,
    variants: int = 1,
    changed: Mapping[str, Any] = MappingProxyType({}),
) -> PlanRow:
    """A row of the result; `margin` stays 0 until the best plan is known.

    `variants`: number of plans that differ only in precision, recompute, SMs or ZeRO stage. `changed`:
    scenario keys and values of the space's variant.
    """
    plan = scenario.parallel
    seconds = closed_form_s if step.time_s is None else step.time_s
    assert seconds is not None, "a plan has a simulated or an estimated time"
    tokens = scenario.batch.sequences * scenario.batch.sequence_length
    run_s = -(-scenario.run.tokens // tokens) * seconds
    gpu_hours = run_s / SECONDS_PER_HOUR * cluster.n_gpus
    price = cluster.price_per_gpu_hour
    limit = cluster.accelerator.tdp
    pue = cluster.energy.pue.value if cluster.energy else 1.0
    return PlanRow(
        tp=plan.tp,
        pp=plan.pp,
        ep=plan.ep,
        cp=plan.cp,
        vpp=plan.vpp,
        dp=cluster.n_gpus // (plan.tp * plan.cp * plan.pp),
        expert_tp=plan.expert_tp,
        microbatch=plan.microbatch,
        microbatches=step.microbatches,
        schedule=scenario.schedule,
        zero_stage=plan.zero_stage,
        recompute=recompute_label(scenario.recompute),
        precision=precision_name(scenario),
        sms=scenario.communication.sms,
        placement=placement_name(scenario.routing.eplb),
        layers=step.layers,
        changed=dict(changed),
        time_s=seconds,
        source="closed form" if step.time_s is None else "simulated",
        closed_form_s=closed_form_s,
        lower_bound_s=lower_bound_s,
        memory_bytes=step.memory.total_bytes,
        reserved_bytes=step.memory.range_bytes[1],
        capacity_bytes=step.memory.capacity_bytes,
        memory_by_kind_bytes=step.memory.by_kind_bytes,
        days=run_s / SECONDS_PER_DAY,
        gpu_hours=gpu_hours,
        cost_usd=gpu_hours * price.value if price else None,
        energy_j=run_s * cluster.n_gpus * cluster.accelerator.tdp_w * pue if limit else None,
        margin=0.0,
        variants=variants,
        causes_s=step.causes,
        scenario=scenario,
        pools=step.pools,
    )


def precision_name(scenario: Scenario) -> str:
    """Name of the recipe; one without a name is described by the nearest that has one."""
    if isinstance(scenario.precision, str):
        return scenario.precision
    fields = dict(scenario.precision)
    differing = {
        name: [f"{key}={fields[key]}" for key, value in known if fields[key] != value]
        for name, known in PRECISIONS.items()
    }
    name = min(differing, key=lambda known: len(differing[known]))
    return " ".join([name, *differing[name]])


# -- causes ----------------------------------------------------------------------------------------
# Splits a simulated step into mechanisms, by which two plans can be compared.

CAUSES = (
    "arithmetic, alone on all SMs",
    "recompute",
    "SMs and bandwidth left to communication, uneven ranks",
    "waiting for communication",
    "bubble",
    "gradients and parameters over the network",
    "optimizer",
)
"""Mechanisms in the order of `step_causes`; their seconds add up to the step."""


def step_causes(prepared: Prepared, execution: Execution) -> dict[str, float]:
    """Seconds of a step by mechanism, mean over pipeline ranks (docs/model.md, eq. P4).

    Every pipeline rank pays the prices of its own pool.
    """
    owners, table = prepared.owners, execution.table
    ranks = len(execution.program.ranks)
    repeated = {number: _recompute(p) for number, p in {id(p): p for p in owners}.items()}
    alone: dict[int, tuple[float, float]] = {}
    totals = [0.0, 0.0]
    for rank, code, actions in execution.tasks.groups:
        if code not in alone:
            alone[code] = _alone(owners[rank], table.codes[code], repeated[id(owners[rank])])
        totals = [total + len(actions) * part for total, part in zip(totals, alone[code], strict=True)]
    arithmetic, again = (total / ranks for total in totals)
    compute = fsum(compute_ns(table).tolist()) / NS / ranks
    span = fsum(spans_ns(execution).tolist()) / NS / ranks
    update = fsum(s.optimizer[1] - s.optimizer[0] for s in execution.syncs) / NS / ranks
    rows = breakdowns(execution)
    end = fsum(row.optimizer for row in rows) / ranks
    bubble = fsum(row.bubble for row in rows) / ranks
    values = (arithmetic, again, compute - arithmetic - again, span - compute, bubble, end - update, update)
    return dict(zip(CAUSES, values, strict=True))


def difference(plan: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    """Extra seconds of `plan` over `other` by mechanism, largest difference first."""
    gaps = {cause: plan[cause] - other[cause] for cause in CAUSES}
    return dict(sorted(gaps.items(), key=lambda item: -abs(item[1])))


def _alone(
    pool: PreparedPool, code: CompiledTemplate, recompute: Mapping[tuple[BlockKind, Phase], float]
) -> tuple[float, float]:
    """Seconds of (first-time work, recomputation) of an action that runs alone on all SMs."""
    costs = pool.programs[0].costs
    work = again = 0.0
    for task in code.tasks:
        if task.phase in EP_PHASES or task.transfer is not None:
            continue
        price = costs.compute.get((task.kind, task.phase, "alone"))
        if price is not None:
            repeated = recompute.get((task.kind, task.phase), 0.0)
            work += price.fixed_s + price.row_s - price.exposed_s - price.host_s - repeated
            again += repeated
    return work, again


def _recompute(pool: PreparedPool) -> dict[tuple[BlockKind, Phase], float]:
    """Seconds of the recomputed operators, by block kind and phase."""
    pricer, seconds = pool.pricer, {}
    for kind in sorted({block.kind for stage in pool.stages.stages for block in stage}):
        for phase, operators in pricer.operators(kind).items():
            costs = pricer.operator_costs(kind, phase, "alone")
            seconds[kind, phase] = fsum(
                cost.seconds for op, cost in zip(operators, costs, strict=True) if op.recompute
            )
    return seconds
