from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import simpy
from hypothesis import given
from hypothesis import strategies as st
from pool_runs import run_pool

from moesim.simulator.engine.link_map import Demand
from moesim.simulator.engine.maxmin import max_min_rates, max_min_rates_of_few
from moesim.simulator.engine.simpy.links import LinkPool

Pairs = tuple[tuple[int, float], ...]
Arrival = tuple[int, Pairs, float]
FlowSpec = tuple[Pairs, float]
Solver = Callable[[Sequence[FlowSpec], Sequence[float]], list[float]]


def many_rates(flows: Sequence[FlowSpec], capacity: Sequence[float]) -> list[float]:
    """The array solver behind the interface of the plain one."""
    entries = [entry for demand, _ in flows for entry in demand]
    rates: list[float] = max_min_rates(
        np.cumsum([0, *(len(demand) for demand, _ in flows)]),
        np.array([link for link, _ in entries], dtype=np.int64),
        np.array([amount for _, amount in entries]),
        np.array([1.0 / alone for _, alone in flows]),
        np.array(capacity),
    ).tolist()
    return rates


both_solvers = pytest.mark.parametrize("solve", [max_min_rates_of_few, many_rates])
both_pools = pytest.mark.parametrize("arrays", [False, True], ids=["plain", "arrays"])


@st.composite
def problems(draw: st.DrawFn, *, even: bool = False) -> tuple[list[FlowSpec], list[float]]:
    """Flows on a few links; alone, each fits its links (that is what alone_ns promises).

    `even`: a flow puts the same bytes on all of its links.
    """
    capacity = draw(st.lists(st.floats(0.5, 64.0), min_size=1, max_size=4))
    flows: list[FlowSpec] = []
    for _ in range(draw(st.integers(1, 6))):
        crossed = draw(st.lists(st.integers(0, len(capacity) - 1), min_size=1, max_size=3, unique=True))
        amounts = st.just(draw(st.floats(1.0, 1e6))) if even else st.floats(1.0, 1e6)
        demand = tuple((link, draw(amounts)) for link in crossed)
        slack = draw(st.sampled_from([1.0, 1.0, 1.5, 4.0]))
        flows.append((demand, slack * max(amount / capacity[link] for link, amount in demand)))
    return flows, capacity


def bandwidths(flows: Sequence[FlowSpec], rates: Sequence[float]) -> list[float]:
    """Bytes/ns of each flow on the link where it has most bytes: what max-min compares."""
    return [
        rate * max(amount for _, amount in demand) for (demand, _), rate in zip(flows, rates, strict=True)
    ]


def loads(flows: Sequence[FlowSpec], rates: Sequence[float], n_links: int) -> list[float]:
    used = [0.0] * n_links
    for (demand, _), rate in zip(flows, rates, strict=True):
        for link, amount in demand:
            used[link] += rate * amount
    return used


def filled_slowly(flows: Sequence[FlowSpec], capacity: Sequence[float], steps: int) -> list[float]:
    """Bandwidths by brute force: small equal drops to all that can still grow, until nobody can."""
    largest = [max(amount for _, amount in demand) for demand, _ in flows]
    caps = [big / alone for big, (_, alone) in zip(largest, flows, strict=True)]
    drops = [0] * len(flows)
    drop = max(caps) / steps
    growing = set(range(len(flows)))
    while growing:
        level = [(n + (i in growing)) * drop for i, n in enumerate(drops)]
        used = loads(flows, [b / big for b, big in zip(level, largest, strict=True)], len(capacity))
        over = {link for link, limit in enumerate(capacity) if used[link] > limit}
        blocked = {i for i in growing if level[i] > caps[i] or any(link in over for link, _ in flows[i][0])}
        growing -= blocked
        if not blocked:
            drops = [n + (i in growing) for i, n in enumerate(drops)]
    return [n * drop for n in drops]


@both_solvers
@given(problems())
def test_no_link_over_capacity_and_no_flow_over_its_own_cap(
    solve: Solver,
    problem: tuple[list[FlowSpec], list[float]],
) -> None:
    flows, capacity = problem
    rates = solve(flows, capacity)
    for used, limit in zip(loads(flows, rates, len(capacity)), capacity, strict=True):
        assert used <= limit * (1 + 1e-9)
    for (_, alone), rate in zip(flows, rates, strict=True):
        assert 0.0 < rate <= (1 + 1e-9) / alone


