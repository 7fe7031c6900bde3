"""Expected distinct nodes and GPUs that a token reaches under a top-k gate.

All expectations assume equally popular experts, and sources that are independent of the targets; the module
`loads` adds popularity and sampling noise.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import lru_cache
from math import comb, fsum
from typing import Literal

import numpy as np
from msgspec import Struct

from moesim.hwmodels.arrays import FloatArray
from moesim.hwmodels.errors import InputError
from moesim.simulator.dispatchers.protocol import TargetStatistics
from moesim.simulator.model.feed_forward.moe import GroupScore, MoE

SAMPLED_TOKENS = 8192
"""Tokens of the Monte Carlo sample for top2-sum gates; standard error 0.002 nodes, 0.003 GPUs."""

GroupCounts = tuple[int, ...]
"""Numbers of experts that a token picks in each group it reaches, largest first, without zeros."""


class Gate(Struct, frozen=True):
    """A gate that chooses `top_k` of `experts`, limited to `groups_per_token` of `groups` equal groups.

    `scores` says how a standard normal logit becomes a score, through the logistic function (`sigmoid`) or
    the exponential (`softmax`); only the ranking `top2-sum` depends on it.
    """

    experts: int
    top_k: int
    groups: int = 1
    groups_per_token: int = 1
    group_score: GroupScore | None = None
    scores: str = "sigmoid"
    zero_experts: int = 0
    """Experts without computation among those that it chooses from, on no rank; only without groups."""

    @property
    def group_size(self) -> int:
        """Experts of one group, those without computation included."""
        return (self.experts + self.zero_experts) // self.groups

    @classmethod
    def of(
        cls,
        moe: MoE,
        ranking: Literal["model", "best", "top2-sum", "unlimited"] = "model",
        limit: int | None = None,
    ) -> Gate:
        """Return the gate of a model, with another ranking of its groups or without a limit if asked for.

        `limit` replaces the number of groups that a token reaches; the number of all groups means no limit.
        Raises InputError for a limit above that number, or with groups of fewer than top_k experts in all.
        """
        if limit is not None and not (limit <= moe.groups and limit * moe.experts // moe.groups >= moe.top_k):
            least = -(-moe.top_k * moe.groups // moe.experts)
            raise InputError(
                f"routing.groups_per_token={limit} is not between {least} and {moe.groups}: the model has "
                f"{moe.groups} groups of {moe.experts // moe.groups} experts and chooses {moe.top_k}"
            )
        reached = moe.groups_per_token if limit is None else limit
        limited = moe.group_limited if limit is None else limit < moe.groups
        if not limited or ranking == "unlimited":
            return cls(moe.experts, moe.top_k, zero_experts=moe.zero_experts)
        score = moe.group_score if ranking == "model" else ranking
        return cls(moe.experts, moe.top_k, moe.groups, reached, score, moe.scoring)

    @classmethod
    def deepep_test(cls, nodes: int, experts: int = 256, top_k: int = 8) -> Gate:
        """Return the gate of DeepEP's stand-alone tests: one group per node, of which a token reaches the
        min(nodes, 4) with the best scores.

        Source: deepseek-ai/DeepEP@567632dd5981 tests/test_internode.py (and test_intranode.py: no groups).
        """
        limit = min(nodes, 4)
        return cls(experts, top_k) if limit == nodes else cls(experts, top_k, nodes, limit, "best")


@lru_cache(maxsize=256)
def expected_targets(gate: Gate, ep: int, gpus_per_node: int, seed: int = 0) -> TargetStatistics:
    """Return the expected distinct targets of one token over `ep` ranks (eq. R2).

    `gpus_per_node` ranks share a node, and experts are placed in order, experts/ep on each rank. The result
    is exact for gates without groups and for groups ranked by their best score; for top2-sum the choice of
    groups is sampled with `seed`. Raises InputError where ranks or nodes do not divide.
    """
    if gate.experts % ep:
        raise InputError(f"parallel.ep={ep} does not divide experts={gate.experts}")
    per_node = min(ep, gpus_per_node)
    if ep % per_node:
        raise InputError(f"parallel.ep={ep} does not fill nodes of {gpus_per_node} GPUs")
    nodes = ep // per_node
    distribution = group_counts(gate, seed)
    distinct_gpus = _expected_units(gate, distribution, ep)
    distinct_nodes = _expected_units(gate, distribution, nodes)
    return TargetStatistics(
        distinct_nodes=distinct_nodes,
        distinct_gpus=distinct_gpus,
        distinct_remote_nodes=distinct_nodes * (nodes - 1) / nodes,
        nodes=nodes,
        gpus_per_node=per_node,
    )


@lru_cache(maxsize=64)
def group_counts(gate: Gate, seed: int = 0) -> tuple[tuple[GroupCounts, float], ...]:
    """Return the possible `GroupCounts` of a token with their probabilities (eq. R1)."""
    limited = gate.groups_per_token < gate.groups
    return _spread_by_top2(gate, seed) if limited and gate.group_score != "best" else _spread_by_best(gate)


def _spread_by_best(gate: Gate) -> tuple[tuple[GroupCounts, float], ...]:
    """Compute the distribution exactly, also for gates without a limit.

    The experts are visited in order of score. With independent scores that order is a random permutation, and
    the groups with the best scores are those that appear first in it. Until the allowed number of groups has
    appeared, every visited expert is chosen; after that the next chosen one is uniform over the remaining
    experts of those groups.
    """
    size = gate.group_size
    states: dict[GroupCounts, float] = {(): 1.0}
    for chosen in range(gate.top_k):
        following: defaultdict[GroupCounts, float] = defaultdict(float)
        for counts, probability in states.items():
            full = len(counts) == gate.groups_per_token
            pool = (gate.groups_per_token if full else gate.groups) * size - chosen
            for count, times in Counter(counts).items():
                step = list(counts)
                step[step.index(count)] += 1
                key = tuple(sorted(step, reverse=True))
                following[key] += probability * times * (size - count) / pool
            if not full:
                following[(*counts, 1)] += probability * (gate.groups - len(counts)) * size / pool
        states = dict(following)
    return tuple(sorted((c, p) for c, p in states.items() if p > 0.0))


def _spread_by_top2(gate: Gate, seed: int) -> tuple[tuple[GroupCounts, float], ...]:
    """Sample the distribution over tokens for groups ranked by the sum of their two best scores."""
    rng = np.random.default_rng(seed)
    size = gate.experts // gate.groups
    # Single precision: several times faster, and only the order of the scores matters.
    logits = rng.standard_normal((SAMPLED_TOKENS, gate.groups, size), dtype=np.float32)
    best = np.sort(logits, axis=2)[:, :, -gate.top_k :]
    ranking = scores_of(best[:, :, -2:].astype(np.float64), gate.scores).sum(axis=2)
    chosen = np.argpartition(-ranking, gate.groups_per_token - 1, axis=1)[:, : gate.groups_per_token]
    open_logits = np.take_along_axis(best, chosen[:, :, None], axis=1)
    flat = open_logits.reshape(SAMPLED_TOKENS, -1)
    threshold = np.partition(flat, flat.shape[1] - gate.top_k, axis=1)[:, flat.shape[1] - gate.top_k]
    counts = np.sort((open_logits >= threshold[:, None, None]).sum(axis=2), axis=1)[:, ::-1]
    # Rows as texts of bytes, which are ordered alike and compared faster.
    texts = np.ascontiguousarray(counts.astype(">u2")).view(f"S{2 * counts.shape[1]}")[:, 0]
    _, first, times = np.unique(texts, return_index=True, return_counts=True)
    return tuple(
        (tuple(int(c) for c in row if c), int(n) / SAMPLED_TOKENS)
        for row, n in zip(counts[first], times, strict=True)
    )


def scores_of(logits: FloatArray, kind: str) -> FloatArray:
    """Convert logits to scores, up to a factor that all experts of a token share."""
    return np.asarray(1.0 / (1.0 + np.exp(-logits)) if kind == "sigmoid" else np.exp(logits))


def _expected_units(gate: Gate, distribution: tuple[tuple[GroupCounts, float], ...], units: int) -> float:
    """Expected number of units (equal, contiguous runs of experts) that hold a chosen expert."""
    width, size = gate.experts // units, gate.group_size
    if gate.experts % units:
        raise InputError(f"{units} nodes or ranks do not divide experts={gate.experts}")
    kinds: Counter[tuple[int, ...]] = Counter()
    for unit in range(units):
        begin, end = unit * width, (unit + 1) * width
        overlaps = (min(end, (g + 1) * size) - max(begin, g * size) for g in range(gate.groups))
        kinds[tuple(sorted(o for o in overlaps if o > 0))] += 1
    return fsum(
        probability * times * (1.0 - _missed(counts + (0,) * (gate.groups - len(counts)), overlaps, size))
        for counts, probability in distribution
        for overlaps, times in kinds.items()
    )


@lru_cache(maxsize=4096)
def _missed(counts: GroupCounts, overlaps: tuple[int, ...], size: int) -> float:
    """Probability that no expert of a unit is chosen, if it has `overlaps[j]` experts of its j-th group.

    The counts are assigned to the groups at random; inside a group the chosen experts are uniform.
    """
    if not overlaps:
        return 1.0
    missed = 0.0
    for count, times in Counter(counts).items():
        rest = list(counts)
        rest.remove(count)
        clear = comb(size - overlaps[0], count) / comb(size, count)
        if clear:
            missed += times / len(counts) * clear * _missed(tuple(rest), overlaps[1:], size)
    return missed
