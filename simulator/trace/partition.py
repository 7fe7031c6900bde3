"""Cuts a step of one rank into parts that add up to its wall time in integer nanoseconds.

The wall time of each step is cut at every start and end. Each piece belongs to one part: to a computing
kernel if any runs, else to communication that moves data, else to communication that waits for a peer, else
to the cause of the idle time. Of several kernels of one kind the one that ends first has the piece, because
what follows it waits for it.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from msgspec import Struct, field

from moesim.hwmodels.arrays import IntArray, RecordArray
from moesim.hwmodels.errors import InputError
from moesim.simulator.trace import summary
from moesim.simulator.trace.calls import chained
from moesim.simulator.trace.classes import CLASSES, COMMUNICATION
from moesim.simulator.trace.events import BACKWARD, PHASES
from moesim.simulator.trace.read import RankTrace, StepTrace

KINDS = ("compute", "exposed communication", "idle")
Part = tuple[str, str]
"""Kind and name of a part of a step: a class, with " (waiting)" behind it where waiting is known; a cause."""
WAITING = " (waiting)"
NOT_PRICED = ("not_in_model", "unclassified", "fill", "memset", "memcpy_h2d", "memcpy_d2h", "memcpy_d2d",
              "memcpy_p2p", "other_communication", "broadcast")  # fmt: skip
"""Classes that no prediction has."""


class Totals(Struct, frozen=True):
    """Kernels of one class in a step, hidden ones too: nanoseconds, number, FLOP where shapes are known."""

    ns: int = 0
    count: int = 0
    flop: float = 0.0
    flop_ns: int = 0
    """Nanoseconds of the kernels whose FLOP is known."""
    phases_ns: Mapping[str, int] = field(default_factory=dict)
    bytes: int = 0
    """Bytes of collectives, as far as the trace says them."""
    waiting_ns: int | None = None
    """Of a collective: waiting for peers, where it is known, or estimated from equal calls."""
    shapes: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Number and nanoseconds by shape of a GEMM, its sizes in order of size."""


class StepSide(Struct, frozen=True):
    """One step of one rank, cut into parts."""

    label: str
    rank: RankTrace
    step: Mapping[str, Any]
    events: RecordArray
    """GPU events of the step, cut off at its ends."""
    parts: Mapping[Part, int]
    totals: Mapping[str, Totals]
    split: bool
    """Whether waiting of collectives is known from other ranks."""

    @property
    def wall_ns(self) -> int:
        """Wall time of the step."""
        return int(self.step["wall_ns"])


# -- one side: its rank and step, cut into parts -----------------------------------------------------


def side_of(
    trace: StepTrace, rank: int | None, step: int | None, notes: list[str], *, priced: bool = False
) -> StepSide:
    """A step of a trace, cut into parts that add up to its wall time.

    `priced`: by classes as a prediction has them.
    """
    chosen = _rank(trace, rank, notes)
    row = _step(trace, chosen, step, notes)
    start, end = int(row["start_ns"]), int(row["start_ns"]) + int(row["wall_ns"])
    events = chosen.events
    inside = np.flatnonzero((events["end"] > start) & (events["start"] < end))
    waits = _waits(trace, chosen)
    split = bool(waits)
    cut = events[inside].copy()
    cut["start"], cut["end"] = np.maximum(cut["start"], start), np.minimum(cut["end"], end)
    if priced:
        cut["cls"] = as_priced(chosen.names, cut)
    late = np.array([waits.get(n, 0) for n in inside.tolist()], np.int64)
    late = np.clip(late - (cut["start"] - events["start"][inside]), 0, cut["end"] - cut["start"])
    parts = exclusive(cut, late, split)
    busy = sum(parts.values())
    for cause, taken in row["idle_by_cause_ns"].items():
        if taken:
            parts["idle", cause] = int(taken)
    if sum(parts.values()) != end - start:
        raise InputError(
            f"{trace.source}: the parts of step {row['name']} add up to {sum(parts.values())} ns of "
            f"{end - start} (busy {busy}); the trace contradicts itself"
        )
    return StepSide(trace.source, chosen, row, cut, parts, _totals(chosen, cut, late, split), split)


def joined(side: StepSide) -> StepSide:
    """The side with waiting and transfer of a class in one part."""
    parts: defaultdict[Part, int] = defaultdict(int)
    for (kind, name), taken in side.parts.items():
        parts[kind, name.removesuffix(WAITING)] += taken
    return StepSide(side.label, side.rank, side.step, side.events, dict(parts), side.totals, side.split)


