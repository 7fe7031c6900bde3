"""Fronts: what no other beats."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moesim.simulator.planner.goal import dominated, front, staircase

POINTS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 5)), max_size=25)


@given(POINTS)
def test_the_front_is_what_nothing_else_beats(points: list[tuple[int, int, int]]) -> None:
    kept = front(points)
    values = {points[n] for n in kept}
    assert len(values) == len(kept)
    for point in points:
        beats = any(
            other != point and all(a <= b for a, b in zip(other, point, strict=True)) for other in points
        )
        assert (point in values) != beats


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=20),
    st.integers(0, 9),
    st.integers(0, 9),
)
def test_beaten_by_the_staircase(known: list[tuple[int, int]], memory: int, bound: int) -> None:
    steps = staircase(np.array([float(m) for m, _ in known]), np.array([float(t) for _, t in known]))
    mine = dominated(np.array([float(memory)]), np.array([float(bound)]), steps)[0]
    assert mine == any(m <= memory and t <= bound for m, t in known)
