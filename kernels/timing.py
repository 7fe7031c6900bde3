"""Times device work, with warm-up, repeats and CUDA events on every rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from moesim.kernels.launch import GpuGroup, cupy


class StartGate:
    """Holds every rank's stream until opened, so that queued work starts together and no launch is timed.

    One waiting thread per GPU polls a word in pinned host memory; a stream is held for at most `limit_s`.
    """

    def __init__(self, group: GpuGroup, limit_s: float = 20.0) -> None:
        """Create a closed gate."""
        self._group, self._limit_s, self._turn = group, limit_s, 0
        self._memory = cupy().cuda.alloc_pinned_memory(64)
        self._word = np.frombuffer(self._memory, dtype=np.uint32, count=1)
        self._word[0] = 0

    def close(self, ranks: Sequence[int]) -> None:
        """Queue the wait on the ranks' streams."""
        self._turn += 1
        for rank in ranks:
            self._group.wait(rank, self._memory.ptr, self._turn, rank, self._limit_s)

    def open(self) -> None:
        """Release all held streams."""
        self._word[0] = self._turn


def time_group(
    group: GpuGroup,
    work: Callable[[int], None],
    repeats: int = 20,
    warm_up: int = 3,
    ranks: Sequence[int] | None = None,
    gate: StartGate | None = None,
    before: Callable[[int], None] | None = None,
) -> list[list[float]]:
    """Seconds of each repeat on each rank, [repeat][rank], for work(i) queued on the ranks' streams.

    All launches are queued behind a gate, then run back to back; events around work(i) exclude before(i).
    The time of a collective is the largest over its ranks. Raises DeviceTimeoutError where a wait failed.
    """
    used = list(range(group.ranks)) if ranks is None else list(ranks)
    hold = gate or StartGate(group)
    for i in range(warm_up):
        if before:
            before(i)
        work(i)
    group.synchronize()
    hold.close(used)
    marks: list[tuple[list[Any], list[Any]]] = []
    for i in range(repeats):
        if before:
            before(i)
        first = [_mark(group, rank) for rank in used]
        work(i)
        marks.append((first, [_mark(group, rank) for rank in used]))
    time.sleep(0.002)  # the last launches reach the GPUs before the gate opens
    hold.open()
    group.synchronize()
    elapsed = cupy().cuda.get_elapsed_time
    return [[elapsed(a, b) * 1e-3 for a, b in zip(first, last, strict=True)] for first, last in marks]


def _mark(group: GpuGroup, rank: int) -> Any:
    cp = cupy()
    with cp.cuda.Device(group.devices[rank]):
        event = cp.cuda.Event()
        event.record(group.streams[rank])
    return event