def _rank(trace: StepTrace, rank: int | None, notes: list[str]) -> RankTrace:
    known = {found.raw.rank: found for found in trace.ranks}
    if not all(found.raw.timed for found in trace.ranks):
        raise InputError(
            f"{trace.source}: an execution trace without times cannot be compared; give a profiler's trace"
        )
    if rank is not None:
        if rank not in known:
            raise InputError(f"--rank {rank}: {trace.source} has rank {', '.join(map(str, sorted(known)))}")
        return known[rank]
    if len(known) == 1:
        return trace.ranks[0]
    waited: dict[int, int] = dict.fromkeys(known, 0)
    for row in trace.matched:
        waited[row["rank"]] += row["waiting_ns"]
    if not trace.matched:
        return trace.ranks[0]
    first = min(waited, key=lambda number: (waited[number], number))
    notes.append(
        f"{trace.source}: rank {first} of {len(known)} is shown, which waits least for the others "
        f"({waited[first] / 1e6:.2f} ms), so that they wait for it; --rank N shows another"
    )
    return known[first]


def _step(trace: StepTrace, rank: RankTrace, step: int | None, notes: list[str]) -> dict[str, Any]:
    if not rank.steps:
        raise InputError(f"{trace.source}: no step holds GPU work of rank {rank.raw.rank}")
    if step is not None:
        for key in ("number", "name"):
            for row in rank.steps:
                digits = "".join(c for c in str(row["name"]) if c.isdigit())
                if (row["number"] if key == "number" else digits) == (step if key == "number" else str(step)):
                    return row
        listed = ", ".join(f"{row['number']} ({row['name']})" for row in rank.steps[:20])
        raise InputError(f"--step {step}: {trace.source} has steps {listed}")
    order = sorted(rank.steps, key=lambda row: (row["wall_ns"], row["number"]))
    chosen = order[(len(order) - 1) // 2]
    if len(order) > 1:
        least, most = (order[n]["wall_ns"] / 1e6 for n in (0, -1))
        notes.append(
            f"{trace.source}: step {chosen['number']} ({chosen['name']}) of {len(order)} is shown, the "
            f"median ({least:.2f} to {most:.2f} ms); --step N shows another"
        )
    return chosen


def _waits(trace: StepTrace, rank: RankTrace) -> dict[int, int]:
    """Nanoseconds that each collective, by its place among the events, waits for peers, where it is known."""
    number = rank.raw.rank
    found = {
        (row["class"], row["group"], row["occurrence"]): row["waiting_ns"]
        for row in trace.matched
        if row["rank"] == number
    }
    keys = [(row["class"], row["group"], row["occurrence"]) for row in rank.collectives]
    return {
        row["event"]: int(found[key]) for row, key in zip(rank.collectives, keys, strict=True) if key in found
    }


_MOVED = ("memcpy_d2d", "fill", "memset")


def as_priced(names: Sequence[str], events: RecordArray) -> IntArray:
    """Classes of events as a prediction has them, which prices the kernels of an eager operator as one.

    By stream: casts and sorts belong to the chain that they stand in, copies and fills to the permute beside
    them, and the sum of a residual to the norm that reads it.
    """
    classes: IntArray = events["cls"].astype(np.int64)
    for stream in np.unique(events["stream"]).tolist():
        own = np.flatnonzero((events["stream"] == stream) & ~summary.is_communication(events))
        own = own[np.argsort(events["start"][own], kind="stable")]
        ops = [names[n] if n >= 0 else "" for n in events["op"][own].tolist()]
        phases = events["phase"][own].tolist()
        kinds = [CLASSES[n] for n in classes[own].tolist()]
        kept = [kind == "cast" and not op.startswith("aten::") for kind, op in zip(kinds, ops, strict=True)]
        for n in np.flatnonzero(kept).tolist():
            kinds[n] = "quantised"  # a price of its own
        kinds = chained(kinds, ops, [phase == BACKWARD for phase in phases])
        for n, kind in enumerate(kinds):
            later = (kinds[m] for m in range(n + 1, len(kinds)))
            after = next((cls for cls in later if cls != "fsdp_copy"), "")
            if kind in _MOVED and "permute" in (kinds[n - 1] if n else "", after):
                kinds[n] = "permute"
            elif (
                kind == "elementwise" and after == "norm" and phases[n] != BACKWARD and ops[n] == "aten::add"
            ):
                kinds[n] = "norm"
        classes[own] = [CLASSES.index("cast" if one else kind) for one, kind in zip(kept, kinds, strict=True)]
    return classes


def exclusive(events: RecordArray, waits: IntArray, split: bool) -> dict[Part, int]:
    """Nanoseconds of each part in which something runs; they add up to the busy time.

    `waits`: nanoseconds at the beginning of each event in which it waits for a peer.
    """
    talks = summary.is_communication(events)
    pieces: list[tuple[int, int, int, int, Part]] = []  # start, priority, end, number, part
    columns = (events[key].tolist() for key in ("start", "end", "cls"))
    for start, end, cls, talk, wait in zip(*columns, talks.tolist(), waits.tolist(), strict=True):
        name = CLASSES[cls]
        if not talk:
            pieces.append((start, 0, end, cls, ("compute", name)))
            continue
        if wait:
            pieces.append((start, 2, start + wait, cls, ("exposed communication", name + WAITING * split)))
        pieces.append((start + wait, 1, end, cls, ("exposed communication", name)))
    pieces.sort(key=lambda piece: piece[0])
    points = sorted({point for piece in pieces for point in (piece[0], piece[2])})
    parts: defaultdict[Part, int] = defaultdict(int)
    running: list[tuple[int, int, int, Part]] = []
    at = 0
    for begin, end in pairwise(points):
        while at < len(pieces) and pieces[at][0] <= begin:
            heapq.heappush(running, pieces[at][1:])
            at += 1
        # What ended below a piece of higher priority leaves when it comes to the top.
        while running and running[0][1] <= begin:
            heapq.heappop(running)
        if running:
            parts[running[0][3]] += end - begin
    return dict(parts)


def _totals(rank: RankTrace, events: RecordArray, waits: IntArray, split: bool) -> dict[str, Totals]:
    length = events["end"] - events["start"]
    comms, found = rank.raw.comms, {}
    for number in np.unique(events["cls"]).tolist():
        own = np.flatnonzero(events["cls"] == number)
        name, taken = CLASSES[number], length[own]
        phases = {
            PHASES[phase]: int(taken[events["phase"][own] == phase].sum())
            for phase in np.unique(events["phase"][own]).tolist()
        }
        if name not in COMMUNICATION:
            flop, flop_ns, shapes = _products(rank.names, events[own])
            found[name] = Totals(int(taken.sum()), len(own), flop, flop_ns, phases, 0, None, shapes)
            continue
        sizes = np.array([_bytes(comms[n]) if n >= 0 else -1 for n in events["comm"][own].tolist()], np.int64)
        waiting = int(waits[own].sum()) if split else estimated_waiting(taken, sizes)
        found[name] = Totals(int(taken.sum()), len(own), 0.0, 0, phases, int(sizes[sizes > 0].sum()), waiting)
    return found


def _bytes(comm: Any) -> int:
    return int(max(comm.bytes_in, comm.bytes_out))


MOST_EVEN, EQUAL_CALLS = 0.1, 4
"""Quantile of equal calls that is taken as one without waiting, and how many of them there must be."""


def estimated_waiting(length: IntArray, sizes: IntArray) -> int | None:
    """What calls of equal bytes take beyond the fastest tenth of them; None where too few are equal.

    One rank alone does not say when its peers arrive, but a call that is slower than its equals waits or is
    disturbed.
    """
    found, known = 0, False
    for size in np.unique(sizes).tolist():
        own = length[sizes == size]
        if size > 0 and len(own) >= EQUAL_CALLS:
            fastest = int(np.quantile(own, MOST_EVEN, method="lower"))
            found, known = found + int(np.maximum(own - fastest, 0).sum()), True
    return found if known else None


SMALL_PART = 0.2
"""A kernel that takes less than this share of the longest one of a product prepares or reduces it."""


def _products(names: Sequence[str], events: RecordArray) -> tuple[float, int, dict[str, tuple[int, int]]]:
    """FLOP, nanoseconds of the kernels whose FLOP is known, and calls and nanoseconds by shape.

    A product may be several kernels, such as one that prepares groups; only its long kernels are calls.
    """
    flop, flop_ns = 0.0, 0
    found: dict[str, tuple[int, int]] = {}
    length = events["end"] - events["start"]
    for place in np.unique(events["shape"]).tolist():
        each = summary.flop_of(names[place]) if place >= 0 else 0
        if not each:
            continue
        own = np.flatnonzero(events["shape"] == place)
        means = {
            name: (float(length[own][mine].mean()), int(mine.sum()))
            for name in np.unique(events["name"][own]).tolist()
            if (mine := events["name"][own] == name).any()
        }
        longest = max(mean for mean, _ in means.values())
        calls = sum(count for mean, count in means.values() if mean >= SMALL_PART * longest)
        taken = int(length[own].sum())
        flop, flop_ns = flop + float(each) * calls, flop_ns + taken
        count, before = found.get(canonical(names[place]), (0, 0))
        found[canonical(names[place])] = count + calls, before + taken
    return flop, flop_ns, found


def canonical(shape: str) -> str:
    """A GEMM's sizes in order of size, so that operands in another order are the same product."""
    batch, _, sizes = shape.rpartition(" of ")
    ordered = "x".join(map(str, sorted(map(int, sizes.split("x")), reverse=True)))
    return f"{batch} of {ordered}" if batch else ordered
