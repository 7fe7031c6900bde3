"""What do hot experts cost, and what do replicas buy back?

Covers: expert load, expert-parallel load balancing, capacity, bias dynamics, waits at the barrier.
Scenario: DeepSeek-V3 on 2,048 H800 with Zipf-distributed popularity of the experts of a layer.
"""

from __future__ import annotations

from moesim.simulator.layout.expert_load import expected_barrier_wait_s
from moesim.simulator.layout.popularity import bias_dynamics
from moesim.simulator.predict.driver import predict
from moesim.simulator.scenario import load_scenario

HOME = "deepseek-v3-2048xh800"
ZIPF = "routing.load={kind: zipf, exponent: 0.3}"
CASES = {
    "equal experts": ("routing.load={kind: uniform}",),
    "Zipf 0.3": (ZIPF,),
    "placement only, by node": (ZIPF, "routing.eplb={redundant_experts: 0}"),
    "64 replicas, by node": (ZIPF, "routing.eplb={redundant_experts: 64}"),
    "64 replicas, global": (ZIPF, "routing.eplb={redundant_experts: 64, policy: global}"),
    "capacity 1.25 a rank": (ZIPF, "routing.capacity={factor: 1.25, per: rank}"),
}


def main() -> None:
    """Print the step under each load, the waits in the published trace's layers, and the bias dynamics."""
    print("max/mean: heaviest rank of a layer and micro-batch over the mean rank")
    print("wait: for that rank, in the three expert phases of a layer, mean over ranks")
    print("                          step (s)   max/mean   wait (ms)   memory (GB)   dropped")
    for name, overrides in CASES.items():
        prepared, _, result = predict(load_scenario(HOME, overrides))
        loads = prepared.loads
        assert loads is not None
        phases = [prepared.program.costs.phase("moe", phase, 1.0) for phase in ("mlp F", "mlp I", "mlp W")]
        wait_ms = 1e3 * expected_barrier_wait_s(loads, sum(phase.row_s for phase in phases)).mean()
        heaviest = loads.rows.max(axis=1).mean()
        print(
            f"{name:24s}  {result.step.time_s:8.2f}   {heaviest:8.2f}   {wait_ms:9.2f}   "
            f"{result.memory.total_bytes / 1e9:11.1f}   {loads.dropped:6.1%}"
        )

    print("\nMaxVio (busiest expert over mean, less 1) under the bias rule, mean over 58 layers")
    print("drift (steps)   step 1     10    100    300   1000")
    for drift_steps in (100, 1_000, 10_000, 100_000):
        vio = bias_dynamics(
            layers=58,
            experts=256,
            top_k=8,
            affinity_spread=0.5,
            drift_steps=drift_steps,
            gamma=0.001,
            steps=1000,
        ).max_vio.mean(axis=1)
        print(f"{drift_steps:13,d}   " + "".join(f"{vio[n - 1]:6.2f} " for n in (1, 10, 100, 300, 1000)))


if __name__ == "__main__":
    main()
