"""Explains a step time in sentences and a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import fsum
from typing import Any, TypeVar

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from pydantic import Field

from moesim.hwmodels.arrays import FloatArray
from moesim.hwmodels.frozen import Frozen
from moesim.simulator.common.tables import Row, TableResult
from moesim.simulator.cost.cost_table import cost_table
from moesim.simulator.cost.pricing import Pricer
from moesim.simulator.cost.table import PAIR_MODES, CostTable, PhaseCost, SyncCost, TransferCost
from moesim.simulator.engine.compilation import compile_program
from moesim.simulator.engine.link_map import LinkMap
from moesim.simulator.engine.program import MemberVariation, PricedSchedule, Program
from moesim.simulator.engine.records import step_time_s
from moesim.simulator.engine.task_durations import LOAD_TOLERANCE
from moesim.simulator.predict.fleet import joined_program
from moesim.simulator.predict.result import Result
from moesim.simulator.predict.result_parts import HostReport, MemoryResult
from moesim.simulator.predict.step import Prepared, PreparedPool
from moesim.simulator.scenario.defaults import Default, is_answer
from moesim.simulator.scenario.inputs import Inputs
from moesim.simulator.schedules.template import EP_PHASES, SHARDING_PHASES
from moesim.simulator.studies.compare import causes

# -- switched off ------------------------------------------------------------------------------------
# Causes of a step's seconds, each as a change of the program's inputs that switches it off (pure).
#
# A change returns the object that it was given where its cause is absent (docs/model.md, eq. T3).

ChangeOfCosts = Callable[[PreparedPool, CostTable], CostTable]
ChangeOfVariation = Callable[[PreparedPool, Program, MemberVariation], MemberVariation]
ChangeOfLinks = Callable[[PreparedPool, LinkMap], LinkMap]


class SwitchableCause(Struct, frozen=True):
    """A cause by name, with the changes of prices, differences between members and links that remove it."""

    name: str
    costs: ChangeOfCosts = lambda pool, costs: costs
    variation: ChangeOfVariation = lambda pool, program, variation: variation
    links: ChangeOfLinks = lambda pool, link_map: link_map


Price = TypeVar("Price", PhaseCost, TransferCost, SyncCost)


def _with_fields(price: Price, seconds: Mapping[str, float]) -> Price:
    """The price with other seconds, by name of the field."""
    changes: dict[str, Any] = dict(seconds)
    return dataclasses.replace(price, **changes)


# -- prices ----------------------------------------------------------------------------------------------


def _without_recompute(pool: PreparedPool, costs: CostTable) -> CostTable:
    """Prices of the same plan that keeps all activations."""
    if pool.scenario.recompute == "none":
        return costs
    keeping = pool.scenario.model_copy(update={"recompute": "none"})
    priced = cost_table(Pricer.shared(pool.job.with_scenario(keeping)), pool.schedule, pool.stages)
    return costs if (priced.compute, priced.transfer) == (costs.compute, costs.transfer) else priced


def _without_interference(pool: PreparedPool, costs: CostTable) -> CostTable:
    """Compute in overlapped pairs at its price alone on all SMs, with its own stalls of the host."""
    changed = dict(costs.compute)
    for kind, phase, mode in costs.compute:
        alone = costs.compute.get((kind, phase, "alone"))
        if mode in PAIR_MODES and alone is not None:
            own_s = costs.compute[kind, phase, mode].host_s
            changed[kind, phase, mode] = (
                alone
                if own_s == alone.host_s
                else dataclasses.replace(alone, fixed_s=alone.fixed_s - alone.host_s + own_s, host_s=own_s)
            )
    return costs if changed == costs.compute else dataclasses.replace(costs, compute=changed)


def _without_part(part: str, pool: PreparedPool, costs: CostTable) -> CostTable:
    """Compute without its seconds of `host_s` or `exposed_s`."""

    def shorter(price: PhaseCost) -> PhaseCost:
        seconds: float = getattr(price, part)
        if not seconds:
            return price
        return _with_fields(price, {"fixed_s": max(0.0, price.fixed_s - seconds), part: 0.0})

    changed = {key: shorter(price) for key, price in costs.compute.items()}
    return costs if changed == costs.compute else dataclasses.replace(costs, compute=changed)


def _without_transfer_times(
    phases: frozenset[str], seconds: tuple[str, ...], pool: PreparedPool, costs: CostTable
) -> CostTable:
    """Transfers of some phases without some of their seconds; their barriers remain."""

    def shorter(price: TransferCost) -> TransferCost:
        return _with_fields(price, dict.fromkeys(seconds, 0.0))

    changed = {key: shorter(price) if key[1] in phases else price for key, price in costs.transfer.items()}
    return costs if changed == costs.transfer else dataclasses.replace(costs, transfer=changed)


def _without_sends(pool: PreparedPool, costs: CostTable) -> CostTable:
    return dataclasses.replace(costs, send_s=0.0) if costs.send_s else costs


def _without_end(part: str, pool: PreparedPool, costs: CostTable) -> CostTable:
    """The end of the step without one of its parts, a field of `SyncCost`."""
    if not any(getattr(sync, part) for sync in costs.sync):
        return costs
    return dataclasses.replace(costs, sync=tuple(_with_fields(sync, {part: 0.0}) for sync in costs.sync))


# -- differences between members, and links --------------------------------------------------------------


def _with_even_load(pool: PreparedPool, program: Program, variation: MemberVariation) -> MemberVariation:
    """Every member receives the mean of its group, which is below 1 where capacity drops rows."""
    loads, node_loads = _evened(variation.loads), _evened(variation.node_loads)
    if np.array_equal(loads, variation.loads) and np.array_equal(node_loads, variation.node_loads):
        return variation
    return replace(variation, loads=loads, node_loads=node_loads)


def _evened(loads: FloatArray) -> FloatArray:
    if not loads.size:
        return loads
    mean = loads.mean(axis=2, keepdims=True)
    mean[np.abs(mean - 1.0) < LOAD_TOLERANCE] = 1.0
    return np.ascontiguousarray(np.broadcast_to(mean, loads.shape))


def _with_equal_clocks(pool: PreparedPool, program: Program, variation: MemberVariation) -> MemberVariation:
    """Without the drawn differences of speed; a GPU that a fault slows down stays slow."""
    if pool.scenario.variation.clock_cv.value == 0.0:
        return variation
    members = None if pool.whole is None else program.members
    drawn = pool.draws.variation(program.group, members).clock
    return replace(variation, clock=variation.clock / drawn)


def _without_jitter(pool: PreparedPool, program: Program, variation: MemberVariation) -> MemberVariation:
    """The variation without the jitter that all GPUs have; what a fault adds is kept."""
    usual, cv = pool.scenario.variation.jitter_cv.value, variation.jitter_cv
    if usual == 0.0:
        return variation
    if isinstance(cv, float):
        return replace(variation, jitter_cv=0.0)
    squares = np.where(np.isclose(cv, usual), 0.0, np.maximum(cv**2 - usual**2, 0.0))
    return replace(variation, jitter_cv=np.sqrt(squares) if squares.any() else 0.0)


def _with_wide_links(pool: PreparedPool, link_map: LinkMap) -> LinkMap:
    """Links that are never full, so that every transfer and send takes as long as alone."""
    costs = pool.programs[0].costs
    used = costs.send_s > 0.0 or any(price.payload_s > 0.0 for price in costs.transfer.values())
    return link_map.never_full() if used else link_map


_ALL_SECONDS = ("launch_s", "nic_s", "scale_up_s")
_END = {
    "reduce_s": "gradient reduction",
    "norm_s": "gradient norm",
    "optimizer_s": "optimizer",
    "gather_s": "parameter gather",
}

CAUSES: tuple[SwitchableCause, ...] = (
    SwitchableCause(
        "recompute", costs=_without_recompute
    ),  # first: it replaces the prices that the others change
    SwitchableCause("unequal load of experts", variation=_with_even_load),
    SwitchableCause("differences between GPUs", variation=_with_equal_clocks),
    SwitchableCause("run-to-run jitter", variation=_without_jitter),
    SwitchableCause(
        "payloads of dispatch and combine",
        costs=partial(_without_transfer_times, EP_PHASES, ("nic_s", "scale_up_s")),
    ),
    SwitchableCause(
        "launch and notify of dispatch and combine",
        costs=partial(_without_transfer_times, EP_PHASES, ("launch_s",)),
    ),
    SwitchableCause(
        "sharding collectives of ZeRO-3",
        costs=partial(_without_transfer_times, SHARDING_PHASES, _ALL_SECONDS),
    ),
    SwitchableCause("full links", links=_with_wide_links),
    SwitchableCause("compute beside communication SMs", costs=_without_interference),
    SwitchableCause("launch stalls of the host", costs=partial(_without_part, "host_s")),
    SwitchableCause("exposed collectives inside compute", costs=partial(_without_part, "exposed_s")),
    SwitchableCause("pipeline sends", costs=_without_sends),
    *(SwitchableCause(name, costs=partial(_without_end, part)) for part, name in _END.items()),
)
"""All causes, in the order in which a run without several of them applies their changes."""


# -- counterfactuals ---------------------------------------------------------------------------------
# What every cause costs a step: one engine run for each cause, with that cause alone switched off.

Say = Callable[[int, int, str], None]
"""Called before every run with (number of the run, most runs, name of the cause)."""

ALL_CAUSES = "all of them"


class Counterfactual(Frozen):
    """A cause, the seconds of the step without it, and the seconds and share of the step that it costs.

    `cost_s` is negative where the step is slower without the cause.
    """

    cause: str
    without_s: float
    cost_s: float
    share: float


class Counterfactuals(TableResult):
    """The runs of a step with one cause switched off each, and the run with all of them switched off."""

    step_s: float
    causes: tuple[Counterfactual, ...]
    """The causes that the step has, the most expensive first."""
    together: Counterfactual
    """All of them switched off."""

    @property
    def sentence(self) -> str:
        """Says that the costs of the causes do not add up, and what they cost together."""
        added = sum(row.cost_s for row in self.causes)
        return (
            f"The causes overlap, so their costs do not add up: one by one they sum to {added:.3f} s, "
            f"switched off together they save {self.together.cost_s:.3f} s; the other "
            f"{self.together.without_s:.3f} s are the longest path through the remaining compute."
        )

    def rows(self) -> list[Row]:
        """One row for each cause, and one for all of them together."""
        return [row.model_dump() for row in (*self.causes, self.together)]

    def __str__(self) -> str:
        """The causes that cost at least one per mille of the step, all of them together, and the sentence."""
        shown = [*(row for row in self.causes if abs(row.share) >= 0.001), self.together]
        lines = [f"the step without a cause, and what the cause costs ({self.step_s:.3f} s with all of them)"]
        lines += [f"{r.cause:42s} {r.without_s:8.3f} s  {r.cost_s:8.3f} s  {r.share:6.1%}" for r in shown]
        return "\n".join([*lines, self.sentence])


def counterfactuals(
    prepared: Prepared, step_s: float, say: Say = lambda number, most, cause: None
) -> Counterfactuals:
    """Run a prepared step once without each cause that it has, and once without all of them (eq. T3).

    `step_s`: seconds of the step with all causes. The programs are compiled anew with the same draws; the
    prices of all other work stay. Faults stay in all runs (`predict.fault_effects` switches them off).
    """
    rows, present = [], []
    for number, cause in enumerate(CAUSES):
        programs = _programs(prepared, (cause,))
        if programs:
            say(number, len(CAUSES) + 1, cause.name)
            present.append(cause)
            rows.append(_row(prepared, step_s, cause.name, programs))
    say(len(CAUSES), len(CAUSES) + 1, ALL_CAUSES)
    everything = _programs(prepared, present) or prepared.programs
    return Counterfactuals(
        step_s=step_s,
        causes=tuple(sorted(rows, key=lambda row: (-row.cost_s, row.cause))),
        together=_row(prepared, step_s, ALL_CAUSES, everything),
    )


def _row(prepared: Prepared, step_s: float, name: str, programs: Sequence[Program]) -> Counterfactual:
    without_s = step_time_s(prepared.engine.execute(programs))
    cost_s = step_s - without_s
    return Counterfactual(cause=name, without_s=without_s, cost_s=cost_s, share=cost_s / step_s)


def _programs(prepared: Prepared, causes: Sequence[SwitchableCause]) -> tuple[Program, ...]:
    """The programs without some causes; no program where the step has none of them."""
    pools = [_of_pool(pool, causes) for pool in prepared.pools]
    if not any(changed for _, changed in pools):
        return ()
    if not prepared.of_fleet:
        return pools[0][0]
    parts = zip(prepared.pools, pools, strict=True)
    return (joined_program([(pool.part, programs[0]) for pool, (programs, _) in parts]),)


def _of_pool(pool: PreparedPool, causes: Sequence[SwitchableCause]) -> tuple[tuple[Program, ...], bool]:
    """The programs of a pool without some causes, and whether they differ from those with them."""
    before = pool.programs[0].costs
    costs = before
    for cause in causes:
        costs = cause.costs(pool, costs)
    order = pool.scenario.communication.order_of(pool.scenario.schedule)
    programs = []
    for program in pool.programs:
        variation, link_map = program.variation, program.link_map
        for cause in causes:
            variation = cause.variation(pool, program, variation)
            link_map = cause.links(pool, link_map)
        if costs is before and variation is program.variation and link_map is program.link_map:
            programs.append(program)
            continue
        priced = PricedSchedule(program.schedule, program.blocks, costs, order)
        programs.append(compile_program(priced, variation, link_map, program.group))
    return tuple(programs), any(a is not b for a, b in zip(programs, pool.programs, strict=True))


class Cause(Frozen):
    """Seconds that one cause takes on the critical path, and their share of the step."""

    cause: str
    seconds: float
    share: float


class Explanation(TableResult):
    """Sentences on a step, its critical path by cause, and the inputs that are assumed or extrapolated."""

    scenario: str
    inputs: Inputs
    sentences: tuple[str, ...]
    causes: tuple[Cause, ...]
    extrapolated: tuple[str, ...]
    defaults: tuple[Default, ...] = Field((), exclude_if=lambda value: not value)
    """Keys that the scenario left out, with the values that they got and the reasons."""
    counterfactuals: Counterfactuals | None = Field(None, exclude_if=lambda value: value is None)
    """Step times with one cause switched off each; None for an explanation of a finished result."""

    def rows(self) -> list[Row]:
        """One row for each cause."""
        return [cause.model_dump() for cause in self.causes]

    def __str__(self) -> str:
        """The sentences, then the causes that take or cost at least one per cent of the step."""
        lines = [*self.sentences, ""]
        lines += [f"{c.cause:20s} {c.seconds:8.3f} s  {c.share:6.1%}" for c in self.causes if c.share >= 0.01]
        if self.counterfactuals is not None:
            lines += ["", str(self.counterfactuals)]
        return "\n".join(lines)


def host_sentence(host: HostReport, step_s: float) -> str:
    """Sentence on whether the host's launch rate bounds the step, and on the seconds that launches cost."""
    verdict = "bound by the host's launch rate" if host.bound else "not bound by the host's launch rate"
    remedy = "; CUDA graphs, larger micro-batches or a faster host would help" if host.bound else ""
    return (
        f"The run is {verdict}: the GPUs wait {host.wait_s:.3f} s of {step_s:.3f} s ({host.share:.1%}) for "
        f"launches of {host.host}{remedy}."
    )


