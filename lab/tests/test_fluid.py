"""Flows between endpoints as fluids: each is settled at every event, as in the engine's pool of links."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import simpy

from moesim.hwmodels.arrays import FloatArray
from lab.benchmarks.fluid import FluidReport, max_min_rates, simulate_flows
from moesim.simulator.engine.link_map import Demand
from moesim.simulator.engine.simpy.links import LinkPool


def simulated(
    start: Sequence[float],
    paths: Sequence[Sequence[int]],
    size: Sequence[float],
    cap: Sequence[float | None],
    capacity: Sequence[float],
    latency: float = 0.0,
    report: FluidReport | None = None,
) -> list[float]:
    result: list[float] = simulate_flows(
        np.array(start, dtype=float),
        np.cumsum([0, *(len(path) for path in paths)]),
        np.array([link for path in paths for link in path], dtype=np.int64),
        np.array(size, dtype=float),
        np.array([np.inf if c is None else c for c in cap], dtype=float),
        np.array(capacity, dtype=float),
        latency,
        report,
    ).tolist()
    return result


def crossing_flows(n: int, seed: int) -> tuple[FloatArray, list[list[int]], FloatArray, FloatArray]:
    """Flows between 32 endpoints under 4 leaves over 2 spines, at random: starts, paths, bytes, capacity."""
    draw = np.random.default_rng(seed)
    paths = []
    for source, target, spine in zip(
        draw.integers(0, 32, n), draw.integers(0, 32, n), draw.integers(0, 2, n), strict=True
    ):
        here, there = source // 8, target // 8
        middle = [] if here == there else [64 + 2 * here + spine, 72 + 2 * there + spine]
        paths.append([int(link) for link in (source, *middle, 32 + target)])
    return draw.uniform(0, 2, n), paths, draw.uniform(1, 40, n), np.repeat([50.0, 90.0], [64, 16])


def test_hundreds_of_flows_end_as_if_all_were_solved_at_every_event() -> None:
    start, paths, size, capacity = crossing_flows(400, seed=2)
    report = FluidReport()
    ends = simulated(
        start.tolist(), paths, size.tolist(), [20.0] * len(paths), capacity.tolist(), 0.0, report
    )
    left, expected, now = size.copy(), np.zeros(len(paths)), 0.0
    waiting, running = np.argsort(start).tolist(), list[int]()
    while waiting or running:
        indptr = np.cumsum([0, *(len(paths[i]) for i in running)])
        links = np.array([link for i in running for link in paths[i]], dtype=np.int64)
        rates = max_min_rates(indptr, links, np.ones(len(links)), np.full(len(running), 20.0), capacity)
        first = min((now + left[i] / r for i, r in zip(running, rates, strict=True)), default=np.inf)
        then = min(first, start[waiting[0]] if waiting else np.inf)
        left[running] -= rates * (then - now)
        now = float(then)
        over = [i for i in running if left[i] <= 1e-12 * size[i]]
        expected[over] = now
        running = [i for i in running if i not in over]
        while waiting and start[waiting[0]] <= now:
            running.append(waiting.pop(0))
    assert ends == pytest.approx(expected.tolist(), rel=1e-9)
    assert report.solved < 0.5 * report.events * len(paths)


def test_the_pool_of_the_engine_and_the_fluid_agree() -> None:
    start, paths, size, capacity = crossing_flows(200, seed=4)
    second = 10**12
    ends = simulated(start.tolist(), paths, size.tolist(), [20.0] * len(paths), capacity.tolist())
    env = simpy.Environment()
    pool = LinkPool(env, capacity, few=False)
    arrived = [0.0] * len(paths)

    def sender(i: int) -> simpy.events.ProcessGenerator:
        yield env.timeout(round(start[i] * second))
        yield from pool.transfer(
            Demand.of((link, size[i] * second) for link in paths[i]), size[i] / 20.0 * second
        )
        arrived[i] = env.now / second

    for i in range(len(paths)):
        env.process(sender(i))
    env.run()
    assert arrived == pytest.approx(ends, rel=1e-9)
    assert pool.solved > 0


def test_incast() -> None:
    n = 9
    paths = [[1 + i, 0] for i in range(n)]
    assert simulated([2.0] * n, paths, [30.0] * n, [None] * n, [3.0] * (n + 1)) == pytest.approx([92.0] * n)
    # Of unequal sizes the k-th smallest waits for what all of them have sent by then.
    size = np.arange(1.0, n + 1)
    ends = np.cumsum(np.diff(size, prepend=0.0) * np.arange(n, 0, -1)) / 3.0
    assert simulated([0.0] * n, paths, size.tolist(), [None] * n, [3.0] * (n + 1)) == pytest.approx(
        ends.tolist()
    )


def test_latency_is_waited_for_before_the_first_byte_moves() -> None:
    assert simulated([1.0], [[0]], [30.0], [None], [3.0], latency=0.25) == [11.25]
    # A message of no bytes is nothing but latency, and takes nobody's bandwidth.
    assert simulated([1.0, 0.0], [[0], [0]], [0.0, 30.0], [None, None], [3.0], latency=0.25) == [1.25, 10.25]


def test_only_flows_that_notice_are_solved_again() -> None:
    """A thousand pairs with links of their own: every event touches one flow."""
    n = 1000
    report = FluidReport()
    draw = np.random.default_rng(0)
    ends = simulated(
        draw.uniform(0, 1, n).tolist(), [[i] for i in range(n)], [1.0] * n, [None] * n, [1.0] * n, 0.0, report
    )
    assert report.events == 2 * n
    assert report.solved == n
    assert len(ends) == n


def test_links_without_a_limit_and_times_before_zero() -> None:
    assert simulated([-5.0, -5.0], [[0, 1], [1]], [10.0, 10.0], [None, 2.0], [5.0, np.inf]) == [-3.0, 0.0]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"size": [-1.0]}, "not negative"),
        ({"capacity": [0.0]}, "no bandwidth"),
        ({"cap": [0.0]}, "no bandwidth"),
        ({"start": [np.nan]}, "finite"),
        ({"capacity": [np.inf]}, "never take any time"),
        ({"size": [1.0, 2.0]}, "2 sizes"),
    ],
)
def test_bad_input_is_refused(changed: dict[str, list[float]], message: str) -> None:
    case: dict[str, list[float]] = {
        "start": [0.0],
        "size": [1.0],
        "cap": [np.inf],
        "capacity": [1.0],
        **changed,
    }
    with pytest.raises(ValueError, match=message):
        simulated(case["start"], [[0]], case["size"], case["cap"], case["capacity"])
