"""What the members of a group need together: durations of a task reduced over members or micro-batches.

Figures of read-only arrays are kept for as long as the array lives, so that scenarios that share durations
share them too; figures of arrays that somebody may write are computed each time.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any
from weakref import ref

import numpy as np

from moesim.hwmodels.arrays import FloatArray, IntArray

MOST_FIGURES = 64
"""Most figures that are kept of one array."""

AnyArray = np.ndarray[Any, Any]

_KEPT: dict[int, tuple[ref[AnyArray], dict[Hashable, Any]]] = {}
"""Figures by the identity of a live array."""


def slowest_ns(rows_ns: IntArray) -> IntArray:
    """Duration of the slowest member by micro-batch, from durations [micro-batches, members]."""
    return _figure(rows_ns, "slowest", np.maximum, None)


def fastest_ns(rows_ns: IntArray) -> IntArray:
    """Duration of the fastest member by micro-batch, from durations [micro-batches, members]."""
    return _figure(rows_ns, "fastest", np.minimum, None)


def total_ns(rows_ns: IntArray) -> IntArray:
    """Sum over members by micro-batch, from durations [micro-batches, members]."""
    return _figure(rows_ns, "total", np.add, None)


def keep_figures(rows_ns: IntArray, slowest: IntArray, total: IntArray) -> None:
    """Keep figures of read-only durations [micro-batches, members] that were computed with them."""
    figures = _kept_of(rows_ns)
    figures["slowest"], figures["total"] = slowest, total


@dataclass(frozen=True, slots=True)
class MicrobatchRows:
    """Some micro-batches as an index of rows (a slice where they follow each other) and as a key."""

    index: slice | IntArray
    key: bytes


def rows_of(microbatches: IntArray) -> MicrobatchRows:
    """The rows of at least one micro-batch."""
    first, count = int(microbatches[0]), len(microbatches)
    in_a_row = bool((microbatches == np.arange(first, first + count)).all())
    return MicrobatchRows(slice(first, first + count) if in_a_row else microbatches, microbatches.tobytes())


def member_sums_ns(rows_ns: IntArray, rows: MicrobatchRows) -> IntArray:
    """Sum over some micro-batches by member, from durations [micro-batches, members]."""
    return _figure(rows_ns, rows.key, np.add, rows)


def most_loaded(load: FloatArray) -> FloatArray:
    """Relative rows of the most loaded member by micro-batch, from those of all [micro-batches, members].

    The loads of a block are a view of the loads of all blocks, with which the value is kept.
    """
    owner = load if load.base is None else load.base
    if not isinstance(owner, np.ndarray) or load.flags.writeable:
        return np.asarray(load.max(axis=1))
    name = ("load", load.__array_interface__["data"][0], load.shape, load.strides)
    kept = _kept_of(owner)
    if name not in kept:
        kept[name] = np.asarray(load.max(axis=1))
    return np.asarray(kept[name])


def _figure(rows_ns: IntArray, name: Hashable, reduce: np.ufunc, rows: MicrobatchRows | None) -> IntArray:
    """Reduction over the members, or where `rows` are given over these."""
    key = id(rows_ns)
    kept = _KEPT.get(key)
    if kept is not None and kept[0]() is rows_ns:
        figure: IntArray | None = kept[1].get(name)
        if figure is not None:
            return figure
    if rows is None:
        value = np.asarray(reduce.reduce(rows_ns, axis=1))
    else:
        value = np.asarray(reduce.reduce(rows_ns[rows.index], axis=0))
    if not rows_ns.flags.writeable:
        figures = _kept_of(rows_ns)
        if len(figures) >= MOST_FIGURES:
            figures.clear()
        figures[name] = value
    return value


def _kept_of(array: AnyArray) -> dict[Hashable, Any]:
    """The figures that are kept of a read-only array."""
    key = id(array)
    kept = _KEPT.get(key)
    if kept is None or kept[0]() is not array:
        kept = _KEPT[key] = ref(array, lambda _: _KEPT.pop(key, None)), {}
    return kept[1]
