"""Exposed data-parallel collectives of a rank that holds several model chunks (eq. O12 and O13; pure)."""

from __future__ import annotations

from itertools import accumulate
from math import fsum
from typing import NamedTuple

from moesim.simulator.cost.overlap import OverlapSlowDown, exposed_behind_window, exposed_overlapped


class ChunkTimes(NamedTuple):
    """Seconds of each model chunk of a rank, in the order of its forward: a collective and one pass."""

    collective_s: tuple[float, ...]
    pass_s: tuple[float, ...]


class ChunkPlace(NamedTuple):
    """Where a rank is: its number, micro-batches between two of its chunks, buckets of its first chunk.

    Only pipeline rank 0 cuts its first chunk into buckets; every other chunk is one bucket.
    """

    rank: int
    passes: int
    buckets: int


def exposed_gathers(
    chunks: ChunkTimes, place: ChunkPlace, slow_down: OverlapSlowDown, update_s: float = 0.0
) -> float:
    """Eq. O12: exposed seconds of the parameter gathers behind the next step's forwards.

    The first two chunks are gathered at once, one after the other; a further one when the chunk before it
    begins. Rank r begins r forwards after rank 0 and is idle until then. `update_s`: seconds of the optimizer
    on other chunks, beside which the first is gathered (in one piece).
    """
    first_s, forward_s = chunks.collective_s[0], chunks.pass_s[0]
    idle_s = place.rank * forward_s
    if update_s:
        exposed = exposed_overlapped(max(0.0, first_s - idle_s), update_s, slow_down)
    elif place.rank == 0:
        exposed = exposed_behind_window(first_s, forward_s, place.buckets, slow_down)
    else:
        exposed = max(0.0, first_s - idle_s)
    begins = list(accumulate((place.passes * s for s in chunks.pass_s), initial=0.0))
    end = first_s
    for number, collective_s in enumerate(chunks.collective_s[1:], start=1):
        start = max(end, begins[number - 1] if number > 1 else 0.0)
        needed = idle_s + begins[number] + exposed
        left = exposed_overlapped(collective_s, max(0.0, needed - start), slow_down)
        exposed += left
        end = max(needed, start + collective_s * slow_down.collective_factor)
    return exposed


def exposed_reductions(chunks: ChunkTimes, place: ChunkPlace, slow_down: OverlapSlowDown) -> float:
    """Eq. O13: exposed seconds of the gradient reductions after a rank's last backward.

    The last chunk's gradients are complete first. The first chunk's are reduced by buckets beside its last
    backward on rank 0, and after it on other ranks, which end earlier and wait for rank 0 anyway.
    """
    count = len(chunks.collective_s)
    complete = [-place.passes * fsum(chunks.pass_s[:number]) for number in range(count)]
    end, lost = complete[-1], 0.0
    for number in range(count - 1, 0, -1):
        start = max(end, complete[number])
        end = start + chunks.collective_s[number] * slow_down.collective_factor
        lost += slow_down.compute_lost * min(chunks.collective_s[number], max(0.0, -start))
    first_s, backward_s = chunks.collective_s[0], chunks.pass_s[0]
    if place.rank == 0:
        busy_s = max(0.0, end + backward_s) if count > 1 else 0.0
        window_s = max(0.0, backward_s - busy_s)
        behind = exposed_behind_window(first_s, window_s, place.buckets, slow_down)
        return lost + behind + max(0.0, busy_s - backward_s)
    return lost + first_s + (max(0.0, end) if count > 1 else 0.0)
