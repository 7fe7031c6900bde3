"""Causes of a step's seconds, each as a change of the program's inputs that switches it off (pure).

A change returns the object that it was given where its cause is absent (docs/model.md, eq. T3).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from moesim.hwmodels.arrays import FloatArray
from moesim.simulator.cost.price_table import cost_table
from moesim.simulator.cost.pricing import Pricer
from moesim.simulator.cost.table import PAIR_MODES, CostTable, PhaseCost, SyncCost, TransferCost
from moesim.simulator.engine.link_map import LinkMap
from moesim.simulator.engine.program import MemberVariation, Program
from moesim.simulator.engine.task_durations import LOAD_TOLERANCE
from moesim.simulator.predict.prepared import PreparedPool
from moesim.simulator.schedules.template import EP_PHASES, SHARDING_PHASES

ChangeOfCosts = Callable[[PreparedPool, CostTable], CostTable]
ChangeOfVariation = Callable[[PreparedPool, Program, MemberVariation], MemberVariation]
ChangeOfLinks = Callable[[PreparedPool, LinkMap], LinkMap]


def _same_costs(pool: PreparedPool, costs: CostTable) -> CostTable:
    return costs


def _same_variation(pool: PreparedPool, program: Program, variation: MemberVariation) -> MemberVariation:
    return variation


def _same_links(pool: PreparedPool, link_map: LinkMap) -> LinkMap:
    return link_map


@dataclass(frozen=True, slots=True)
class SwitchableCause:
    """A cause by name, with the changes of prices, differences between members and links that remove it."""

    name: str
    costs: ChangeOfCosts = _same_costs
    variation: ChangeOfVariation = _same_variation
    links: ChangeOfLinks = _same_links


Price = TypeVar("Price", PhaseCost, TransferCost, SyncCost)


def _with_fields(price: Price, seconds: Mapping[str, float]) -> Price:
    """The price with other seconds, by name of the field."""
    changes: dict[str, Any] = dict(seconds)
    return replace(price, **changes)


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
                else replace(alone, fixed_s=alone.fixed_s - alone.host_s + own_s, host_s=own_s)
            )
    return costs if changed == costs.compute else replace(costs, compute=changed)


def _without_part(part: str, pool: PreparedPool, costs: CostTable) -> CostTable:
    """Compute without its seconds of `host_s` or `exposed_s`."""

    def shorter(price: PhaseCost) -> PhaseCost:
        seconds: float = getattr(price, part)
        if not seconds:
            return price
        return _with_fields(price, {"fixed_s": max(0.0, price.fixed_s - seconds), part: 0.0})

    changed = {key: shorter(price) for key, price in costs.compute.items()}
    return costs if changed == costs.compute else replace(costs, compute=changed)


def _without_transfer_times(
    phases: frozenset[str], seconds: tuple[str, ...], pool: PreparedPool, costs: CostTable
) -> CostTable:
    """Transfers of some phases without some of their seconds; their barriers remain."""

    def shorter(price: TransferCost) -> TransferCost:
        return _with_fields(price, dict.fromkeys(seconds, 0.0))

    changed = {key: shorter(price) if key[1] in phases else price for key, price in costs.transfer.items()}
    return costs if changed == costs.transfer else replace(costs, transfer=changed)


def _without_sends(pool: PreparedPool, costs: CostTable) -> CostTable:
    return replace(costs, send_s=0.0) if costs.send_s else costs


def _without_end(part: str, pool: PreparedPool, costs: CostTable) -> CostTable:
    """The end of the step without one of its parts, a field of `SyncCost`."""
    if not any(getattr(sync, part) for sync in costs.sync):
        return costs
    return replace(costs, sync=tuple(_with_fields(sync, {part: 0.0}) for sync in costs.sync))


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
