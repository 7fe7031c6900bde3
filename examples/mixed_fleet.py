"""Is it worth adding older GPUs to a job? 512 H100 with 0, 256 or 512 A100, planned anew each time.

Covers: scenarios with a fleet, `moesim.plan` on them, each pool alone beside the mix.
Scenario: DeepSeek-V3 in BF16, 3,072 sequences a step, EP64; both kinds are priced by the same generic priors,
so that they compare. Lists of values are short so that the study takes seconds.
"""

from __future__ import annotations

import moesim

SPACE = moesim.PlanSpace(
    tp=(1, 2), pp=(6, 8, 12, 16), ep=(64,), cp=(1,), microbatch=(1,), zero_stage=(1,),
    schedule=("1f1b", "dualpipev"), recompute=("selective", "full"), precision=("bf16",),
)  # fmt: skip


def main() -> None:
    """Print step, cost and shares against the A100 that are added, then the reasons for the largest mix."""
    job = moesim.load(
        "deepseek-v3-2048xh800",
        "cluster=h100-1024", "cluster.nodes=64", "profile=generic-roofline", "precision=bf16",
        "batch.sequences=3072", "recompute=full", "communication.kernels=nccl",  # DeepEP does not run on A100
    )  # fmt: skip
    print(
        "A100   step (s)   over H100 alone   $M a T tokens   layers H100 + A100   idle H100, A100 (s)   plan"
    )
    first = None
    for nodes in (32, 64):
        pools = [{"cluster": "h100-1024", "nodes": 64}, {"cluster": "a100-512", "nodes": nodes}]
        found = moesim.plan(job.replace(name="mixed", fleet={"pools": pools}), SPACE, top=1)
        assert found.fleet is not None
        alone = found.fleet.alone[0].plan
        assert alone is not None
        if first is None:
            first = alone
            row(0, alone.time_s, 1.0, alone.cost_usd, job.run.tokens, "61", "", alone.label)
        best = found.best
        layers = " + ".join(str(pool.layers) for pool in best.pools)
        idle = ", ".join(f"{pool.bubble_s:.1f}" for pool in best.pools)
        row(
            8 * nodes,
            best.time_s,
            best.time_s / first.time_s,
            best.cost_usd,
            job.run.tokens,
            layers,
            idle,
            best.label,
        )
    print()
    for sentence in found.fleet.sentences:
        print(sentence)


def row(
    gpus: int,
    step_s: float,
    ratio: float,
    usd: float | None,
    tokens: float,
    layers: str,
    idle: str,
    plan: str,
) -> None:
    """One line of the table."""
    cost = (usd or 0.0) / tokens * 1e6
    change = ratio - 1.0
    print(
        f"{gpus:4d}   {step_s:8.2f}   {change:+15.1%}   {cost:13.3f}   {layers:>18s}   {idle:>19s}   {plan}"
    )


if __name__ == "__main__":
    main()
