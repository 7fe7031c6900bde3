"""The plain tables of a trace: GPU events, host events, names and notes; nothing here reads a file.

All times are integer nanoseconds of the clock of the file. A text is stored once, in `names`, and an event
holds its place there; -1 means that the file does not say.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, cast

import numpy as np
from msgspec import Struct, field

from moesim.hwmodels.arrays import IntArray, RecordArray

EVENT = np.dtype(
    [
        ("start", "i8"), ("end", "i8"), ("rank", "i4"), ("device", "i8"), ("stream", "i8"),
        ("name", "i4"), ("activity", "i1"), ("correlation", "i8"), ("external", "i8"), ("bytes", "i8"),
        ("comm", "i4"), ("graph", "?"),
        ("cls", "i2"), ("phase", "i1"), ("layer", "i2"), ("microbatch", "i2"), ("step", "i4"),
        ("op", "i4"), ("scope", "i4"), ("shape", "i4"), ("launch", "i8"), ("sequence", "i8"), ("dims", "i4"),
    ]
)  # fmt: skip
"""One activity of a GPU. `activity` is KERNEL, MEMCPY or MEMSET; `comm` a place in `Raw.comms`; `launch` the
start of the host call that launched it; `op` and `scope` the names of the innermost operator and annotation
around that call; `sequence` autograd's number; `dims` the sizes of that operator's inputs and, behind a tab,
their types, as JSON; from `cls` on, all is derived."""

HOST = np.dtype(
    [
        ("start", "i8"), ("end", "i8"), ("thread", "i8"), ("name", "i4"), ("kind", "i1"),
        ("correlation", "i8"), ("external", "i8"), ("sequence", "i8"), ("shape", "i4"),
    ]
)  # fmt: skip
"""One span of a host thread; `kind` is OP, ANNOTATION, CALL or OVERHEAD."""

KERNEL, MEMCPY, MEMSET = 0, 1, 2
OP, ANNOTATION, CALL, OVERHEAD = 0, 1, 2, 3
PHASES = ("unknown", "forward", "backward", "recompute", "optimizer")
"""Phases of a step, by their number in `phase`."""
UNKNOWN, FORWARD, BACKWARD, RECOMPUTE, OPTIMIZER = range(5)


class Comm(Struct, frozen=True):
    """What the file says of one collective or send: kind, group, ranks, payload in bytes, each if known."""

    kind: str = ""
    group: str = ""
    ranks: tuple[int, ...] = ()
    size: int = 0
    bytes_in: int = -1
    bytes_out: int = -1


def blank(count: int, dtype: np.dtype[np.void]) -> RecordArray:
    """Records of zeros."""
    return cast("RecordArray", np.zeros(count, dtype))


class Raw(Struct):
    """One rank as its file has it: `events` (EVENT), `host` (HOST), names, collectives and notes."""

    source: str
    rank: int = -1
    world: int = -1
    events: RecordArray = field(default_factory=lambda: blank(0, EVENT))
    host: RecordArray = field(default_factory=lambda: blank(0, HOST))
    names: list[str] = field(default_factory=list)
    comms: list[Comm] = field(default_factory=list)
    gpu: str = ""
    gpus_per_node: int = 0
    notes: list[str] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)
    """Classes by event where the file itself has them (the H800 timeline), else empty."""
    timed: bool = True
    """Whether the file has start times; an execution trace may have durations only."""


class Names(dict[str, int]):
    """Texts by their number, in order of first use."""

    def __missing__(self, text: str) -> int:
        """Number a new text."""
        number = len(self)
        self[text] = number
        return number


def rows(data: Iterable[tuple[Any, ...]], dtype: np.dtype[np.void], fields: tuple[str, ...]) -> RecordArray:
    """Records of `dtype` from tuples of `fields`; integer fields that the tuples leave out are -1."""
    listed = list(data)
    table = blank(len(listed), dtype)
    for name in dtype.names or ():
        if name not in fields:
            table[name] = 0 if name in ("graph", "phase", "cls") else -1
    if listed:
        for name, column in zip(fields, zip(*listed, strict=True), strict=True):
            table[name] = column
    return table


def records(table: RecordArray, fields: Iterable[str]) -> Iterator[tuple[Any, ...]]:
    """Plain tuples of the fields, row by row; only a piece of the table is Python objects at a time."""
    for begin in range(0, len(table), 1 << 16):
        piece = table[begin : begin + (1 << 16)]
        yield from zip(*(piece[name].tolist() for name in fields), strict=True)


def union(start: IntArray, end: IntArray) -> tuple[IntArray, IntArray]:
    """The merged spans that cover the given spans, in order, in nanoseconds."""
    if not len(start):
        return start, end
    order = np.argsort(start, kind="stable")
    start, end = start[order], np.maximum.accumulate(end[order])
    first = np.concatenate(([True], start[1:] > end[:-1]))
    last = np.concatenate((first[1:], [True]))
    return start[first], end[last]


def covered(spans: tuple[IntArray, IntArray]) -> int:
    """Nanoseconds that merged spans cover."""
    return int((spans[1] - spans[0]).sum())


def overlap(one: tuple[IntArray, IntArray], other: tuple[IntArray, IntArray]) -> int:
    """Nanoseconds that two sets of merged spans share."""
    both = union(np.concatenate((one[0], other[0])), np.concatenate((one[1], other[1])))
    return covered(one) + covered(other) - covered(both)
