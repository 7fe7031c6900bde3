"""The event run against closed forms, limits and its own books."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from moesim.simulator.run.events import NS, RunBooks, simulate_events, simulate_one
from moesim.simulator.run.failures import (
    FailureModel,
    Groups,
    Offenders,
    Outage,
    SlowNodes,
    Stop,
    Tier,
    expected_wall_s,
    optimal_interval_s,
)

HOUR, DAY = 3600.0, 86400.0
FAULT = Stop("fault", 1 / (4 * HOUR), detection_s=300.0, restart_s=600.0)
TIER = Tier(interval_s=0.5 * HOUR, stall_s=120.0)
MODEL = FailureModel((FAULT,), (TIER,))
NODE = replace(FAULT, nodes=1, away_s=24 * HOUR)


def model(stop: Stop = FAULT, tier: Tier = TIER, /, **more: int | None) -> FailureModel:
    return FailureModel((stop,), (tier,), **more)  # type: ignore[arg-type]


def walls(runs: list[RunBooks]) -> np.ndarray:
    return np.array([sum(run.wall_ns) / NS for run in runs])


def total(runs: list[RunBooks], part: str) -> float:
    return math.fsum(run.seconds(part) for run in runs)


def deviation(runs: list[RunBooks], want_s: float) -> float:
    """Distance of the mean wall time from a value, in standard errors."""
    wall = walls(runs)
    return float((wall.mean() - want_s) / (wall.std(ddof=1) / math.sqrt(wall.size)))


def test_without_failures_time_is_training_and_checkpoints() -> None:
    (run,) = simulate_events([10 * HOUR, 1.2 * HOUR], model(replace(FAULT, rate_per_s=0.0)), 1, 0)
    assert run.wall_ns == [(36_000 + 20 * 120) * 10**9, (4320 + 3 * 120) * 10**9]
    assert not run.stops and run.balanced


@pytest.mark.parametrize(
    ("between_h", "detection", "restart"), [(0.5, 600.0, 900.0), (2.0, 0.0, 900.0), (24.0, 0.0, 0.0)]
)
def test_the_mean_is_the_closed_form(between_h: float, detection: float, restart: float) -> None:
    """Daly's exact expectation, with detection, and a last stretch that is shorter than the others."""
    stop = Stop("fault", 1 / (between_h * HOUR), detection, restart)
    work = 20.3 * HOUR
    runs = simulate_events([work], model(stop), 100, seed=1)
    want = expected_wall_s([work], model(stop))
    assert abs(deviation(runs, want)) < 4.0
    assert all(run.balanced for run in runs)


def test_the_number_of_interruptions_is_poisson_in_the_time_exposed() -> None:
    runs = simulate_events([100 * HOUR], model(replace(FAULT, detection_s=0.0)), 100, seed=2)
    struck = np.array([sum(run.stops.values()) for run in runs])
    assert abs(struck.mean() - walls(runs).mean() * FAULT.rate_per_s) < 4.0 * struck.std() / 10.0


def test_the_best_interval_by_search_is_the_closed_form() -> None:
    """Common random numbers: the simulated optimum over a grid is next to the exact one."""
    best = optimal_interval_s(120.0, 4 * HOUR)
    means = [
        walls(
            simulate_events([200 * HOUR], model(FAULT, replace(TIER, interval_s=best * 2.0**k)), 20, 5)
        ).mean()
        for k in (-2, -1, 0, 1, 2)
    ]
    assert min(range(5), key=means.__getitem__) == 2


def test_asynchronous_writes_cost_a_stretch_when_they_are_caught() -> None:
    """The lag w loses an extra stretch with probability w / t: w more per interruption."""
    plain = Tier(interval_s=0.5 * HOUR)
    a, b = (
        simulate_events([400 * HOUR], model(FAULT, tier), 50, seed=6)
        for tier in (plain, replace(plain, lag_s=900.0))
    )
    per_stop = (total(b, "lost") - total(a, "lost")) / sum(sum(run.stops.values()) for run in b)
    # A stretch that starts after a restart has no checkpoint in flight: the share of the others is e^(-t/M).
    assert per_stop == pytest.approx(900.0 * math.exp(-plain.interval_s * FAULT.rate_per_s), rel=0.3)


