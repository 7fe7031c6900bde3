from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesim.hwmodels.arrays import FloatArray
from moesim.simulator.engine.maxmin import max_min_rates, max_min_rates_of_few

Bytes = dict[int, Fraction]
Problem = tuple[list[tuple[Bytes, Fraction | None]], list[Fraction]]


@st.composite
def problems(draw: st.DrawFn, own_pace: bool = False) -> Problem:
    """Flows with whole numbers of bytes on a few links; some have no limit of their own."""
    capacity = [Fraction(c) for c in draw(st.lists(st.integers(1, 64), min_size=1, max_size=6))]
    flows: list[tuple[Bytes, Fraction | None]] = []
    for _ in range(draw(st.integers(1, 9))):
        crossed = draw(st.lists(st.integers(0, len(capacity) - 1), min_size=1, max_size=4, unique=True))
        demand = {link: Fraction(draw(st.integers(1, 1000))) for link in crossed}
        alone = max(amount / capacity[link] for link, amount in demand.items())
        slack = draw(
            st.sampled_from([Fraction(1), Fraction(5, 4), Fraction(4), *([] if own_pace else [None])])
        )
        flows.append((demand, None if slack is None else alone * slack))
    return flows, capacity


def arrays(problem: Problem) -> FloatArray:
    """What the array solver says."""
    flows, capacity = problem
    links = [link for demand, _ in flows for link in demand]
    weights = [float(amount) for demand, _ in flows for amount in demand.values()]
    indptr = np.cumsum([0, *(len(demand) for demand, _ in flows)])
    caps = np.array([np.inf if alone is None else float(1 / alone) for _, alone in flows])
    return max_min_rates(indptr, np.array(links), np.array(weights), caps, np.array(capacity, dtype=float))


def point_to_point(paths: Sequence[Sequence[int]], capacity: Sequence[float], cap: float) -> list[float]:
    """Bandwidth of flows that put the same bytes on every link of their path."""
    indptr = np.cumsum([0, *(len(path) for path in paths)])
    links = np.array([link for path in paths for link in path])
    rates = max_min_rates(
        indptr, links, np.full(len(links), 8.0), np.full(len(paths), cap / 8.0), np.array(capacity)
    )
    result: list[float] = (8.0 * rates).tolist()
    return result


@given(problems())
def test_rates_equal_the_textbook_in_fractions(textbook: Any, problem: Problem) -> None:
    assert arrays(problem) == pytest.approx([float(rate) for rate in textbook.rates(*problem)], rel=1e-9)


@given(problems(own_pace=True))
def test_few_flows_in_plain_python_equal_the_textbook_too(textbook: Any, problem: Problem) -> None:
    flows, capacity = problem
    plain = [
        (tuple((link, float(amount)) for link, amount in demand.items()), float(alone))
        for demand, alone in flows
        if alone is not None
    ]
    rates = max_min_rates_of_few(plain, [float(c) for c in capacity])
    assert rates == pytest.approx([float(rate) for rate in textbook.rates(*problem)], rel=1e-9)


@given(problems(), st.randoms(use_true_random=False))
def test_order_does_not_matter(problem: Problem, random: object) -> None:
    flows, capacity = problem
    assert arrays((flows[::-1], capacity))[::-1] == pytest.approx(arrays(problem), rel=1e-9)


@pytest.mark.parametrize("n", [1, 2, 7, 4096])
def test_incast_of_n_flows_gives_each_one_nth_of_the_port(n: int) -> None:
    assert point_to_point([(1 + i, 0) for i in range(n)], [40.0] * (n + 1), 40.0) == pytest.approx(
        [40.0 / n] * n
    )


