from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import simpy
from hypothesis import given
from hypothesis import strategies as st
from pool_runs import run_pool

from moesim.hwmodels.errors import InputError
from moesim.simulator.engine.link_map import Demand
from moesim.simulator.engine.maxmin import CAPACITY_UNITS, TIGHT_LOAD
from moesim.simulator.engine.simpy.links import Flow, LinkPool, Sharing

Arrival = tuple[int, dict[int, int], float]
Case = tuple[list[Arrival], list[int]]

both_solvers = pytest.mark.parametrize("few", [True, False], ids=["few links", "many links"])


@st.composite
def traffic(draw: st.DrawFn) -> Case:
    """Transfers of seconds, so that a nanosecond of rounding is below 1e-9; some fill no link by far."""
    capacity = draw(st.lists(st.integers(1, 64), min_size=1, max_size=6))
    arrivals = []
    for _ in range(draw(st.integers(1, 9))):
        crossed = draw(st.lists(st.integers(0, len(capacity) - 1), min_size=1, max_size=4, unique=True))
        demand = {link: draw(st.integers(1, 1000)) * 10**12 for link in crossed}
        slack = draw(st.sampled_from([1.0, 1.0, 1.25, 2.0, 4.0, 16.0]))
        alone = slack * max(amount / capacity[link] for link, amount in demand.items())
        arrivals.append((draw(st.integers(0, 10)) * 10**12 + draw(st.integers(0, 10**12)), demand, alone))
    return arrivals, capacity


@both_solvers
@given(traffic())
def test_every_end_is_that_of_all_flows_and_all_links_solved_at_every_event(
    few: bool, textbook: Any, case: Case
) -> None:
    arrivals, capacity = case
    expected = textbook.ends(
        [
            (Fraction(start), {link: Fraction(b) for link, b in demand.items()}, Fraction(alone))
            for start, demand, alone in arrivals
        ],
        [Fraction(c) for c in capacity],
    )
    ends, pool = run_pool(arrivals, capacity, few)
    assert ends == pytest.approx([float(end) for end in expected], rel=1e-9, abs=2 * len(arrivals))
    assert not any(pool.sharing.users)


@both_solvers
def test_nothing_is_solved_where_no_link_can_be_filled(few: bool) -> None:
    """Three flows that share a link and offer exactly what it can carry: nobody slows anybody down."""
    arrivals = [(0, {0: 900, 1: 100}, 100.0), (10, {0: 600}, 100.0), (20, {0: 500, 1: 900}, 100.0)]
    ends, pool = run_pool(arrivals, [20.0, 10.0], few)
    assert ends == [100, 110, 120]
    assert pool.solved == 0
    assert pool.started == 3


@both_solvers
def test_only_what_tight_links_tie_together_is_solved(few: bool) -> None:
    """Two pairs fill links 0 and 1; a wide link 2 is shared by all of them and ties nobody."""
    arrivals = [(n, {n % 2: 1000, 2: 10}, 1000.0) for n in range(4)]
    ends, pool = run_pool(arrivals, [1.0, 1.0, 1.0], few)
    # Each pair is solved when its second flow starts and when its first one ends.
    assert (pool.solved, pool.solved_flows) == (4, 6)
    assert ends == [1998, 1999, 2000, 2001]


@both_solvers
def test_a_link_that_gets_too_narrow_for_one_flow_slows_it_down(few: bool) -> None:
    """A degraded link: the duration alone was meant for a whole one."""
    assert run_pool([(0, {0: 1000, 1: 500}, 100.0)], [10.0, 2.5], few)[0] == [200]


@both_solvers
def test_a_group_of_hundreds_of_links_is_one_fluid(few: bool) -> None:
    """The slowest port decides, and a send over one of its ports slows all of it."""
    n = 300
    group = {link: 1000 + link for link in range(n)}
    alone = (1000 + n - 1) / 10.0
    assert run_pool([(0, group, alone)], [10.0] * n, few)[0] == [round(alone)]
    # Half of port 299 each in bytes/s until the send is through, then the group alone again.
    ends, _ = run_pool([(0, group, alone), (0, {n - 1: 500}, 50.0)], [10.0] * n, few)
    assert ends == [round(alone + 50), 100]


@both_solvers
def test_thousands_of_starts_and_ends_leave_no_trace(few: bool) -> None:
    """Ten flows that fill a link exactly stay untied however many others came and went."""
    capacity = np.array([3.0, 7.0])
    links = Sharing(capacity, few)
    number = 0

    def flow(part: float) -> Flow:
        nonlocal number
        number += 1
        return Flow(Demand(np.array([0, 1]), capacity * part * 100.0), 100.0, number)

    ten = [flow(0.1) for _ in range(10)]
    assert not any(links.join(f) for f in ten)
    before = np.asarray(links.load).tolist()
    others = [flow(part) for part in np.random.default_rng(5).uniform(1e-9, 0.4, 50).tolist()]
    kinds = np.random.default_rng(6).integers(0, len(others), 4_000).tolist()
    there: dict[int, Flow] = {}
    for kind in kinds:
        if kind in there:
            links.leave(there.pop(kind))
        else:
            there[kind] = others[kind]
            links.join(there[kind])
    for f in there.values():
        links.leave(f)
    assert np.asarray(links.load).tolist() == before
    assert max(before) <= TIGHT_LOAD
    assert not any(links.leave(f) for f in ten)
    assert not any(links.load)
    assert 0.9e-12 < TIGHT_LOAD / CAPACITY_UNITS - 1 < 1.1e-12


@both_solvers
def test_a_transfer_over_a_dead_link_is_refused(few: bool) -> None:
    with pytest.raises(InputError, match="link 1, whose bandwidth is 0"):
        run_pool([(0, {0: 10, 1: 10}, 10.0)], [1.0, 0.0], few)
    # Nobody minds one that is not crossed.
    assert run_pool([(0, {0: 10, 1: 0}, 10.0)], [1.0, 0.0], few)[0] == [10]


@pytest.mark.parametrize("bad", [-1.0, float("nan")])
def test_a_bandwidth_that_is_no_rate_is_refused(bad: float) -> None:
    with pytest.raises(InputError, match="link 1: a bandwidth of"):
        LinkPool(simpy.Environment(), [1.0, bad])


@both_solvers
def test_a_link_without_a_limit_ties_nobody(few: bool) -> None:
    ends, pool = run_pool([(0, {0: 10**9}, 10.0), (0, {0: 10**9}, 10.0)], [float("inf")], few)
    assert ends == [10, 10]
    assert pool.solved == 0


def test_a_demand_is_in_order_and_without_gaps() -> None:
    demand = Demand(np.array([4, 2, 4, 7]), np.array([1.0, 2.0, 3.0, 0.0]))
    assert demand.pairs == ((2, 2.0), (4, 4.0))
    assert Demand.of([(3, 1.0), (1, 2.0)]).pairs == ((3, 1.0), (1, 2.0))
    assert Demand.of([]).pairs == ()
    with pytest.raises(ValueError, match="finite"):
        Demand(np.array([1]), np.array([-1.0]))
    with pytest.raises(ValueError, match="byte counts"):
        Demand(np.array([1, 2]), np.array([1.0]))
