"""Seeded samples of routing: expert load per rank, and who sends what to whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from moesim.hwmodels.arrays import FloatArray, IntArray
from moesim.hwmodels.errors import InputError
from moesim.simulator.layout.routing import Gate, scores_of

SMALLEST_CV = 1e-6
"""Below it experts count as equally popular: the spread is under any rounding that follows."""


def sampled_loads(
    seed: int | Sequence[int],
    n_samples: int,
    ep: int,
    experts: int,
    expert_cv: float,
    rows_per_rank: float,
) -> FloatArray:
    """Expert rows that each rank receives over their mean: [n_samples, ep], each sample averages 1 (eq. R3).

    Every sample draws a popularity for each expert (gamma with mean 1 and coefficient of variation
    `expert_cv`, 0 = all equal), sums it over the experts/ep experts of a rank, and deals the
    ep x `rows_per_rank` rows by it (the multinomial's noise as a normal with its covariance; 0 rows =
    without that noise). Only draws are used whose streams NumPy has kept over its versions, so a seed
    means the same loads everywhere. Raises InputError for an `ep` that does not divide and for negative
    numbers.
    """
    if ep < 1 or experts % ep:
        raise InputError(f"parallel.ep={ep} does not divide experts={experts}")
    if not (0 <= expert_cv < inf and 0 <= rows_per_rank < inf and n_samples >= 0):
        raise InputError(
            f"expert_cv={expert_cv}, rows_per_rank={rows_per_rank} and n_samples={n_samples} must be finite "
            "and 0 or more"
        )
    rng = np.random.default_rng(seed)
    if expert_cv > SMALLEST_CV:
        shape = 1.0 / expert_cv**2
        # The sum of a rank's independent gammas is a gamma with the shapes added: one draw a rank.
        popularity = rng.gamma(shape * (experts // ep), size=(n_samples, ep))
        popularity = np.maximum(popularity, np.finfo(np.float64).tiny)
    else:
        popularity = np.ones((n_samples, ep))
    shares = popularity / popularity.sum(axis=1, keepdims=True)
    rows = round(rows_per_rank * ep)
    if rows == 0:
        return np.asarray(shares * ep)
    dealt = deal(rng, shares, rows)
    return np.asarray(dealt * (ep / dealt.sum(axis=1, keepdims=True)))


def deal(rng: np.random.Generator, shares: FloatArray, rows: int) -> FloatArray:
    """Shares of `rows` rows that were dealt by `shares` [samples, receivers], summing to about 1 (eq. R3).

    The multinomial as the normal of its mean and covariance, cut off at 0.
    """
    noise = np.sqrt(shares / rows) * rng.standard_normal(shares.shape)
    return np.asarray(np.maximum(shares + noise - shares * noise.sum(axis=1, keepdims=True), 0.0))


def sample_choices(gate: Gate, n_tokens: int, seed: int) -> IntArray:
    """The experts that each of `n_tokens` tokens picks, [n_tokens, top_k], with equal popularity."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((n_tokens, gate.experts))
    if gate.groups_per_token < gate.groups:
        grouped = logits.reshape(n_tokens, gate.groups, -1)
        if gate.group_score == "best":
            ranking = grouped.max(axis=2)
        else:
            ranking = scores_of(np.sort(grouped, axis=2)[:, :, -2:], gate.scores).sum(axis=2)
        closed = np.argsort(-ranking, axis=1)[:, gate.groups_per_token :]
        np.put_along_axis(grouped, closed[:, :, None], -np.inf, axis=1)
    return np.argpartition(-logits, gate.top_k - 1, axis=1)[:, : gate.top_k].astype(np.int64)


@dataclass(frozen=True, slots=True)
class SampledTraffic:
    """Tokens on the links of one sampled dispatch; targets count once a token.

    `rows[s, d]` tokens of rank s with an expert on rank d; `ib[s, d]` tokens that the NIC of s sends to
    the NIC of d (same index on another node); `nvlink[f, d]` tokens that f passes on to d in its node.
    """

    rows: IntArray
    ib: IntArray
    nvlink: IntArray


def sampled_traffic(gate: Gate, ep: int, gpus_per_node: int, tokens: int, seed: int) -> SampledTraffic:
    """One seeded sample of a dispatch of `tokens` tokens from each of `ep` ranks, [ep, ep] each."""
    if gate.experts % ep or ep % min(ep, gpus_per_node):
        raise InputError(
            f"parallel.ep={ep} must divide experts={gate.experts} and fill nodes of {gpus_per_node}"
        )
    per_node = min(ep, gpus_per_node)
    choices = sample_choices(gate, ep * tokens, seed) // (gate.experts // ep)
    source = np.repeat(np.arange(ep), tokens)
    hit = np.zeros((ep * tokens, ep), dtype=bool)
    np.put_along_axis(hit, choices, True, axis=1)
    rows = hit.reshape(ep, tokens, ep).sum(axis=1)
    node_hit = hit.reshape(ep * tokens, ep // per_node, per_node).any(axis=2)
    to_node = node_hit.reshape(ep, tokens, -1).sum(axis=1)
    ib = np.zeros((ep, ep), dtype=np.int64)
    nvlink = np.zeros((ep, ep), dtype=np.int64)
    for s in range(ep):
        index = s % per_node
        for node in range(ep // per_node):
            forwarder = node * per_node + index
            if forwarder != s:
                ib[s, forwarder] = to_node[s, node] if node != s // per_node else 0
            targets = slice(node * per_node, (node + 1) * per_node)
            nvlink[forwarder, targets] += rows[s, targets]
            nvlink[forwarder, forwarder] = 0
    assert rows.sum() == hit.sum() and source.size == hit.shape[0]
    return SampledTraffic(rows, ib, nvlink)