def test_spares_run_out_and_a_repair_crew_is_a_queue() -> None:
    def waits(**more: int | None) -> float:
        return total(simulate_events([100 * HOUR], model(NODE, **more), 12, 8), "waiting")

    by_spares = [waits(spares=n) for n in (0, 2, 8, 200)]
    assert by_spares[0] > by_spares[1] > by_spares[2] > by_spares[3] == 0.0 == waits(spares=None)
    assert waits(spares=8, crews=1) > waits(spares=8, crews=4) > waits(spares=8)


def test_without_a_spare_every_break_waits_for_its_repair() -> None:
    stop = replace(NODE, away_s=5 * HOUR)
    runs = simulate_events([50 * HOUR], model(stop, spares=0), 20, seed=9)
    assert total(runs, "waiting") == pytest.approx(5 * HOUR * sum(sum(r.stops.values()) for r in runs))


def test_trays_of_a_rack_replace_their_own() -> None:
    short = model(NODE, spares=0, nodes=4)
    a, b = (simulate_events([100 * HOUR], m, 20, 3) for m in (short, replace(short, trays=2)))
    assert total(b, "waiting") < 0.3 * total(a, "waiting")


def test_a_soft_fault_loads_from_the_fast_tier() -> None:
    """With a checkpoint every minute, a crash loses half a minute; a lost node half an hour."""
    tiers = (Tier("host", 60.0, 0.0), Tier("remote", 3600.0, 0.0, every=60))
    for tier, mean in ((0, 30.0), (1, 1800.0)):
        stop = replace(FAULT, rate_per_s=1 / (40 * HOUR), tier=tier)
        runs = simulate_events([2000 * HOUR], FailureModel((stop,), tiers), 20, seed=4)
        assert total(runs, "lost") / sum(sum(r.stops.values()) for r in runs) == pytest.approx(mean, rel=0.1)


def test_a_planned_stop_loses_nothing() -> None:
    stop = replace(FAULT, planned=True)
    runs = simulate_events([100 * HOUR], model(stop), 20, seed=4)
    assert total(runs, "lost") == 0.0 and total(runs, "restart") > 0.0


def test_other_groups_train_on_while_one_is_away() -> None:
    """With fault tolerance nothing rolls back beyond the step in flight, and the group's GPUs idle."""
    groups = Groups(8, 2, True, 4, stall_s=30.0, rejoin_s=20.0)
    one, all_ = (
        simulate_events([100 * HOUR], replace(MODEL, groups=g), 20, 5, step_s=[10.0]) for g in (groups, None)
    )
    stops = sum(sum(run.stops.values()) for run in one)
    assert total(one, "lost") <= 10.0 * stops
    assert total(one, "fewer groups") == pytest.approx(stops * 900.0 / 8, rel=0.1)
    assert walls(one).mean() < walls(all_).mean()
    assert groups.pace(4) == 2.0 and replace(groups, keep_batch=True, microbatches=3).pace(7) == 4 / 3


def test_repeat_offenders_that_leave_stop_failing() -> None:
    stays = replace(MODEL, offenders=Offenders(4, 0.5, None))
    goes = replace(MODEL, offenders=Offenders(4, 0.5, 2))
    plain, kept, evicted = (
        sum(sum(r.stops.values()) for r in simulate_events([400 * HOUR], m, 10, 1))
        for m in (MODEL, stays, goes)
    )
    assert kept == pytest.approx(plain, rel=0.1)
    assert evicted == pytest.approx(kept * 0.5 + 8 * 10, rel=0.1)


def test_factors_stretch_the_training_of_their_replica() -> None:
    still = FailureModel((), (Tier(),))
    runs = simulate_events([10 * HOUR], still, 3, 0, factors=np.array([1.0, 1.5, 0.5]))
    assert [run.wall_ns[0] for run in runs] == [36 * 10**12, 54 * 10**12, 18 * 10**12]


