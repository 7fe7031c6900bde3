"""Seeded inputs for checking and timing the kernels: routings and BF16 rows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moesim.hwmodels.errors import InputError

ROUTINGS = ("balanced", "skewed", "some ranks idle", "all on one rank", "dropped choices")


def routing(
    kind: str, tokens: int, k: int, experts: int, ranks: int, rng: np.random.Generator
) -> NDArray[np.int32]:
    """Expert ids [tokens, k] as the top k of random scores; ids are distinct in a row except -1.

    "balanced" draws independent normal scores, "skewed" favours low ids, "some ranks idle" uses only the
    upper half of the experts, "all on one rank" only those of rank 0, and "dropped choices" replaces 60 % of
    a balanced routing by -1.
    """
    scores = rng.standard_normal((tokens, experts), dtype=np.float32)
    if kind == "skewed":
        scores += np.linspace(3, -3, experts, dtype=np.float32)
    elif kind == "some ranks idle":
        scores[:, : experts // 2] = -np.inf
    elif kind == "all on one rank":
        scores[:, experts // ranks :] = -np.inf
    elif kind not in ROUTINGS:
        raise InputError(f"unknown routing {kind!r}; known: {', '.join(ROUTINGS)}")
    ids = np.argsort(-scores, axis=1, kind="stable")[:, :k].astype(np.int32)
    if kind == "dropped choices":
        ids[rng.random(ids.shape) < 0.6] = -1
    return np.ascontiguousarray(ids)


def bf16_rows(rows: int, columns: int, rng: np.random.Generator) -> NDArray[np.uint16]:
    """Random finite BF16 bits: normal values, each row scaled by its own power of two (2^-6 to 2^6)."""
    values = rng.standard_normal((rows, columns), dtype=np.float32)
    values *= np.exp2(rng.integers(-6, 7, (rows, 1))).astype(np.float32)
    bits: NDArray[np.uint16] = (values.view(np.uint32) >> 16).astype(np.uint16)
    return bits
