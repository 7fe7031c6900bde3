"""Orders the points of a sweep: those that share prices and draws are computed one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, TypeVar

Item = TypeVar("Item")

EXPENSIVE = ("model", "parallel", "schedule", "batch", "seed", "variation", "routing")
"""Sections whose values decide draws and schedule, the parts of a step that take longest to make."""
CHEAP = ("communication", "cluster", "profile", "software", "run")
"""Sections that change prices only; points that differ in them alone share the rest."""

LARGEST = 16
"""Most points that a worker gets at a time; those of a worker that is killed are computed again."""

Point = Mapping[str, Any]


def work_order(points: Sequence[Point]) -> list[int]:
    """Numbers of the points in the order of work: those that share expensive values stand together.

    Values are ordered by their first appearance, so that the order depends on the points alone.
    """
    keys = sorted({key for point in points for key in point}, key=_cost)
    rank: dict[str, dict[str, int]] = {key: {} for key in keys}
    for point in points:
        for key in keys:
            rank[key].setdefault(_text(point, key), len(rank[key]))
    return sorted(
        range(len(points)),
        key=lambda number: (*(rank[key][_text(points[number], key)] for key in keys), number),
    )


def work_groups(ordered: Iterable[tuple[Point, Item]], workers: int) -> list[list[Item]]:
    """Items, each with its point and in the order of work, in groups that one worker computes in a row.

    The items of a group share every value that is not cheap. A group has at most LARGEST items, and so few
    that every worker gets several groups.
    """
    items = list(ordered)
    most = max(1, min(LARGEST, len(items) // (4 * workers)))
    found = []
    for _, shared in groupby(items, key=lambda pair: _shared(pair[0])):
        group = [item for _, item in shared]
        found += [group[n : n + most] for n in range(0, len(group), most)]
    return found


def _shared(point: Point) -> list[tuple[str, str]]:
    return [(key, _text(point, key)) for key in sorted(point) if _section(key) not in CHEAP]


def _cost(key: str) -> tuple[int, str]:
    """Sort key of a scenario key: the expensive sections in their order, then others, then the cheap ones."""
    section = _section(key)
    if section in EXPENSIVE:
        return EXPENSIVE.index(section), key
    return len(EXPENSIVE) + (1 + CHEAP.index(section) if section in CHEAP else 0), key


def _section(key: str) -> str:
    return key.partition(".")[0]


def _text(point: Point, key: str) -> str:
    return repr(point[key]) if key in point else ""
