"""Two kinds of accelerator in one job: some pipeline ranks on H800, the others on H20.

Covers: `simulate_fleet`, layers balanced by speed, memory by pool.
Scenario: DeepSeek-V3 on 1,024 GPUs, PP16 1F1B, EP64, FP8; from no H20 to half of the ranks. Every row prices
both kinds from datasheets, so that they compare.
"""

from __future__ import annotations

import moesim
from moesim.hwmodels import load_cluster
from moesim.simulator.fleet import Pool, simulate_fleet

RANKS, NODES_PER_RANK = 16, 8


def pool(name: str, ranks: int) -> Pool:
    """`ranks` pipeline ranks of 64 GPUs."""
    cluster = load_cluster(name).model_copy(update={"nodes": ranks * NODES_PER_RANK})
    return Pool(cluster=cluster, pipeline_ranks=ranks)


def main() -> None:
    """Print step time, cost and the layers of each pool against the number of ranks on H20."""
    job = moesim.load("deepseek-v3-2048xh800", "schedule=1f1b", "batch.sequences=7680", "recompute=full")
    print("ranks on H20   step (s)   $M a T tokens   layers H20 + H800   bubble H20, H800 (s)   memory (GB)")
    for slow in (0, 2, 4, 8):
        # The slow pool comes first: the last rank also runs the MTP module and two passes of the head.
        pools = [pool("h20-2048", slow)] if slow else []
        pools.append(pool("deepseek-h800-2048", RANKS - slow))
        result = simulate_fleet(job, pools)
        cost = (result.cost_usd or 0.0) / job.run.tokens * 1e6
        layers = " + ".join(str(p.layers) for p in result.pools)
        bubbles = ", ".join(f"{p.bubble_s:.1f}" for p in result.pools)
        memory = ", ".join(f"{p.memory.total_bytes / 1e9:.0f}" for p in result.pools)
        fits = "" if all(p.memory.fits for p in result.pools) else " does not fit"
        print(
            f"{slow:12d}   {result.step.time_s:8.2f}   {cost:13.3f}   {layers:>17s}   {bubbles:>20s}"
            f"   {memory}{fits}"
        )


if __name__ == "__main__":
    main()
