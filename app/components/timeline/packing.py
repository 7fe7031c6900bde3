"""Packs the events of a step into bytes that the browser's component reads (pure).

The layout is a length (4 bytes, little-endian), a JSON header of that many bytes, and one column of whole
numbers after another. A number has seven bits a byte, the lowest first, and the top bit marks that more
follow; a column with negative numbers is folded first (0, -1, 1, -2 become 0, 1, 2, 3). Times are whole
nanoseconds, each begin as the gap after the end before it on its row. `frontend/decode.js` reads it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from moesim.app.charts.step import class_colour, colour, words
from moesim.app.charts.style import BLUE, GREEN, GREY, PURPLE
from moesim.hwmodels.arrays import IntArray
from moesim.hwmodels.errors import InputError
from moesim.simulator.predict.step_events import (
    Actions,
    CriticalPath,
    Events,
    StepEvents,
    stream_names,
)
from moesim.simulator.predict.timeline import zoomed_action
from moesim.simulator.predict.trace import FIRST_SEND, SCHEDULE, THREADS
from moesim.simulator.serving.trace import LifePhase
from moesim.simulator.trace.classes import CLASSES
from moesim.simulator.trace.events import Names
from moesim.simulator.trace.partition import StepSide
from moesim.simulator.trace.predicted import PREDICTED_STEP, RECEIVES

VERSION = 1
MOST_EVENTS = 600_000
"""Events that a browser holds and pans smoothly; of a longer step the phases of one pipeline rank come."""
MOST_ACTIONS = 400_000


class PackedStep(Struct, frozen=True):
    """A step ready to draw, with what the page needs to know of it.

    `whole`: whether the phases of all pipeline ranks are in it. `first_action[r]`: number of the first action
    of rank r, with the number of all actions at the end. `opened`: the action to open by default, or -1.
    """

    data: bytes
    step_s: float
    events: int
    whole: bool
    first_action: tuple[int, ...]
    opened: int


def packed_step(step: StepEvents, rank: int = 0, most: int | None = None) -> PackedStep:
    """Pack a step; one with more than `most` events (MOST_EVENTS) has the phases of `rank` only.

    Raises InputError for a step with more actions than a browser can draw.
    """
    most, actions = MOST_EVENTS if most is None else most, len(step.actions.kind)
    if actions > MOST_ACTIONS:
        raise InputError(
            f"the step has {actions:,} schedule actions, and a timeline shows up to {MOST_ACTIONS:,}: "
            "fewer micro-batches per step, or the trace of single ranks (moesim simulate --trace-ranks)"
        )
    rank = min(max(rank, 0), step.ranks - 1)
    events, whole = step.events, len(step.events) <= most
    if not whole:
        events = events.where((events.stream == SCHEDULE) | (events.rank == rank))
        if len(events) > most:
            # The actions, and of the other events those nearest to the rank's default action.
            opened = zoomed_action(step.actions, rank)
            distance = np.abs(events.begin_ns - step.actions.start_ns[opened])
            distance[events.stream == SCHEDULE] = -1
            events = events.where(np.sort(np.argsort(distance, kind="stable")[:most]))
    data = _packed(step, events, whole, rank)
    first = np.searchsorted(step.actions.rank, np.arange(step.ranks + 1)).tolist()
    return PackedStep(
        data, step.end_ns / 1e9, len(events), whole, tuple(first), zoomed_action(step.actions, rank)
    )


def _packed(
    step: StepEvents,
    events: Events,
    whole: bool,
    rank: int,
    sides: Sequence[str] = (),
    titles: Mapping[int, str] | None = None,
    span: str = "whole step",
) -> bytes:
    actions, path = step.actions, step.path
    names = list(dict.fromkeys((*events.names, *actions.kind, *path.cause)))
    number = {name: at for at, name in enumerate(names)}
    starts = np.flatnonzero(
        np.diff(events.rank, prepend=-1).astype(bool) | np.diff(events.stream, prepend=-1).astype(bool)
    )
    ends = np.append(starts[1:], len(events))
    titles = titles or stream_names(events.stream.tolist())
    before = np.append(0, events.end_ns[:-1])
    before[starts] = 0
    columns = {
        "event.gap": folded(events.begin_ns - before),
        "event.length": events.end_ns - events.begin_ns,
        "event.name": np.array([number[name] for name in events.names], dtype=np.int64)[events.name],
        "event.action": folded(np.diff(events.action, prepend=0)),
        "event.block": 2 * (events.block + 1) + events.critical,
        "action.kind": np.array([number[kind] for kind in actions.kind], dtype=np.int64),
        "action.rank": actions.rank,
        "action.start": folded(np.diff(actions.start_ns, prepend=0)),
        "action.length": actions.end_ns - actions.start_ns,
        "action.stage0": actions.stages[:, 0] + 1,
        "action.stage1": actions.stages[:, 1] + 1,
        "action.microbatch0": actions.microbatches[:, 0] + 1,
        "action.microbatch1": actions.microbatches[:, 1] + 1,
        "action.hidden": actions.hidden_ns,
        "action.exposed": actions.exposed_ns,
        "action.critical": actions.critical.astype(np.int64),
        "path.gap": folded(path.begin_ns - np.append(0, path.end_ns[:-1])),
        "path.length": path.end_ns - path.begin_ns,
        "path.name": np.array([number[cause] for cause in path.cause], dtype=np.int64),
        "path.action": folded(np.diff(path.action, prepend=0)),
        "path.rank": path.rank,
        "path.member": path.member,
    }
    header = {
        "version": VERSION,
        "end_ns": step.end_ns,
        "ranks": step.ranks,
        "whole": whole,
        "rank": rank,
        "sides": list(sides),
        "span": span,
        "names": [_described(name) for name in names]
        if sides
        else [{"name": name, "words": words(name), "colour": colour(name)} for name in names],
        "rows": [_row(events, int(start), int(end), titles) for start, end in zip(starts, ends, strict=True)],
    }
    parts = {name: numbers(column) for name, column in columns.items()}
    sizes = [{"name": n, "count": len(columns[n]), "bytes": len(part)} for n, part in parts.items()]
    text = json.dumps({**header, "columns": sizes}, separators=(",", ":")).encode()
    return b"".join((struct.pack("<I", len(text)), text, *parts.values()))


def _row(events: Events, start: int, end: int, titles: Mapping[int, str]) -> dict[str, Any]:
    """The header of a row of events."""
    rank, stream = int(events.rank[start]), int(events.stream[start])
    return {"rank": rank, "stream": stream, "title": titles[stream], "count": int(end - start)}


# -- steps of traces ---------------------------------------------------------------------------------

FIRST_STREAM = 10
"""Numbers of the rows of a trace's streams begin here, above those that the schedule of a step has."""
MOST_NAMES = 2000
"""Kernel names that are shown; rarer ones are shown as the rest of their class."""
LONGEST_NAME = 160


