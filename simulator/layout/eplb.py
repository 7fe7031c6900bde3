"""Expert-parallel load balancing: chooses which experts get replicas, and which rank holds each replica.

The planner works from the load of every expert, in three steps:

1. Replicas go, one at a time, to the expert with the largest load per replica.
2. The replicas are packed into ranks with equal numbers of slots. Every round gives each rank one replica,
   the heaviest one left to the lightest rank. Then replicas are swapped between the heaviest rank and another
   as long as that lowers the heavier of the two.
3. The packs of each layer are assigned to ranks so that no rank holds the heaviest pack in layer after layer:
   one rank that is always late delays a pipeline more than ranks that take turns.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from moesim.hwmodels.arrays import FloatArray, IntArray
from moesim.hwmodels.errors import InputError
from moesim.simulator.scenario.sections import Policy

LEAST_GAIN = 1e-9
"""Least gain of a swap, over the mean load of a rank; smaller differences may be rounding."""


class ExpertPlacement(Struct, frozen=True):
    """The expert in every slot of every rank.

    Slot s of layer l holds expert `expert_of_slot[l, s]` [layers, slots]; slots are in rank order, slots /
    ranks on each. `replicas` [layers, experts] counts the replicas of every expert, over which its rows are
    split evenly.
    """

    expert_of_slot: IntArray
    replicas: IntArray
    ranks: int

    @property
    def slots_per_rank(self) -> int:
        """Experts that each rank holds, replicas included."""
        return int(self.expert_of_slot.shape[1]) // self.ranks

    def slot_load(self, loads: FloatArray) -> FloatArray:
        """Load of every slot [layers, slots] from loads of experts [layers, experts]."""
        return np.take_along_axis(loads / self.replicas, self.expert_of_slot, axis=1)

    def rank_load(self, loads: FloatArray) -> FloatArray:
        """Load of every rank [layers, ranks] from loads of experts [layers, experts]."""
        slots = self.slot_load(loads)
        return np.asarray(slots.reshape(len(slots), self.ranks, -1).sum(axis=2))


def placement_in_order(layers: int, experts: int, ranks: int) -> ExpertPlacement:
    """Return the placement without balancing: one replica of expert e, on rank e // (experts / ranks)."""
    _check_divides("ranks", ranks, experts, "experts")
    slots = np.broadcast_to(np.arange(experts, dtype=np.int64), (layers, experts))
    return ExpertPlacement(slots, np.ones((layers, experts), dtype=np.int64), ranks)


def imbalance(rank_load: FloatArray) -> FloatArray:
    """Load of the heaviest rank over the mean of all ranks, for each layer [layers] (eq. R7)."""
    return np.asarray(rank_load.max(axis=1) / rank_load.mean(axis=1))


def plan_placement(
    loads: FloatArray,
    *,
    ranks: int,
    redundant_experts: int = 0,
    policy: Policy = "global",
    groups: int = 1,
    nodes: int = 1,
) -> ExpertPlacement:
    """Choose replicas and slots for the experts of every layer, from `loads` [layers, experts] (eq. R7).

    The policy `global` spreads all experts over all ranks. `hierarchical` first packs the `groups` (equal,
    contiguous) of experts into the `nodes`; then every node replicates and packs its own experts. A group so
    stays on one node, and the traffic of node-limited routing does not change. A layer whose plan would be
    worse than experts in order keeps them in order, with every replica on the rank of its original.
    Raises InputError for loads that are not a table of finite numbers of at least 0, and for counts that do
    not divide.
    """
    table = np.asarray(loads, dtype=np.float64)
    if table.ndim != 2 or not table.size or not np.isfinite(table).all() or (table < 0).any():
        raise InputError("expert loads must be a table [layers, experts] of finite numbers, 0 or more")
    experts = table.shape[1]
    check_placement(
        experts, ranks=ranks, redundant_experts=redundant_experts, policy=policy, groups=groups, nodes=nodes
    )
    if policy == "global":
        slots, replicas = _plan(table, ranks, redundant_experts, domains=1)
    else:
        slots, replicas = _plan_by_node(table, ranks, redundant_experts, groups, nodes)
    plan = ExpertPlacement(slots, replicas, ranks)
    plain = placement_in_order(len(table), experts, ranks)
    worse = plain.rank_load(table).max(axis=1) < plan.rank_load(table).max(axis=1)
    if worse.any():  # experts in order, and replicas on the ranks of their originals
        per_rank, extra = experts // ranks, redundant_experts // ranks
        local = np.arange(per_rank + extra) % per_rank
        beside = (np.arange(ranks)[:, None] * per_rank + local).ravel()
        slots[worse], replicas[worse] = beside, np.bincount(beside, minlength=experts)
    return plan


def check_placement(
    experts: int, *, ranks: int, redundant_experts: int, policy: Policy, groups: int = 1, nodes: int = 1
) -> None:
    """Raise InputError for a placement whose counts do not divide, as `plan_placement` does."""
    _check_divides("ranks", ranks, experts, "experts")
    if redundant_experts < 0:
        raise InputError(f"redundant_experts={redundant_experts} must be 0 or more")
    _check_divides("ranks", ranks, redundant_experts, "redundant_experts")
    within = ranks // nodes if policy == "hierarchical" and nodes > 0 else ranks
    if redundant_experts > experts * (within - 1):
        raise InputError(
            f"redundant_experts={redundant_experts}: with {experts} experts at most {experts * (within - 1)} "
            f"make sense, a replica on each of the {within} ranks that policy {policy} may use"
        )
    if policy == "hierarchical":
        _check_divides("groups", groups, experts, "experts")
        _check_divides("nodes", nodes, groups, "groups", "; use policy global, which needs no groups")
        _check_divides("nodes", nodes, ranks, "ranks")
    elif policy != "global":
        raise InputError(f"policy={policy!r} is not known; known: hierarchical, global")


