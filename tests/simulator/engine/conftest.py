"""Max-min sharing by the book, in fractions: all flows and all links, solved again at every event."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from math import inf
from typing import NamedTuple

import pytest

Bytes = dict[int, Fraction]
"""Link to bytes of one transfer."""


def filled(flows: Sequence[tuple[Bytes, Fraction | None]], capacity: Sequence[Fraction]) -> list[Fraction]:
    """Transfers per unit of time by progressive filling; a flow is (bytes by link, duration alone or None)."""
    largest = [max(demand.values()) for demand, _ in flows]
    level = [Fraction(0)] * len(flows)
    growing = set(range(len(flows)))

    def load(link: int, of: Sequence[Fraction]) -> Fraction:
        parts = (
            demand[link] / big * x
            for (demand, _), big, x in zip(flows, largest, of, strict=True)
            if link in demand
        )
        return sum(parts, Fraction(0))

    while growing:
        rising = [Fraction(i in growing) for i in range(len(flows))]
        steps = [
            (capacity[link] - load(link, level)) / load(link, rising)
            for link in range(len(capacity))
            if load(link, rising) > 0
        ]
        steps += [
            big / alone - level[i]
            for i, (big, (_, alone)) in enumerate(zip(largest, flows, strict=True))
            if i in growing and alone is not None
        ]
        step = min(steps)
        level = [x + step * up for x, up in zip(level, rising, strict=True)]
        full = {link for link in range(len(capacity)) if load(link, level) == capacity[link]}
        growing -= {
            i
            for i, (demand, alone) in enumerate(flows)
            if full & set(demand) or (alone is not None and level[i] == largest[i] / alone)
        }
    return [x / big for x, big in zip(level, largest, strict=True)]


def finished(
    arrivals: Sequence[tuple[Fraction, Bytes, Fraction | None]], capacity: Sequence[Fraction]
) -> list[Fraction]:
    """When each of the (start, bytes by link, duration alone) ends."""
    left = [Fraction(1)] * len(arrivals)
    ends = [Fraction(0)] * len(arrivals)
    waiting = sorted(range(len(arrivals)), key=lambda i: arrivals[i][0])
    running: list[int] = []
    now = Fraction(0)
    while waiting or running:
        rates = filled([arrivals[i][1:] for i in running], capacity) if running else []
        done = [now + left[i] / rate for i, rate in zip(running, rates, strict=True)]
        start = arrivals[waiting[0]][0] if waiting else inf
        then = min([*done, start])
        assert isinstance(then, Fraction)
        for i, rate, end in zip(list(running), rates, done, strict=True):
            left[i] -= rate * (then - now)
            if end == then:
                running.remove(i)
                ends[i] = then
        now = then
        while waiting and arrivals[waiting[0]][0] == now:
            running.append(waiting.pop(0))
    return ends


def two_layer_all_to_all(m: int, leaves: int, spines: int) -> tuple[list[tuple[int, ...]], list[bool]]:
    """Paths of all pairs over the spine that the receiver's place names, and which leave their leaf."""
    n = m * leaves
    paths: list[tuple[int, ...]] = []
    crosses = []
    for source in range(n):
        for target in range(n):
            if source == target:
                continue
            spine, here, there = target % m % spines, source // m, target // m
            up, down = 2 * n + here * spines + spine, 2 * n + (leaves + there) * spines + spine
            paths.append((source, n + target) if here == there else (source, up, down, n + target))
            crosses.append(here != there)
    return paths, crosses


class Textbook(NamedTuple):
    """The reference as one fixture."""

    rates: Callable[..., list[Fraction]]
    ends: Callable[..., list[Fraction]]
    all_to_all: Callable[[int, int, int], tuple[list[tuple[int, ...]], list[bool]]]


@pytest.fixture(scope="session")
def textbook() -> Textbook:
    """`rates` of flows, `ends` of arrivals in time, and the paths of an `all_to_all` on a two-layer tree."""
    return Textbook(filled, finished, two_layer_all_to_all)