def packed_sides(sides: Mapping[str, StepSide], most: int = MOST_EVENTS) -> PackedStep:
    """Pack one step of a trace, or two below each other from the same start, a row a stream.

    `sides`: the title of each. Events that overlap on a stream get further rows. Of more than `most` events
    the longest are packed.
    """
    keys, titles, parts = Names(), dict[int, str](), []
    for number, side in enumerate(sides.values()):
        begin, end = (side.events[key] - int(side.step["start_ns"]) for key in ("start", "end"))
        rows = np.zeros(len(begin), np.int64)
        for stream in np.unique(side.events["stream"]).tolist():
            own = np.flatnonzero(side.events["stream"] == stream)
            lanes = _lanes(begin[own], end[own])
            for lane in range(int(lanes.max()) + 1):
                rows[own[lanes == lane]] = FIRST_STREAM + len(titles)
                title = _PREDICTED.get(stream, f"pipeline send {stream - FIRST_SEND}")
                words = title if side.step["name"] == PREDICTED_STEP else f"stream {stream}"
                titles[FIRST_STREAM + len(titles)] = words + f", lane {lane + 1}" * (lane > 0)
        names, layers = _named(side, keys), side.events["layer"].astype(np.int64)
        parts.append(np.stack([np.full(len(rows), number), rows, names, begin, end, layers]))
    columns = np.concatenate(parts, axis=1)
    columns = columns[:, columns[4] > columns[3]]
    whole = columns.shape[1] <= most
    if not whole:
        columns = columns[:, np.argsort(columns[3] - columns[4], kind="stable")[:most]]
    columns = columns[:, np.lexsort((columns[3], columns[1], columns[0]))]
    no_action = np.full(columns.shape[1], -1)
    events = Events(
        tuple(keys), columns[0], columns[1], columns[2], columns[3], columns[4], no_action, no_action,
        columns[5], no_action > 0,
    )  # fmt: skip
    step = _without_actions(max(side.wall_ns for side in sides.values()), len(sides), events)
    data = _packed(step, events, whole, 0, list(sides), titles)
    return PackedStep(data, step.end_ns / 1e9, len(events), whole, (0, 0), -1)