def memory_sentence(memory: MemoryResult) -> str:
    """Bytes of the fullest GPU as a sentence, with what is at risk or why the plan does not fit."""
    used, has, least, most = (
        b / 2**30 for b in (memory.total_bytes, memory.capacity_bytes, *memory.range_bytes)
    )
    return (
        f"The fullest GPU holds {used:.1f} of {has:.1f} GiB ({least:.1f} to {most:.1f} by framework and "
        f"allocator): it {f'is {memory.risk}' if memory.risk else memory.shortage or 'fits'}."
    )


def explain(result: Result, counterfactuals: Counterfactuals | None = None) -> Explanation:
    """Explain a finished prediction from its bounds, breakdown, critical path and memory.

    `counterfactuals`: the runs of the same step without each of its causes, if they were made.
    """
    step, split, memory, use = result.step, result.breakdown_s, result.memory, result.utilisation
    path = sorted(causes(result).items(), key=lambda item: (-item[1], item[0]))
    compute = fsum(s for name, s in path if name.split()[0] in ("attn", "mlp") or name == "optimizer")
    top = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in path[:3])
    over_best, of_worst = step.time_s / step.lower_bound_s, step.time_s / step.upper_bound_s
    waits = split.exposed_communication
    says = [
        f"A step takes {step.time_s:.3f} s: {over_best:.2f} times what the busiest resource needs at its "
        f"best ({step.lower_bound_s:.3f} s), and {of_worst:.0%} of everything in series at its worst "
        f"({step.upper_bound_s:.3f} s).",
        f"{compute / step.time_s:.0%} of its critical path is compute; the longest parts are {top}.",
        f"Pipeline rank 0 idles {split.bubble:.2f} s in the bubble ({split.bubble / step.time_s:.1%}) and "
        f"waits {waits:.2f} s for communication ({waits / step.time_s:.1%}).",
        f"Communication SMs are busy {use.communication_partition:.0%} of the step, NICs {use.nic:.0%}, "
        f"scale-up ports {use.scale_up:.0%}.",
        memory_sentence(memory),
    ]
    if result.host is not None:
        says.append(host_sentence(result.host, step.time_s))
    if result.uncertainty is not None:
        band, first = result.uncertainty.bands["step_time_s"], result.uncertainty.sources[0]
        says.append(
            f"With probability 0.8 the step is {band.p10:.2f} to {band.p90:.2f} s; most of that is "
            f"{first.source}."
        )
    if result.defaults:
        told = [item.key for item in result.defaults if not is_answer(item)]
        answers = len(result.defaults) - len(told)
        keys = ", ".join(told + ([f"{answers} switches of software"] if answers else []))
        says.append(f"{len(result.defaults)} values are not stated and follow from rules: {keys}.")
    if result.extrapolated:
        says.append(f"{len(result.extrapolated)} inputs are assumed or extrapolated.")
    total = step.time_s
    return Explanation(
        scenario=result.scenario,
        inputs=result.inputs,
        sentences=tuple(says),
        causes=tuple(Cause(cause=name, seconds=s, share=s / total) for name, s in path),
        extrapolated=result.extrapolated,
        defaults=result.defaults,
        counterfactuals=counterfactuals,
    )
