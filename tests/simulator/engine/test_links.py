"""Rates of a few flows in closed form, and a pool of links in time (`test_sharing` has the textbook)."""

from __future__ import annotations

import pytest
import simpy
from hypothesis import given
from hypothesis import strategies as st
from pool_runs import run_pool

from moesim.simulator.engine.link_map import Demand
from moesim.simulator.engine.maxmin import max_min_rates_of_few
from moesim.simulator.engine.simpy.links import LinkPool

Pairs = tuple[tuple[int, float], ...]
Arrival = tuple[int, Pairs, float]

both_solvers = pytest.mark.parametrize("few", [True, False], ids=["few links", "many links"])


def test_closed_forms() -> None:
    full = ((0, 100.0),)
    assert max_min_rates_of_few([(full, 10.0)], [10.0]) == [pytest.approx(0.1)]
    # n equal flows on one link: 1/n of it each.
    assert max_min_rates_of_few([(full, 10.0)] * 4, [10.0]) == pytest.approx([0.025] * 4)
    # Different sizes, same bandwidth: fairness is in bytes per second, not in progress.
    assert max_min_rates_of_few([(full, 10.0), (((0, 50.0),), 5.0)], [10.0]) == pytest.approx([0.05, 0.1])
    # One flow capped by its own alone time leaves the rest to the other.
    assert max_min_rates_of_few([(full, 50.0), (full, 10.0)], [10.0]) == pytest.approx([0.02, 0.08])
    # Incast: senders with their own ports, one receiving port.
    incast = [(((1 + i, 100.0), (0, 100.0)), 10.0) for i in range(5)]
    assert max_min_rates_of_few(incast, [10.0] * 6) == pytest.approx([0.02] * 5)
    # Two links: the flow over both gets the smaller share, the neighbour on the wide link the rest.
    both, narrow, wide = ((0, 100.0), (1, 100.0)), ((0, 100.0),), ((1, 100.0),)
    flows = [(both, 10.0), (narrow, 10.0), (wide, 5.0)]
    assert max_min_rates_of_few(flows, [10.0, 20.0]) == pytest.approx([0.05, 0.05, 0.15])
    # Bytes differ by link: 8 of 100 bytes on link 1 fill it only at 8 % of the bandwidth.
    assert max_min_rates_of_few([(((0, 100.0), (1, 8.0)), 10.0)] * 2, [10.0, 1.0]) == pytest.approx(
        [0.05] * 2
    )


def test_a_link_without_a_limit_never_holds_anybody_back() -> None:
    slow, fast = ((0, 10.0), (1, 10.0)), ((0, 10.0), (1, 10.0))
    assert max_min_rates_of_few([(slow, 5.0), (fast, 1.0)], [10.0, float("inf")]) == pytest.approx([0.2, 0.8])


def test_a_transfer_without_bytes_runs_at_its_own_pace() -> None:
    assert max_min_rates_of_few([((), 7.0), (((0, 0.0),), 4.0), (((0, 9.0),), 1.0)], [9.0]) == [
        1 / 7,
        1 / 4,
        1.0,
    ]


# -- the pool in time --------------------------------------------------------------------------------


@st.composite
def traffic(draw: st.DrawFn) -> tuple[list[Arrival], list[float]]:
    """Flows on a few links; alone, each fits its links (that is what alone_ns promises)."""
    capacity = draw(st.lists(st.floats(0.5, 64.0), min_size=1, max_size=4))
    arrivals: list[Arrival] = []
    for _ in range(draw(st.integers(1, 6))):
        crossed = draw(st.lists(st.integers(0, len(capacity) - 1), min_size=1, max_size=3, unique=True))
        demand = tuple((link, draw(st.floats(1.0, 1e6))) for link in crossed)
        slack = draw(st.sampled_from([1.0, 1.0, 1.5, 4.0]))
        alone = slack * max(amount / capacity[link] for link, amount in demand)
        arrivals.append((draw(st.integers(0, 10**6)), demand, alone))
    return arrivals, capacity


@both_solvers
@pytest.mark.parametrize("n", [2, 3, 7])
def test_equal_flows_on_a_full_link_take_n_times_as_long(few: bool, n: int) -> None:
    arrivals = [(5, ((0, 4000.0),), 1000.0)] * n
    assert run_pool(arrivals, [4.0], few)[0] == [5 + 1000 * n] * n


@both_solvers
def test_a_flow_that_comes_late_and_leaves_early(few: bool) -> None:
    # Alone for 600 of 1000 ns, then half speed while the small one (100 ns alone, 200 shared) is there.
    ends, _ = run_pool([(0, ((0, 4000.0),), 1000.0), (600, ((0, 400.0),), 100.0)], [4.0], few)
    assert ends == [1100, 800]


@both_solvers
def test_flows_that_only_share_through_a_third_are_rebalanced_too(few: bool) -> None:
    middle: Pairs = ((0, 1000.0), (1, 1000.0))
    ends, _ = run_pool(
        [(0, ((0, 1000.0),), 1000.0), (0, middle, 1000.0), (0, ((1, 1000.0),), 1000.0)], [1.0, 1.0], few
    )
    assert ends == [2000, 2000, 2000]
    # Without the middle one the outer two do not meet.
    assert run_pool([(0, ((0, 1000.0),), 1000.0), (0, ((1, 1000.0),), 1000.0)], [1.0, 1.0], few)[0] == [
        1000,
        1000,
    ]


@both_solvers
@given(traffic())
def test_bytes_are_conserved_and_time_stays_between_alone_and_all_in_series(
    few: bool,
    case: tuple[list[Arrival], list[float]],
) -> None:
    arrivals, capacity = case
    ends, pool = run_pool(arrivals, capacity, few)
    for link in range(len(capacity)):
        sent = sum(amount for _, demand, _ in arrivals for number, amount in demand if number == link)
        assert pool.carried_bytes[link] == pytest.approx(sent)
        # A link is never faster than its capacity.
        users = [n for n, (_, demand, _) in enumerate(arrivals) if link in {number for number, _ in demand}]
        if users:
            span = max(ends[n] for n in users) - min(arrivals[n][0] for n in users)
            assert sent <= capacity[link] * (span + 1) * (1 + 1e-9)
    series = sum(alone for _, _, alone in arrivals)
    for (start, _, alone), end in zip(arrivals, ends, strict=True):
        assert end >= start + round(max(alone, 1.0)) - 1
        # Work-conserving: some flow moves at all times, so nobody waits for more than everything.
        assert end <= max(s for s, _, _ in arrivals) + series + len(arrivals)
    assert not any(pool.sharing.users)


@both_solvers
@given(traffic())
def test_a_process_waits_exactly_as_long_as_the_event_says(
    few: bool, case: tuple[list[Arrival], list[float]]
) -> None:
    arrivals, capacity = case
    env = simpy.Environment()
    pool = LinkPool(env, capacity, few)
    ends = [0] * len(arrivals)

    def user(number: int, arrival: Arrival) -> simpy.events.ProcessGenerator:
        start, demand, alone = arrival
        yield env.timeout(start)
        yield from pool.transfer(Demand.of(demand), alone)
        ends[number] = int(env.now)

    for number, arrival in enumerate(arrivals):
        env.process(user(number, arrival))
    env.run()
    assert all(abs(a - b) <= 1 for a, b in zip(ends, run_pool(arrivals, capacity, few)[0], strict=True))
