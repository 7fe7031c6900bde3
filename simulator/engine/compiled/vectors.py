"""Operations on the vectors of members' clocks (compiled)."""

from __future__ import annotations

from moesim.simulator.engine.compiled.jit import compiled
from moesim.simulator.engine.compiled.memory import Run, Vector, ints_at, prefetch, row_of


@compiled
def clock_of(run: Run, row: int) -> Vector:
    """The members' clocks in a row of `RunState.clock`."""
    return row_of(run.clock, row, run.members)


@compiled
def arrival_of(run: Run, key: int) -> Vector:
    """When each member has an input."""
    return row_of(run.arrivals, key, run.members)


@compiled
def copy(to: Vector, source: Vector, count: int) -> None:
    """Copy a vector."""
    for m in range(count):
        to[m] = source[m]


@compiled
def copy_shifted(to: Vector, source: Vector, amount: int, count: int) -> None:
    """Copy a vector with an amount added to every number."""
    for m in range(count):
        to[m] = source[m] + amount


@compiled
def raise_to(to: Vector, other: Vector, count: int) -> None:
    """Elementwise maximum of two vectors, into the first."""
    for m in range(count):
        to[m] = max(to[m], other[m])


@compiled
def add(to: Vector, other: Vector, count: int) -> None:
    """Add a vector to another."""
    for m in range(count):
        to[m] += other[m]


@compiled
def sum_of(to: Vector, one: Vector, other: Vector, count: int) -> None:
    """Sum of two vectors."""
    for m in range(count):
        to[m] = one[m] + other[m]


@compiled
def later_plus(to: Vector, one: Vector, other: Vector, added: Vector, count: int) -> None:
    """Elementwise maximum of two vectors, plus a third."""
    for m in range(count):
        to[m] = max(one[m], other[m]) + added[m]


@compiled
def largest(source: Vector, count: int) -> int:
    """The largest number of a vector."""
    result = source[0]
    for m in range(1, count):
        result = max(result, source[m])
    return result


@compiled
def total_of(source: Vector, count: int) -> int:
    """The sum of a vector."""
    result = 0
    for m in range(count):
        result += source[m]
    return result


@compiled
def first_with(source: Vector, value: int) -> int:
    """The first place of a vector that holds a value; one place must."""
    m = 0
    while source[m] != value:
        m += 1
    return m


@compiled
def fetch_row(run: Run, address: int, microbatch: int) -> None:
    """Ask the processor to fetch a row of durations ahead of its use, while other work goes on."""
    row = row_of(ints_at(address), microbatch, run.members)
    for line in range((run.members + 7) // 8):
        prefetch(row_of(row, line, 8))
