"""When a GPU communicates beside its computing, and when its compute SMs wait (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moesim.hwmodels.arrays import BoolArray, IntArray
from moesim.simulator.predict.event_list import Events

NO_TRANSFER, OWN_SENDS = -1, -2


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """Spans of time as columns, in order; `action`: -1 for none.

    `name`: of the transfer; OWN_SENDS for the wait after an action, NO_TRANSFER where none runs.
    """

    begin_ns: IntArray
    end_ns: IntArray
    name: IntArray
    action: IntArray


def communication_spans(
    compute: Events, transfers: Sequence[Events], start_ns: IntArray, end_ns: IntArray, free_ns: IntArray
) -> tuple[Spans, Spans]:
    """(hidden, exposed) communication of one GPU.

    Hidden: a transfer runs, its wait for others included, and the compute SMs work. Exposed: an action runs
    or waits for its own sends, or a transfer at the end of the step runs, and the compute SMs do not work
    (docs/model.md, eq. T2). `transfers`: events of each stream without overlap, the one that names a span
    first. `start_ns`, `end_ns` and `free_ns` [actions]: each action, and when the next may start.
    """
    ends = [np.append(compute.begin_ns, compute.end_ns), np.concatenate([start_ns, end_ns, free_ns])]
    ends += [np.append(stream.begin_ns, stream.end_ns) for stream in transfers]
    points = np.unique(np.concatenate(ends))
    if len(points) < 2:
        none = np.zeros(0, dtype=np.int64)
        return Spans(none, none, none, none), Spans(none, none, none, none)
    begin = points[:-1]
    name = np.full(len(begin), NO_TRANSFER, dtype=np.int64)
    moves = np.zeros(len(begin), dtype=bool)
    of_step = np.zeros(len(begin), dtype=bool)
    for stream in transfers:
        at, runs = _running(stream.begin_ns, stream.end_ns, begin)
        name = np.where(runs & ~moves, stream.name[at] if len(stream) else NO_TRANSFER, name)
        moves |= runs
        of_step |= runs & ((stream.action[at] < 0) & (stream.task[at] < 0) if len(stream) else False)
    action, acts = _running(start_ns, free_ns, begin)
    computes = _running(compute.begin_ns, compute.end_ns, begin)[1]
    after = acts & ~_running(start_ns, end_ns, begin)[1]
    name = np.where((name == NO_TRANSFER) & after, OWN_SENDS, name)
    action = np.where(acts, action, -1)
    hidden = _joined(points, moves & computes, name, action)
    return hidden, _joined(points, (acts | of_step) & ~computes, name, action)


def _running(begin: IntArray, end: IntArray, at: IntArray) -> tuple[IntArray, BoolArray]:
    """(the last of some intervals without overlap that began by each time, whether it still runs then)."""
    if not len(begin):
        return np.zeros(len(at), dtype=np.int64), np.zeros(len(at), dtype=bool)
    last = np.searchsorted(begin, at, side="right") - 1
    return np.maximum(last, 0), (last >= 0) & (end[last] > at)


def _joined(points: IntArray, chosen: BoolArray, name: IntArray, action: IntArray) -> Spans:
    """The chosen pieces between points; neighbours of one name and action become one span."""
    at = np.flatnonzero(chosen)
    if not len(at):
        none = np.zeros(0, dtype=np.int64)
        return Spans(none, none, none, none)
    same = (np.diff(at) == 1) & (np.diff(name[at]) == 0) & (np.diff(action[at]) == 0)
    first = np.append(0, np.flatnonzero(~same) + 1)
    last = np.append(first[1:] - 1, len(at) - 1)
    return Spans(points[at[first]], points[at[last] + 1], name[at[first]], action[at[first]])