@both_solvers
@given(problems())
def test_every_flow_has_its_cap_or_a_bottleneck(
    solve: Solver, problem: tuple[list[FlowSpec], list[float]]
) -> None:
    """The definition: a flow below its cap crosses a full link on which nobody has more bandwidth."""
    flows, capacity = problem
    rates = solve(flows, capacity)
    width = bandwidths(flows, rates)
    used = loads(flows, rates, len(capacity))
    for i, ((demand, alone), rate) in enumerate(zip(flows, rates, strict=True)):
        if rate >= (1 - 1e-9) / alone:
            continue
        assert any(
            used[link] >= capacity[link] * (1 - 1e-9)
            and all(
                width[j] <= width[i] * (1 + 1e-9)
                for j, (other, _) in enumerate(flows)
                if link in {number for number, _ in other}
            )
            for link, _ in demand
        ), f"flow {i} is neither at its cap nor bottlenecked"


@both_solvers
@given(problems(even=True))
def test_rates_equal_slow_progressive_filling(
    solve: Solver, problem: tuple[list[FlowSpec], list[float]]
) -> None:
    """Even flows only: one that puts a millionth of its bytes on its bottleneck grows a million drops more
    for each drop that another stops early, so no number of steps would be enough."""
    flows, capacity = problem
    steps = 400
    width = bandwidths(flows, solve(flows, capacity))
    step = max(max(amount for _, amount in demand) / alone for demand, alone in flows) / steps
    # What is settled early at one level is left to the next, so that the sum of what was left out may double
    # with each of at most six levels: 2 * (2**6 - 1) drops.
    for exact, brute in zip(width, filled_slowly(flows, capacity, steps), strict=True):
        assert exact == pytest.approx(brute, abs=step * 4 * len(flows) ** 2)


@both_solvers
@given(problems(), st.randoms(use_true_random=False))
def test_the_order_of_the_flows_does_not_matter(
    solve: Solver, problem: tuple[list[FlowSpec], list[float]], random: object
) -> None:
    flows, capacity = problem
    rates = dict(zip(map(id, flows), solve(flows, capacity), strict=True))
    backwards = flows[::-1]
    for flow, rate in zip(backwards, solve(backwards, capacity), strict=True):
        assert rate == pytest.approx(rates[id(flow)], rel=1e-9)


@both_solvers
def test_closed_forms(solve: Solver) -> None:
    full = ((0, 100.0),)
    assert solve([(full, 10.0)], [10.0]) == [pytest.approx(0.1)]
    # n equal flows on one link: 1/n of it each.
    assert solve([(full, 10.0)] * 4, [10.0]) == pytest.approx([0.025] * 4)
    # Different sizes, same bandwidth: fairness is in bytes per second, not in progress.
    assert solve([(full, 10.0), (((0, 50.0),), 5.0)], [10.0]) == pytest.approx([0.05, 0.1])
    # One flow capped by its own alone time leaves the rest to the other.
    assert solve([(full, 50.0), (full, 10.0)], [10.0]) == pytest.approx([0.02, 0.08])
    # Incast: senders with their own ports, one receiving port.
    incast = [(((1 + i, 100.0), (0, 100.0)), 10.0) for i in range(5)]
    assert solve(incast, [10.0] * 6) == pytest.approx([0.02] * 5)
    # Two links: the flow over both gets the smaller share, the neighbour on the wide link the rest.
    both, narrow, wide = ((0, 100.0), (1, 100.0)), ((0, 100.0),), ((1, 100.0),)
    flows = [(both, 10.0), (narrow, 10.0), (wide, 5.0)]
    assert solve(flows, [10.0, 20.0]) == pytest.approx([0.05, 0.05, 0.15])
    # Bytes differ by link: 8 of 100 bytes on link 1 fill it only at 8 % of the bandwidth.
    assert solve([(((0, 100.0), (1, 8.0)), 10.0)] * 2, [10.0, 1.0]) == pytest.approx([0.05] * 2)


@both_solvers
def test_a_link_without_a_limit_never_holds_anybody_back(solve: Solver) -> None:
    slow, fast = ((0, 10.0), (1, 10.0)), ((0, 10.0), (1, 10.0))
    assert solve([(slow, 5.0), (fast, 1.0)], [10.0, float("inf")]) == pytest.approx([0.2, 0.8])


