"""The allocator against PyTorch's own on an H200: lab/results/2026-11-22-h200-allocator.json.xz."""

from __future__ import annotations

from functools import cache
from itertools import accumulate
from typing import Any

import pytest
from lab import packed
from lab.studies.allocator_sequences import Operation, random_sequence

from moesim.simulator.memory.allocator import Event, bytes_after_events, peak_bytes

MIB = 1 << 20
RESULTS = "2026-11-22-h200-allocator.json"


@cache
def measured() -> dict[str, Any]:
    """The study's file."""
    loaded: dict[str, Any] = packed.read(RESULTS)
    return loaded


def as_event(operation: Operation) -> Event:
    """An operation of the study as an event."""
    match operation:
        case ("alloc", tensor, size, stream):
            return Event("allocate", tensor, size, stream)
        case ("record", tensor, stream):
            return Event("use", tensor, 0, stream)
        case ("busy", stream):
            return Event("busy", stream=stream)
        case ("idle",):
            return Event("idle")
        case (_, tensor):
            return Event("free", tensor)
    raise AssertionError(operation)


def reserved(*sizes: int, expandable: bool = False) -> int:
    """Bytes reserved by allocations of these sizes."""
    return peak_bytes([Event("allocate", n, size) for n, size in enumerate(sizes)], expandable).reserved


def test_segments_have_the_sizes_of_pytorch() -> None:
    """2 MiB up to 1 MiB, 20 MiB below 10 MiB, then multiples of 2 MiB."""
    assert reserved(1) == reserved(MIB) == 2 * MIB
    assert reserved(MIB + 1) == reserved(10 * MIB - 512) == 20 * MIB
    assert reserved(10 * MIB) == 10 * MIB
    assert reserved(11 * MIB) == 12 * MIB
    assert reserved(*[512] * 4096) == 2 * MIB and reserved(*[512] * 4097) == 4 * MIB
    assert reserved(9 * MIB, 9 * MIB) == 20 * MIB and reserved(9 * MIB, 9 * MIB, 9 * MIB) == 40 * MIB


def test_a_remainder_of_one_mib_stays_with_its_block() -> None:
    def active_after_reuse(size: int) -> int:
        events = [Event("allocate", 0, 20 * MIB), Event("free", 0), Event("allocate", 1, size)]
        return list(bytes_after_events(events))[-1].active

    assert active_after_reuse(19 * MIB) == 20 * MIB  # what is left is not above 1 MiB
    assert active_after_reuse(19 * MIB - 512) == 19 * MIB - 512


def test_streams_share_no_blocks_and_freed_neighbours_join() -> None:
    events = [Event("allocate", 0, 40 * MIB), Event("free", 0)]
    assert peak_bytes([*events, Event("allocate", 1, 40 * MIB, 1)]).reserved == 80 * MIB
    halves = [
        Event("allocate", 1, 20 * MIB),
        Event("allocate", 2, 20 * MIB),
        Event("free", 1),
        Event("free", 2),
    ]
    assert peak_bytes([*events, *halves, Event("allocate", 3, 40 * MIB)]).reserved == 40 * MIB


@pytest.mark.parametrize("kind", ["idle", "busy"])
def test_random_sequences_reserve_what_torch_reserved(kind: str) -> None:
    """After every one of 80 operations on two streams; with `busy`, freed blocks wait for a stream."""
    rows = [row for row in measured()["sequences"] if row["kind"] == kind]
    assert len(rows) >= 28
    for row in rows:
        events = map(as_event, random_sequence(row["seed"], kind == "busy"))
        after = list(bytes_after_events(events))
        assert [a.reserved for a in after] == [512 * n for n in accumulate(row["reserved"])], row["seed"]
        assert [a.active for a in after] == [512 * n for n in accumulate(row["active"])], row["seed"]


def test_steps_with_expandable_segments_reserve_what_torch_reserved() -> None:
    """Every allocation of three steps under FSDP2; torch's own also has 64 MiB of cuBLAS's from before."""
    model = measured()["models"]["dense, op, expandable"]
    events = [Event("allocate", *row) if len(row) == 3 else Event("free", *row) for row in model["events"]]
    before, *later = model["marks"]
    peaks = peak_bytes(events, expandable=True)
    assert peaks.active == max(row[2] for row in later) - before[1]
    held = max(row[4] for row in later) - before[1]
    assert held - 4 * MIB <= peaks.reserved <= held + 4 * MIB
