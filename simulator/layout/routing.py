"""How far a token travels: distinct nodes and GPUs under a top-k gate, and the bytes on each link class.

All expectations are for equally popular experts and for sources that are independent of the targets;
`loads` adds popularity and sampling noise.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import lru_cache
from math import comb, fsum
from typing import Literal

import numpy as np

from moesim.hwmodels.arrays import FloatArray
from moesim.hwmodels.errors import InputError
from moesim.simulator.model.feed_forward.moe import GroupScore, MoE

SAMPLED_TOKENS = 8192
"""Tokens of the Monte Carlo that the top2-sum gate needs; standard error 0.002 nodes, 0.003 GPUs."""

GroupCounts = tuple[int, ...]
"""Experts that a token picks in each group it reaches, largest first, zeros left out."""


@dataclass(frozen=True, slots=True)
class Gate:
    """The choice of `top_k` of `experts`, limited to `groups_per_token` of `groups` equal groups.

    `scores` is the distribution of one expert's score and only matters to top2-sum: the logistic or the
    exponential of a standard normal logit, for sigmoid and softmax gates.
    """

    experts: int
    top_k: int
    groups: int = 1
    groups_per_token: int = 1
    group_score: GroupScore | None = None
    scores: str = "sigmoid"

    @classmethod
    def of(
        cls,
        moe: MoE,
        ranking: Literal["model", "best", "top2-sum", "unlimited"] = "model",
        limit: int | None = None,
    ) -> Gate:
        """The gate of a model, or the same gate with its groups ranked otherwise or not limited.

        `limit` replaces the number of groups that a token reaches; the number of all groups is no limit.
        Raises InputError where so many groups do not exist or do not hold top_k experts.
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
            return cls(moe.experts, moe.top_k)
        score = moe.group_score if ranking == "model" else ranking
        return cls(moe.experts, moe.top_k, moe.groups, reached, score, moe.scoring)

    @classmethod
    def deepep_test(cls, nodes: int, experts: int = 256, top_k: int = 8) -> Gate:
        """The gate of DeepEP's stand-alone tests: one group a node, the best min(nodes, 4) by best score.

        Source: deepseek-ai/DeepEP@567632dd5981 tests/test_internode.py (and test_intranode.py: no groups).
        """
        limit = min(nodes, 4)
        return cls(experts, top_k) if limit == nodes else cls(experts, top_k, nodes, limit, "best")


@dataclass(frozen=True, slots=True)
class TargetStatistics:
    """Expectations for one token; a target counts once however many of its experts are chosen.

    `distinct_nodes` and `distinct_gpus` include the token's own node and GPU where they are targets;
    the `remote` ones leave them out. `gpus_per_node` is the number of EP ranks that share a node.
    """

    distinct_nodes: float
    distinct_gpus: float
    distinct_remote_nodes: float
    distinct_remote_gpus: float
    rows_per_token: int
    """Expert rows that one token becomes (top_k)."""
    nodes: int
    gpus_per_node: int


@dataclass(frozen=True, slots=True)
class LinkBytes:
    """Bytes that one GPU sends in one dispatch, or receives in one combine, per class of link.

    A token crosses IB once for each distinct remote node, to the GPU with the sender's index there,
    and NVLink once for each distinct target GPU with another index (DeepSeek-V3 report, section 3.2.2).
    The `logical` counts are those of DeepEP's own bandwidth figures: local node and own rank included,
    and no IB at all inside one node.
    """

    ib_bytes: float
    nvlink_bytes: float
    local_copy_bytes: float
    """To the target with the sender's own index in a node: a copy in HBM, no link."""
    logical_ib_bytes: float
    logical_nvlink_bytes: float