_PREDICTED = {**THREADS, RECEIVES: "pipeline receives"}


LIVES: Mapping[str, str] = {"queue": GREY, "prefill": BLUE, "transfer": PURPLE, "decode": GREEN}
"""Colours of the phases of a request."""


def packed_lives(lives: Mapping[str, Sequence[LifePhase]]) -> PackedStep:
    """Pack the lives of requests, one row each; `lives`: phases by the title of the row."""
    kinds = list(LIVES)
    rows = [
        (FIRST_STREAM + row, kinds.index(phase.name), phase.begin_ns, phase.end_ns)
        for row, phases in enumerate(lives.values())
        for phase in phases
    ]
    stream, names, begin, end = np.array(rows, dtype=np.int64).reshape(-1, 4).T
    no_action = np.full(len(rows), -1)
    events = Events(
        tuple(f"{kind}\n{kind}" for kind in kinds), np.zeros(len(rows), np.int64), stream, names, begin, end,
        no_action, no_action, no_action, no_action > 0,
    )  # fmt: skip
    titles = {FIRST_STREAM + row: title for row, title in enumerate(lives)}
    step = _without_actions(int(end.max(initial=1)), 1, events)
    data = _packed(step, events, True, 0, [""], titles, span="whole load")
    return PackedStep(data, step.end_ns / 1e9, len(events), True, (0, 0), -1)


def _without_actions(end_ns: int, ranks: int, events: Events) -> StepEvents:
    none, pairs = np.zeros(0, np.int64), np.zeros((0, 2), np.int64)
    actions = Actions(none, (), pairs, pairs, none, none, none, none, none > 0)
    return StepEvents(end_ns, ranks, actions, events, CriticalPath(none, (), none, none, none, none))


def _lanes(begin: IntArray, end: IntArray) -> IntArray:
    """The row of each event of a stream, so that events of one row do not overlap."""
    found = np.zeros(len(begin), np.int64)
    order = np.lexsort((end, begin))
    if (np.maximum.accumulate(end[order])[:-1] <= begin[order][1:]).all():
        return found
    free: list[int] = []
    for at in order.tolist():
        lane = next((n for n, ended in enumerate(free) if ended <= begin[at]), len(free))
        free[lane : lane + 1] = [int(end[at])]
        found[at] = lane
    return found


def _named(side: StepSide, keys: Names) -> IntArray:
    """The number in `keys` of each event's class and kernel name, joined by a line break."""
    events, texts = side.events, side.rank.names
    pairs, which = np.unique(
        np.stack([events["cls"].astype(np.int64), events["name"].astype(np.int64)]),
        axis=1,
        return_inverse=True,
    )
    which = which.reshape(-1)
    taken = np.bincount(which, weights=(events["end"] - events["start"]).astype(float))
    rare = np.ones(len(taken), dtype=bool)
    rare[np.argsort(-taken, kind="stable")[:MOST_NAMES]] = False
    numbers = []
    for (cls, name), is_rare in zip(pairs.T.tolist(), rare.tolist(), strict=True):
        kernel = "other kernels" if is_rare else texts[name] if name >= 0 else CLASSES[cls]
        numbers.append(keys[f"{CLASSES[cls]}\n{kernel[:LONGEST_NAME]}"])
    return np.array(numbers, np.int64)[which]


def _described(key: str) -> dict[str, str]:
    kind, _, kernel = key.partition("\n")
    return {"name": kind, "words": kernel, "colour": LIVES.get(kind) or class_colour(kind)}


def folded(values: IntArray) -> IntArray:
    """Whole numbers as numbers that are not negative, small ones staying small."""
    return np.asarray(np.where(values < 0, -2 * values - 1, 2 * values))


def numbers(values: IntArray) -> bytes:
    """A column of numbers that are not negative, seven bits a byte and the lowest first."""
    assert not len(values) or int(values.min()) >= 0
    rest = values.astype(np.uint64)
    sizes = np.ones(len(rest), dtype=np.int64)
    for size in range(1, 9):
        sizes += rest >= np.uint64(1 << (7 * size))
    first = np.cumsum(sizes) - sizes
    out = np.empty(int(sizes.sum()), dtype=np.uint8)
    for place in range(int(sizes.max(initial=0))):
        has = np.flatnonzero(sizes > place)
        more = np.where(sizes[has] > place + 1, np.uint64(0x80), np.uint64(0))
        out[first[has] + place] = (rest[has] >> np.uint64(7 * place)) & np.uint64(0x7F) | more
    return out.tobytes()
