"""What the members of a group need together: durations of a task reduced over members or micro-batches.

Figures of read-only arrays are kept for as long as the array lives, so that scenarios that share durations
share them too; figures of arrays that somebody may write are computed each time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from weakref import ref

import numpy as np

from moesim.hwmodels.arrays import IntArray

MOST_FIGURES = 64
"""Most figures that are kept of one array."""

_KEPT: dict[int, tuple[ref[IntArray], dict[Hashable, IntArray]]] = {}
"""Figures by the identity of a live array."""


def slowest_ns(rows_ns: IntArray) -> IntArray:
    """Duration of the slowest member by micro-batch, from durations [micro-batches, members]."""
    return _figure(rows_ns, "slowest", lambda: _reduced(np.maximum, rows_ns, 1))


def fastest_ns(rows_ns: IntArray) -> IntArray:
    """Duration of the fastest member by micro-batch, from durations [micro-batches, members]."""
    return _figure(rows_ns, "fastest", lambda: _reduced(np.minimum, rows_ns, 1))


def total_ns(rows_ns: IntArray) -> IntArray:
    """Sum over members by micro-batch, from durations [micro-batches, members]."""
    return _figure(rows_ns, "total", lambda: _reduced(np.add, rows_ns, 1))


@dataclass(frozen=True, slots=True)
class Rows:
    """Some micro-batches as an index of rows (a slice where they follow each other) and as a key."""

    index: slice | IntArray
    key: bytes


def rows_of(microbatches: IntArray) -> Rows:
    """The rows of at least one micro-batch."""
    first, count = int(microbatches[0]), len(microbatches)
    in_a_row = bool((microbatches == np.arange(first, first + count)).all())
    return Rows(slice(first, first + count) if in_a_row else microbatches, microbatches.tobytes())


def member_sums_ns(rows_ns: IntArray, rows: Rows) -> IntArray:
    """Sum over some micro-batches by member, from durations [micro-batches, members]."""
    return _figure(rows_ns, rows.key, lambda: _reduced(np.add, rows_ns[rows.index], 0))


def _reduced(reduce: np.ufunc, rows_ns: IntArray, axis: int) -> IntArray:
    return np.asarray(reduce.reduce(rows_ns, axis=axis))


def _figure(rows_ns: IntArray, name: Hashable, make: Callable[[], IntArray]) -> IntArray:
    if rows_ns.flags.writeable:
        return make()
    key = id(rows_ns)
    kept = _KEPT.get(key)
    if kept is None or kept[0]() is not rows_ns:
        kept = _KEPT[key] = ref(rows_ns, lambda _: _KEPT.pop(key, None)), {}
    figures = kept[1]
    value = figures.get(name)
    if value is None:
        if len(figures) >= MOST_FIGURES:
            figures.clear()
        value = figures[name] = make()
    return value