@both_solvers
def test_a_transfer_without_bytes_runs_at_its_own_pace(solve: Solver) -> None:
    assert solve([((), 7.0), (((0, 0.0),), 4.0), (((0, 9.0),), 1.0)], [9.0]) == [1 / 7, 1 / 4, 1.0]


# -- the pool in time --------------------------------------------------------------------------------


@st.composite
def traffic(draw: st.DrawFn) -> tuple[list[Arrival], list[float]]:
    flows, capacity = draw(problems())
    return [(draw(st.integers(0, 10**6)), demand, alone) for demand, alone in flows], capacity


@both_pools
@given(problems(), st.integers(0, 10**6))
def test_a_lone_flow_takes_exactly_its_alone_time(
    arrays: bool, problem: tuple[list[FlowSpec], list[float]], start: int
) -> None:
    flows, capacity = problem
    demand, alone = flows[0]
    assert run_pool([(start, demand, alone)], capacity, arrays)[0] == [start + round(max(alone, 1.0))]


@both_pools
@pytest.mark.parametrize("n", [2, 3, 7])
def test_equal_flows_on_a_full_link_take_n_times_as_long(arrays: bool, n: int) -> None:
    arrivals = [(5, ((0, 4000.0),), 1000.0)] * n
    assert run_pool(arrivals, [4.0], arrays)[0] == [5 + 1000 * n] * n


@both_pools
def test_a_flow_that_comes_late_and_leaves_early(arrays: bool) -> None:
    # Alone for 600 of 1000 ns, then half speed while the small one (100 ns alone, 200 shared) is there.
    ends, _ = run_pool([(0, ((0, 4000.0),), 1000.0), (600, ((0, 400.0),), 100.0)], [4.0], arrays)
    assert ends == [1100, 800]


@both_pools
def test_flows_that_only_share_through_a_third_are_rebalanced_too(arrays: bool) -> None:
    middle: Pairs = ((0, 1000.0), (1, 1000.0))
    ends, _ = run_pool(
        [(0, ((0, 1000.0),), 1000.0), (0, middle, 1000.0), (0, ((1, 1000.0),), 1000.0)], [1.0, 1.0], arrays
    )
    assert ends == [2000, 2000, 2000]
    # Without the middle one the outer two do not meet.
    assert run_pool([(0, ((0, 1000.0),), 1000.0), (0, ((1, 1000.0),), 1000.0)], [1.0, 1.0], arrays)[0] == [
        1000,
        1000,
    ]


@both_pools
@given(traffic())
def test_bytes_are_conserved_and_time_stays_between_alone_and_all_in_series(
    arrays: bool,
    case: tuple[list[Arrival], list[float]],
) -> None:
    arrivals, capacity = case
    ends, pool = run_pool(arrivals, capacity, arrays)
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
    assert pool.sharing.busy() == []


@both_pools
@given(traffic())
def test_same_arrivals_same_ends(arrays: bool, case: tuple[list[Arrival], list[float]]) -> None:
    assert run_pool(*case, arrays)[0] == run_pool(*case, arrays)[0]


@both_pools
def test_a_busy_link_is_never_left_idle(arrays: bool) -> None:
    # Three flows in turns on one link that all of them can fill: the last byte leaves at total/capacity.
    arrivals = [(0, ((0, 900.0),), 300.0), (100, ((0, 300.0),), 100.0), (150, ((0, 600.0),), 200.0)]
    assert max(run_pool(arrivals, [3.0], arrays)[0]) == 600


@both_pools
@given(traffic())
def test_a_process_waits_exactly_as_long_as_the_event_says(
    arrays: bool, case: tuple[list[Arrival], list[float]]
) -> None:
    arrivals, capacity = case
    env = simpy.Environment()
    pool = LinkPool(env, capacity, arrays)
    ends = [0] * len(arrivals)

    def user(number: int, arrival: Arrival) -> simpy.events.ProcessGenerator:
        start, demand, alone = arrival
        yield env.timeout(start)
        yield from pool.transfer(Demand.of(demand), alone)
        ends[number] = int(env.now)

    for number, arrival in enumerate(arrivals):
        env.process(user(number, arrival))
    env.run()
    assert all(abs(a - b) <= 1 for a, b in zip(ends, run_pool(arrivals, capacity, arrays)[0], strict=True))
