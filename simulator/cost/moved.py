"""Bytes that a step moves over the links of a GPU, by what moves them (pure)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

EXPERTS = "dispatch and combine"
REPEATED_EXPERTS = "dispatch and combine again for recompute"
SENDS = "pipeline sends"
TENSOR = "tensor parallelism"
CONTEXT = "context parallelism"
SPLIT_EXPERTS = "rows of split experts"
SHARDS = "parameter and gradient shards inside the step"
REDUCTION = "gradient reduction"
GATHER = "parameter gather"
TIED = "gradient of a tied table"
NORM = "gradient norm"


class Moved(NamedTuple):
    """Bytes that an average GPU sends, and as many that it receives, over its NICs and scale-up ports.

    They cross the links whether compute hides them or not. `what`: one of the names of this module.
    """

    what: str
    nic_bytes: float
    scale_up_bytes: float


def summed(rows: Iterable[tuple[Moved, float]]) -> tuple[Moved, ...]:
    """(moved, times) rows added by what moves them, in the order of their first row; empty ones left out."""
    totals: dict[str, tuple[float, float]] = {}
    for (what, nic, scale_up), times in rows:
        known = totals.get(what, (0.0, 0.0))
        totals[what] = known[0] + times * nic, known[1] + times * scale_up
    return tuple(Moved(what, *both) for what, both in totals.items() if any(both))
