"""What each pool of a fleet contributes and costs, and which one holds the others up (pure)."""

from __future__ import annotations

from dataclasses import dataclass

from moesim.hwmodels.units import SECONDS_PER_DAY, SECONDS_PER_HOUR
from moesim.simulator.predict.result import Result
from moesim.simulator.predict.result_parts import PoolResult
from moesim.simulator.scenario import Scenario


@dataclass(frozen=True, slots=True)
class PoolShare:
    """A pool's part of the fleet; shares are between 0 and 1.

    `busy_s` and `idle_s`: mean over its pipeline ranks; idle is the bubble. `usd`: rent of its GPUs for the
    run's main phase at the hourly price of its cluster, None where that is unknown.
    """

    pool: PoolResult
    gpu_share: float
    layer_share: float
    busy_s: float
    idle_s: float
    usd: float | None
    is_bottleneck: bool


def fleet_shares(scenario: Scenario, result: Result) -> tuple[PoolShare, ...]:
    """The pools of a finished prediction, in the order of the pipeline.

    The bottleneck is the pool whose ranks idle least: the others wait for it. Empty for a single cluster.
    """
    pools = result.pools
    if not pools:
        return ()
    hours = result.run.days * SECONDS_PER_DAY / SECONDS_PER_HOUR
    gpus, layers = sum(pool.n_gpus for pool in pools), sum(pool.layers for pool in pools)
    busiest = min(range(len(pools)), key=lambda number: (pools[number].bubble_s, number))
    return tuple(
        PoolShare(
            pool=pool,
            gpu_share=pool.n_gpus / gpus,
            layer_share=pool.layers / layers if layers else 0.0,
            busy_s=result.step.time_s - pool.bubble_s,
            idle_s=pool.bubble_s,
            usd=None
            if machine.price_per_gpu_hour is None
            else pool.n_gpus * machine.usd_per_gpu_hour * hours,
            is_bottleneck=number == busiest,
        )
        for number, (pool, machine) in enumerate(zip(pools, scenario.machines, strict=True))
    )
