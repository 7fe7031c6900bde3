"""Random sequences of allocations, and their replay through PyTorch's CUDA allocator."""

from __future__ import annotations

import random
from typing import Any

OPERATIONS, LIVE_BYTES = 80, 24 << 30
BUSY_CYCLES = 250_000_000
"""Clock cycles for which a stream is kept busy: about 0.14 s."""

Operation = tuple[Any, ...]
"""("alloc", id, bytes, stream), ("free", id), ("record", id, stream), ("busy", stream) or ("idle",)."""


def random_sequence(seed: int, busy: bool) -> list[Operation]:
    """Allocations, frees and uses on two streams; with `busy`, one stream runs for a part of the sequence.

    A block that the busy stream uses is not free before the stream is idle. Sizes go from one byte to 4 GiB.
    """
    draw = random.Random(seed)
    operations: list[Operation] = []
    live: dict[int, int] = {}
    working = -1
    for n in range(OPERATIONS):
        if busy and n == OPERATIONS // 4:
            working = draw.randrange(2)
            operations.append(("busy", working))
        if busy and n == 3 * OPERATIONS // 4:
            working = -1
            operations.append(("idle",))
        kind = draw.random()
        if live and (kind < 0.4 or sum(live.values()) > LIVE_BYTES):
            block = draw.choice(sorted(live))
            del live[block]
            operations.append(("free", block))
        elif live and kind < 0.5:
            operations.append(("record", draw.choice(sorted(live)), draw.randrange(2)))
        else:
            size = _random_size(draw)
            live[n] = size
            operations.append(("alloc", n, size, draw.randrange(2)))
    return operations


def _random_size(draw: random.Random) -> int:
    """Bytes of one allocation: often a repeated size, as in a training step, else anything up to 4 GiB."""
    if draw.random() < 0.4:
        return draw.choice((512, 65536, 1 << 20, 3 << 20, 10 << 20, 33554432, 100663296, 1 << 30))
    low, high = draw.choice(((1, 4096), (4096, 1 << 20), (1 << 20, 10 << 20), (10 << 20, 1 << 28)))
    if draw.random() < 0.06:
        low, high = 1 << 28, 4 << 30
    return draw.randint(low, high)


def replay_on_device(operations: list[Operation], cpu: bool) -> tuple[list[list[int]], bool]:
    """Run a sequence through torch: [reserved, active, allocated] bytes after every operation.

    The flag says whether the busy stream was still busy when its operations ended.
    """
    import torch

    if cpu:
        return [[0, 0, 0] for _ in operations], True
    device = torch.cuda.current_device()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    tensors: dict[int, Any] = {}
    working, rows, busy = -1, [], True
    for operation in operations:
        match operation:
            case ("alloc", block, size, stream):
                with torch.cuda.stream(streams[stream]):
                    tensors[block] = torch.empty(size, dtype=torch.uint8, device="cuda")
            case ("free", block):
                del tensors[block]
            case ("record", block, stream):
                tensors[block].record_stream(streams[stream])
            case ("busy", stream):
                working = stream
                with torch.cuda.stream(streams[stream]):
                    torch.cuda._sleep(BUSY_CYCLES)
            case ("idle",):
                busy = not streams[working].query()
                working = -1
        for n, s in enumerate(streams):
            if n != working:
                s.synchronize()
        stats = torch.cuda.memory_stats_as_nested_dict(device)
        rows.append(
            [stats[k]["all"]["current"] for k in ("reserved_bytes", "active_bytes", "allocated_bytes")]
        )
    tensors.clear()
    torch.cuda.synchronize()
    return rows, busy