def _plan(loads: FloatArray, ranks: int, redundant: int, domains: int) -> tuple[IntArray, IntArray]:
    """(expert of each slot, replicas of each expert) without regard to groups.

    `loads` has `domains` consecutive rows for every layer, one for each node that is planned on its own.
    """
    layers, experts = loads.shape
    replicas = replicate(loads, redundant, ranks)
    owner = np.tile(np.arange(experts, dtype=np.int64), layers)
    items = np.repeat(owner, replicas.ravel()).reshape(layers, experts + redundant)
    order = _packed(np.take_along_axis(loads / replicas, items, axis=1), ranks, domains)
    return np.take_along_axis(items, order, axis=1), replicas


def _plan_by_node(
    loads: FloatArray, ranks: int, redundant: int, groups: int, nodes: int
) -> tuple[IntArray, IntArray]:
    """(expert of each slot, replicas of each expert) with every group on one node.

    Each node is then planned like a small cluster of its own.
    """
    layers, experts = loads.shape
    width = experts // groups
    group_order = _packed(loads.reshape(layers, groups, width).sum(axis=2), nodes, domains=1)
    members = (group_order[:, :, None] * width + np.arange(width)).reshape(layers * nodes, experts // nodes)
    layer = np.repeat(np.arange(layers), nodes)[:, None]
    local, counts = _plan(loads[layer, members], ranks // nodes, redundant // nodes, domains=nodes)
    slots = np.take_along_axis(members, local, axis=1).reshape(layers, experts + redundant)
    replicas = np.empty((layers, experts), dtype=np.int64)
    replicas[layer, members] = counts
    return slots, replicas


def replicate(loads: FloatArray, redundant: int, most: int) -> IntArray:
    """Number of replicas of every expert: one each, then `redundant` more, at most `most` (one per rank).

    Every further replica goes to the expert with the largest load per replica. This minimises the largest
    load per replica: to get below a level x every expert needs at least load / x replicas, and the greedy
    choice gives none to an expert below x while another is above.
    """
    rows = np.arange(len(loads))
    replicas = np.ones(loads.shape, dtype=np.int64)
    for _ in range(redundant):
        hottest = np.where(replicas < most, loads / replicas, -1.0).argmax(axis=1)
        replicas[rows, hottest] += 1
    return replicas


def _packed(items: FloatArray, bins: int, domains: int) -> IntArray:
    """Order of the items [rows, items] in which consecutive runs of items / bins form balanced bins.

    Every round puts one item into each bin, the heaviest one left into the lightest bin. The heaviest bin
    then exceeds the optimum by at most the largest range of items inside a round: with sums L rising and
    items a falling over the bins, (L_j + a_j) - (L_i + a_i) is the difference of two numbers, one between 0
    and the previous spread of the bins, the other between 0 and the range. The swaps that follow never raise
    the heaviest bin.
    """
    rows, count = items.shape
    rank_of = np.argsort(-items, axis=1, kind="stable")
    sums = np.zeros((rows, bins))
    content = np.empty((rows, bins, count // bins), dtype=np.int64)
    for number in range(count // bins):
        lightest = np.argsort(sums, axis=1, kind="stable")
        chosen = rank_of[:, number * bins : (number + 1) * bins]
        np.put_along_axis(content[:, :, number], lightest, chosen, axis=1)
        here = np.take_along_axis(sums, lightest, axis=1) + np.take_along_axis(items, chosen, axis=1)
        np.put_along_axis(sums, lightest, here, axis=1)
    for row in range(rows):
        _swap(items[row], content[row])
    packed = np.take_along_axis(items, content.reshape(rows, count), axis=1).reshape(content.shape)
    loads = packed.sum(axis=2).reshape(-1, domains, bins)
    order = np.empty(loads.shape, dtype=np.int64)
    total = np.zeros(loads.shape[1:])
    for layer, load in enumerate(loads):  # the rank with the least load so far takes the heaviest bin
        heaviest = np.argsort(-load, axis=1, kind="stable")
        np.put_along_axis(order[layer], np.argsort(total, axis=1, kind="stable"), heaviest, axis=1)
        total += np.take_along_axis(load, order[layer], axis=1)
    order = order.reshape(rows, bins)
    return np.take_along_axis(content, order[:, :, None], axis=1).reshape(rows, count)


def _swap(items: FloatArray, content: IntArray) -> None:
    """Exchange items between the heaviest bin and another while the heavier of the two gets lighter."""
    weights = items[content]
    sums = weights.sum(axis=1)
    least = LEAST_GAIN * sums.mean()
    for _ in range(8 * content.size):  # every swap lowers the heaviest bin, so far fewer are needed
        top = int(sums.argmax())
        moved = weights[top][None, :, None] - weights[:, None, :]
        moved[top] = 0.0
        after = np.maximum(sums[top] - moved, sums[:, None, None] + moved)
        best = int(after.argmin())
        other, mine, theirs = (int(i) for i in np.unravel_index(best, after.shape))
        if after[other, mine, theirs] > sums[top] - least:
            return
        content[top, mine], content[other, theirs] = content[other, theirs], content[top, mine]
        weights[top], weights[other] = items[content[top]], items[content[other]]
        sums[[top, other]] = weights[[top, other]].sum(axis=1)


def _check_divides(key: str, value: int, whole: int, what: str, remedy: str = "") -> None:
    if value < 1 or whole % value:
        below = whole // value * value if value > 0 else 0
        near = f"nearest {what}: {below}, {below + value}" if value > 0 else f"use 1 to {whole} {key}"
        raise InputError(f"{what}={whole} cannot be shared evenly by {key}={value} ({near}){remedy}")
