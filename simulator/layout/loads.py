"""Draws seeded samples of routing: expert load per rank, and tokens between every pair of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from moesim.hwmodels.arrays import FloatArray, IntArray
from moesim.hwmodels.errors import InputError
from moesim.simulator.layout.routing import Gate, scores_of

SMALLEST_CV = 1e-6
"""Least coefficient of variation that is drawn; below it experts count as equally popular."""


def sampled_loads(
    seed: int | Sequence[int],
    n_samples: int,
    ep: int,
    experts: int,
    expert_cv: float,
    rows_per_rank: float,
) -> FloatArray:
    """Draw the expert rows of each rank over their mean [n_samples, ep]; each sample averages 1 (eq. R3).

    Every sample draws a popularity for each expert (gamma with mean 1 and coefficient of variation
    `expert_cv`; 0 makes all equal), sums it over the experts/ep experts of a rank, and distributes
    ep x `rows_per_rank` rows accordingly, with the noise of a multinomial approximated by a normal with its
    covariance (0 rows: no such noise). A seed gives the same loads with every NumPy version, because only
    distributions with a stable stream are used. Raises InputError for an `ep` that does not divide and for
    negative numbers.
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
        # A sum of independent gammas is a gamma with the sum of their shapes, so one draw per rank is enough.
        popularity = rng.gamma(shape * (experts // ep), size=(n_samples, ep))
        popularity = np.maximum(popularity, np.finfo(np.float64).tiny)
    else:
        popularity = np.ones((n_samples, ep))
    shares = popularity / popularity.sum(axis=1, keepdims=True)
    rows = round(rows_per_rank * ep)
    if rows == 0:
        return np.asarray(shares * ep)
    dealt = distribute_rows(rng, shares, rows)
    return np.asarray(dealt * (ep / dealt.sum(axis=1, keepdims=True)))


def distribute_rows(rng: np.random.Generator, shares: FloatArray, rows: int) -> FloatArray:
    """Shares of `rows` rows after each row picked a receiver by `shares` [samples, receivers] (eq. R3).

    The multinomial is approximated by the normal with its mean and covariance, cut off at 0, so that the
    shares of a sample sum to about 1.
    """
    noise = np.sqrt(shares / rows) * rng.standard_normal(shares.shape)
    return np.asarray(np.maximum(shares + noise - shares * noise.sum(axis=1, keepdims=True), 0.0))


def sample_choices(gate: Gate, n_tokens: int, seed: int) -> IntArray:
    """Draw the experts that each token picks [n_tokens, top_k]; all experts are equally popular.

    Numbers from `gate.experts` on are experts without computation.
    """
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((n_tokens, gate.experts + gate.zero_experts))
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
    """Tokens on the links of one sampled dispatch; a token counts once for each target rank.

    `rows[s, d]` are the tokens of rank s with an expert on rank d, `ib[s, d]` those that the NIC of s sends
    to the NIC of d (same index on another node), and `nvlink[f, d]` those that f forwards to d in its node.
    """

    rows: IntArray
    ib: IntArray
    nvlink: IntArray


def sampled_traffic(gate: Gate, ep: int, gpus_per_node: int, tokens: int, seed: int) -> SampledTraffic:
    """Draw one dispatch of `tokens` tokens from each of `ep` ranks; every table is [ep, ep]."""
    if gate.experts % ep or ep % min(ep, gpus_per_node):
        raise InputError(
            f"parallel.ep={ep} must divide experts={gate.experts} and fill nodes of {gpus_per_node}"
        )
    per_node = min(ep, gpus_per_node)
    choices = np.minimum(sample_choices(gate, ep * tokens, seed) // (gate.experts // ep), ep)
    source = np.repeat(np.arange(ep), tokens)
    anywhere = np.zeros((ep * tokens, ep + 1), dtype=bool)  # the last column is no rank
    np.put_along_axis(anywhere, choices, True, axis=1)
    hit = anywhere[:, :ep]
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