@pytest.mark.parametrize("oversubscription", [1, 2, 4])
def test_all_to_all_on_a_two_layer_tree(textbook: Any, oversubscription: int) -> None:
    """m endpoints a leaf, m/k uplinks: ports decide at full bisection, the spine where k > 1."""
    m, leaves, k, capacity = 4, 3, oversubscription, 40.0
    paths, crosses = textbook.all_to_all(m, leaves, m // k)
    rates = point_to_point(paths, [capacity] * (max(map(max, paths)) + 1), capacity)
    if k == 1:
        assert rates == pytest.approx([capacity / (m * leaves - 1)] * len(paths))
        return
    # Behind one uplink sit k·m(leaves - 1) flows; neighbours share what those leave of the port.
    across = capacity / (k * m * (leaves - 1))
    inside = (capacity - across * m * (leaves - 1)) / (m - 1)
    assert rates == pytest.approx([across if c else inside for c in crosses])


def test_a_cap_below_the_fair_share_leaves_the_rest_to_others() -> None:
    rates = max_min_rates(
        np.array([0, 1, 2, 3]), np.zeros(3, int), np.ones(3), np.array([1.0, 9.0, 9.0]), np.array([9.0])
    )
    assert rates == pytest.approx([1.0, 4.0, 4.0])


def test_bandwidth_is_compared_on_the_link_with_most_bytes() -> None:
    # 100 bytes on link 0 and 8 on link 1: link 1 is full at 8 % of the bandwidth that is compared.
    both, rates = (np.array([0, 2, 4]), np.array([0, 1, 0, 1])), np.full(2, 0.1)
    weights = np.array([100.0, 8.0, 100.0, 8.0])
    assert max_min_rates(*both, weights, rates, np.array([10.0, 1.0])) == pytest.approx([0.05, 0.05])
    assert max_min_rates(*both, weights, rates, np.array([10.0, 0.4])) == pytest.approx([0.025, 0.025])
    # With 50 bytes on link 0 the second gets the same bandwidth, so twice the progress.
    half = np.array([100.0, 8.0, 50.0, 4.0])
    assert max_min_rates(*both, half, rates * 2, np.array([10.0, 1.0])) == pytest.approx([0.05, 0.1])


def test_a_flow_with_next_to_nothing_on_a_full_link_still_moves() -> None:
    """What one flow leaves of link 0 is below the rounding of its capacity, and all that the other needs."""
    tiny = 1e-17
    rates = max_min_rates(
        np.array([0, 2, 4]),
        np.array([0, 1, 0, 2]),
        np.array([1.0, 1.0, tiny, 1.0]),
        np.array([1.0, 1.0]),
        np.array([0.7, 0.7 * (1 - 1e-17), 9.0]),
    )
    assert rates.tolist() == pytest.approx([0.7, 0.7])


def test_a_link_named_twice_counts_with_its_sum() -> None:
    caps, capacity = np.full(2, 1.0), np.array([10.0, 10.0])
    twice = max_min_rates(
        np.array([0, 3, 4]), np.array([0, 1, 0, 0]), np.array([60.0, 20.0, 40.0, 10.0]), caps, capacity
    )
    once = max_min_rates(
        np.array([0, 2, 3]), np.array([0, 1, 0]), np.array([100.0, 20.0, 10.0]), caps, capacity
    )
    assert twice.tolist() == once.tolist()


def test_a_flow_without_bytes_and_links_without_limit() -> None:
    rates = max_min_rates(
        np.array([0, 0, 1, 2, 3]),
        np.array([0, 1, 0]),
        np.array([0.0, 5.0, 9.0]),
        np.array([0.25, 0.5, 2.0, np.inf]),
        np.array([9.0, np.inf]),
    )
    assert rates.tolist() == [0.25, 0.5, 2.0, 1.0]


def test_bad_input_is_refused() -> None:
    one, zero = np.ones(1), np.zeros(1, int)
    with pytest.raises(ValueError, match="row starts"):
        max_min_rates(np.array([0]), zero, one, one, one)
    with pytest.raises(ValueError, match="negative"):
        max_min_rates(np.array([0, 1]), zero, -one, one, one)
    with pytest.raises(ValueError, match="any time"):
        max_min_rates(np.array([0, 1]), zero, one, one * np.inf, one * np.inf)


def test_a_large_random_network_is_settled_everywhere() -> None:
    """The definition on 20,000 flows: its cap, or a full link on which nobody has more bandwidth."""
    draw = np.random.default_rng(3)
    n, n_links = 20_000, 3_000
    indptr = np.cumsum([0, *draw.integers(1, 6, n)])
    links = draw.integers(0, n_links, indptr[-1])
    flow = np.repeat(np.arange(n), np.diff(indptr))
    keep = np.unique(flow * n_links + links)
    flow, links = keep // n_links, keep % n_links
    indptr = np.append(0, np.cumsum(np.bincount(flow, minlength=n)))
    capacity, caps = draw.uniform(1, 100, n_links), draw.uniform(0.01, 20, n)
    rates = max_min_rates(indptr, links, np.ones(len(links)), caps, capacity)
    load = np.bincount(links, rates[flow], minlength=n_links)
    assert (load <= capacity * (1 + 1e-12)).all()
    highest = np.zeros(n_links)
    np.maximum.at(highest, links, rates[flow])
    held = (load >= capacity * (1 - 1e-11))[links] & (rates[flow] >= highest[links] * (1 - 1e-11))
    settled = (np.bincount(flow, held, minlength=n) > 0) | (rates >= caps)
    assert settled.all()
    assert len(np.unique(rates)) > 1000
