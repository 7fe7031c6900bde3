"""Columns of events, and a list that they are gathered in (pure)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from moesim.hwmodels.arrays import BoolArray, IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Events:
    """Events as columns of equal length, nanoseconds from the start of the step.

    `name`: number in `names`. `action`, `task` and `block`: -1 where there is none; `task` is the number of
    the task in its action. `critical`: whether the event is on the critical path.
    """

    names: tuple[str, ...]
    rank: IntArray
    stream: IntArray
    name: IntArray
    begin_ns: IntArray
    end_ns: IntArray
    action: IntArray
    task: IntArray
    block: IntArray
    critical: BoolArray

    def __len__(self) -> int:
        """Number of events."""
        return len(self.rank)

    def where(self, chosen: BoolArray | IntArray) -> Events:
        """Some of the events: a mask, or their numbers in the order in which they are wanted."""
        return Events(self.names, *(getattr(self, column)[chosen] for column in (*COLUMNS, "critical")))

    def with_critical(self, critical: BoolArray) -> Events:
        """The same events, with those on the critical path marked."""
        return replace(self, critical=critical)


COLUMNS = ("rank", "stream", "name", "begin_ns", "end_ns", "action", "task", "block")


@dataclass(slots=True)
class EventList:
    """Gathers events in parts of one stream and one name."""

    _names: dict[str, int] = field(default_factory=dict)
    _parts: list[tuple[IntArray, ...]] = field(default_factory=list)

    def add(
        self,
        stream: int,
        name: str,
        rank: IntArray | int,
        begin_ns: IntArray,
        end_ns: IntArray,
        action: IntArray | int = -1,
        task: int = -1,
        block: int = -1,
    ) -> None:
        """Add events; those that take no time are left out, as in a trace."""
        lasts = end_ns > begin_ns
        number = self._names.setdefault(name, len(self._names))
        count = int(np.count_nonzero(lasts))
        if not count:
            return
        self._parts.append(
            tuple(
                np.full(count, column, dtype=np.int64)
                if isinstance(column, int)
                else column
                if count == len(column)
                else column[lasts]
                for column in (rank, stream, number, begin_ns, end_ns, action, task, block)
            )
        )

    def sorted(self) -> Events:
        """All events by rank, stream and begin."""
        joined = [np.concatenate(column) for column in zip(*self._parts, strict=True)]
        columns = joined or [np.zeros(0, dtype=np.int64) for _ in COLUMNS]
        order = np.lexsort((columns[3], columns[1], columns[0]))
        chosen = [np.asarray(column[order], dtype=np.int64) for column in columns]
        return Events(
            tuple(self._names),
            **dict(zip(COLUMNS, chosen, strict=True)),
            critical=np.zeros(len(order), dtype=bool),
        )