@lru_cache(maxsize=256)
def expected_targets(gate: Gate, ep: int, gpus_per_node: int, seed: int = 0) -> TargetStatistics:
    """Expected distinct targets of one token over `ep` ranks, `gpus_per_node` of them on a node (eq. R2).

    Exact for gates without groups and for groups ranked by their best score; a seeded Monte Carlo over
    group choices (`seed`, exact inside the groups) for top2-sum. Experts are placed in order, experts/ep
    on each rank. Raises InputError where ranks or nodes do not divide.
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
        distinct_remote_gpus=distinct_gpus * (ep - 1) / ep,
        rows_per_token=gate.top_k,
        nodes=nodes,
        gpus_per_node=per_node,
    )


def transfer_bytes(targets: TargetStatistics, tokens: float, bytes_per_row: float) -> LinkBytes:
    """Bytes of one dispatch or combine of `tokens` tokens a rank, each `bytes_per_row` long (eq. X1).

    The backward of a dispatch is a combine and the other way round; both take the same paths.
    """
    rows = tokens * targets.distinct_gpus * bytes_per_row
    same_index = 1.0 / targets.gpus_per_node
    return LinkBytes(
        ib_bytes=tokens * targets.distinct_remote_nodes * bytes_per_row,
        nvlink_bytes=rows * (1.0 - same_index),
        local_copy_bytes=rows * same_index,
        logical_ib_bytes=tokens * targets.distinct_nodes * bytes_per_row if targets.nodes > 1 else 0.0,
        logical_nvlink_bytes=rows,
    )


@lru_cache(maxsize=64)
def group_counts(gate: Gate, seed: int = 0) -> tuple[tuple[GroupCounts, float], ...]:
    """Distribution of how a token's experts spread over groups, whichever they are (eq. R1)."""
    limited = gate.groups_per_token < gate.groups
    return _spread_by_top2(gate, seed) if limited and gate.group_score != "best" else _spread_by_best(gate)


def _spread_by_best(gate: Gate) -> tuple[tuple[GroupCounts, float], ...]:
    """Exact, also for gates without a limit, by walking the experts in order of score.

    With independent scores that order is a random permutation, and the groups with the best scores are
    those that appear first in it. Until the allowed number of groups has appeared every expert passed
    is chosen; from then on the next chosen one is uniform over the rest of those groups.
    """
    size = gate.experts // gate.groups
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
    """Monte Carlo over tokens; groups are ranked by the sum of their two best scores."""
    rng = np.random.default_rng(seed)
    size = gate.experts // gate.groups
    # Single precision: several times faster, and only the order of the scores matters.
    logits = rng.standard_normal((SAMPLED_TOKENS, gate.groups, size), dtype=np.float32)
    best = np.sort(logits, axis=2)[:, :, -gate.top_k :].astype(np.float64)
    ranking = scores_of(best[:, :, -2:], gate.scores).sum(axis=2)
    chosen = np.argpartition(-ranking, gate.groups_per_token - 1, axis=1)[:, : gate.groups_per_token]
    open_logits = np.take_along_axis(best, chosen[:, :, None], axis=1)
    flat = open_logits.reshape(SAMPLED_TOKENS, -1)
    threshold = np.partition(flat, flat.shape[1] - gate.top_k, axis=1)[:, flat.shape[1] - gate.top_k]
    counts = np.sort((open_logits >= threshold[:, None, None]).sum(axis=2), axis=1)[:, ::-1]
    spread, times = np.unique(counts, axis=0, return_counts=True)
    return tuple(
        (tuple(int(c) for c in row if c), int(n) / SAMPLED_TOKENS)
        for row, n in zip(spread, times, strict=True)
    )


def scores_of(logits: FloatArray, kind: str) -> FloatArray:
    """Scores up to a common factor of the token."""
    return np.asarray(1.0 / (1.0 + np.exp(-logits)) if kind == "sigmoid" else np.exp(logits))


def _expected_units(gate: Gate, distribution: tuple[tuple[GroupCounts, float], ...], units: int) -> float:
    """Expected number of the `units` equal, contiguous blocks of experts that hold a chosen one."""
    width, size = gate.experts // units, gate.experts // gate.groups
    if gate.experts % units:
        raise InputError(f"{units} nodes or ranks do not divide experts={gate.experts}")
    kinds: Counter[tuple[int, ...]] = Counter()
    for unit in range(units):
        begin, end = unit * width, (unit + 1) * width
        overlaps = (min(end, (g + 1) * size) - max(begin, g * size) for g in range(gate.groups))
        kinds[tuple(sorted(o for o in overlaps if o > 0))] += 1
    return fsum(
        probability * times * (1.0 - _missed(_padded(counts, gate.groups), overlaps, size))
        for counts, probability in distribution
        for overlaps, times in kinds.items()
    )


def _padded(counts: GroupCounts, groups: int) -> GroupCounts:
    return counts + (0,) * (groups - len(counts))


@lru_cache(maxsize=4096)
def _missed(counts: GroupCounts, overlaps: tuple[int, ...], size: int) -> float:
    """Probability that a unit with `overlaps[j]` experts of the j-th group it touches holds none chosen.

    The counts are dealt to the groups at random; inside a group the chosen experts are uniform.
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