N = 2048
LOAD = N * 3.79e-3 / DAY
HARD = Stop("gpu", LOAD * 0.8, 60, 600, nodes=1, away_s=2 * DAY)
SOFT = Stop("software", LOAD * 0.2, 30, 100)
SWAP = Stop("swap", 0, 0, 600, nodes=1, planned=True, away_s=2 * DAY)
PLANNED = Stop("planned", 0, 0, 600, planned=True)
SPOT = Stop("spot", LOAD * 0.1, 0, 600, nodes=1, planned=True, away_s=HOUR)
RACK = Stop("rack", LOAD * 0.05, 60, 700, nodes=18, tier=2, away_s=2 * DAY)
TIERS = (Tier("host", 60, 0.1), Tier("peer", 300, 1.0, 20.0, 5), Tier("remote", 3600, 10, 60, 60))
BIG = FailureModel((HARD, SOFT), (Tier(interval_s=900, stall_s=5),), nodes=N)
SLOW = SlowNodes(N * 2e-4 / DAY, 1.2, 2 * HOUR, 0.1, 12 * HOUR, 2)
TOLERANT = Groups(32, 8, True, 64, 30, 20, 0.02)
CASES = {
    "one tier": BIG,
    "asynchronous": replace(BIG, tiers=(Tier(interval_s=900, stall_s=1, lag_s=100),)),
    "tiers": replace(BIG, stops=(replace(HARD, tier=1), SOFT, RACK), tiers=TIERS, outlives_node=1),
    "spares": replace(BIG, spares=16),
    "crews": replace(BIG, spares=30, crews=16),
    "trays": replace(BIG, spares=1, trays=2),
    "slow nodes": replace(BIG, stops=(HARD, SOFT, SWAP), slow=SLOW),
    "spot": replace(BIG, stops=(HARD, SOFT, SPOT)),
    "maintenance": replace(BIG, stops=(HARD, SOFT, PLANNED), maintenance=Outage(5 * DAY, 4 * HOUR, 2)),
    "offenders": replace(BIG, offenders=Offenders(25, 0.3, 3)),
    "fault-tolerant": replace(BIG, groups=TOLERANT),
    "fault-tolerant, few spares": replace(BIG, groups=TOLERANT, spares=6),
    "elastic": replace(
        BIG,
        stops=(HARD, SOFT, Stop("group returns", 0, 0, 300, planned=True)),
        spares=14,
        groups=Groups(32, 8, False, 64),
        growth=2,
    ),
    "all": replace(
        BIG,
        stops=(replace(HARD, tier=1), SOFT, RACK, SWAP, PLANNED, SPOT),
        tiers=TIERS,
        outlives_node=1,
        slow=replace(SLOW, stop=3),
        maintenance=Outage(7 * DAY, 4 * HOUR, 4),
        spares=90,
        offenders=Offenders(25, 0.3, 3),
    ),
}


def goodputs(case: FailureModel, runs: int) -> tuple[float, float]:
    """(goodput of event runs, goodput of the closed form); every run's books balance."""
    work, steps = [30 * DAY, 2 * DAY], [10.0, 20.0]
    done = simulate_events(work, case, runs, 1, step_s=steps)
    assert all(run.balanced and min(run.ns.values()) >= 0 for run in done)
    assert all(run.seconds("productive") == math.fsum(work) for run in done)
    return math.fsum(work) / walls(done).mean(), math.fsum(work) / expected_wall_s(work, case, steps)


@pytest.mark.parametrize("name", CASES)
def test_the_closed_form_of_every_mechanism(name: str) -> None:
    """Six runs of 32 days on 2,048 nodes: the closed form within 2 %, far from what a mechanism costs."""
    events, closed = goodputs(CASES[name], 6)
    assert events == pytest.approx(closed, rel=0.02)


@pytest.mark.long
@pytest.mark.parametrize("name", ["one tier", "tiers", "slow nodes", "fault-tolerant"])
def test_the_closed_form_is_within_a_percent_of_a_thousand_runs(name: str) -> None:
    events, closed = goodputs(CASES[name], 1000)
    assert events == pytest.approx(closed, rel=0.01)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(sorted(CASES)), st.integers(0, 2**32), st.floats(0.3, 3.0))
def test_the_books_balance_to_the_nanosecond(name: str, seed: int, factor: float) -> None:
    case = CASES[name]
    run = simulate_one([1.3 * DAY, 0.1 * DAY], case, seed, 0, factor, [10.0, 20.0])
    assert run.balanced
    assert run.seconds("productive") == pytest.approx(1.4 * DAY * factor)


def test_the_same_seed_gives_the_same_run_and_a_timeline_without_gaps() -> None:
    case = CASES["all"]
    a, b = (simulate_one([10 * DAY], case, 3, 1, show=show) for show in (True, False))
    assert a.wall_ns == b.wall_ns and a.ns == b.ns and not b.timeline
    rows = [row for row in a.timeline if row.what != "fault"]
    assert all(x.end_s == y.begin_s for x, y in pairwise(rows))
    assert rows[0].begin_s == 0.0 and rows[-1].end_s == a.wall_ns[0] / NS
