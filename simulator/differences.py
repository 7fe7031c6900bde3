"""Where the difference of two step times comes from."""

from __future__ import annotations

from moesim.simulator.result import Result

REST = "other"
"""Cause of what a critical path leaves over."""


def differences(first: Result, other: Result) -> list[tuple[str, float]]:
    """Seconds by cause that the critical path of `other` has more than that of `first`, the largest first.

    Every nanosecond of a step has one cause, so the differences add up to that of the step times.
    """
    columns = [{row.cause: row.seconds for row in result.critical_path_s} for result in (first, other)]
    for column, result in zip(columns, (first, other), strict=True):
        column[REST] = result.step.time_s - sum(column.values())
    names = sorted({*columns[0], *columns[1]})
    changes = [(name, columns[1].get(name, 0.0) - columns[0].get(name, 0.0)) for name in names]
    return sorted((c for c in changes if abs(c[1]) > 1e-9), key=lambda change: (-abs(change[1]), change[0]))
