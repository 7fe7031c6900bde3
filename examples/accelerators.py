"""The same job on nine accelerators: how long, how much, how sure, and what nobody published.

Covers: clusters by name, the best shipped profile of an accelerator, confidence, missing figures.
Scenario: DeepSeek-V3's step (15,360 sequences of 4,096 tokens) with PP16, EP64 and DualPipe on about 2,048
of each; FP8 where the accelerator has it, BF16 otherwise. Communication kernels hold 20 compute units, or
none where a dedicated engine moves collectives.
"""

from __future__ import annotations

import moesim
from moesim.hwmodels import load_cluster
from moesim.hwmodels.confidence import best_profile, missing_figures

HOME = "deepseek-v3-2048xh800"
CLUSTERS = (
    ("deepseek-h800-2048", None),
    ("h20-2048", None),
    ("h100-1024", 256),
    ("h200-1024", 256),
    ("b200-1024", 256),
    ("gb200-nvl72-2048", None),
    ("mi300x-2048", None),
    ("cloudmatrix384-3072", None),
    ("tpu-v5p-2048-slice", None),
)
"""Cluster, and the number of nodes where it is not the cluster's own."""


def main() -> None:
    """Print one line an accelerator, and then what is missing of each."""
    print(
        "accelerator   number  format  step (s)  tokens/s each  $M a T tokens  memory (GB)"
        "  confidence (profile)"
    )
    gaps = []
    for name, nodes in CLUSTERS:
        chip = load_cluster(name).accelerator
        peak = chip.peak_flop_per_s
        precision = "fp8" if "fp8" in chip.peak and peak("fp8") > peak("bf16") else "bf16"
        _, profile = best_profile(chip, precision)
        resized = [] if nodes is None else [f"cluster.nodes={nodes}"]
        units = 0 if chip.communication_engine else 20
        result = moesim.simulate(
            HOME,
            f"cluster={name}",
            *resized,
            f"profile={profile}",
            f"precision={precision}",
            f"communication.sms={units}",
            "communication.kernels=null",  # the dispatcher that runs there
        )
        step, run, memory = result.step, result.run, result.memory
        number = step.tokens_per_s / step.tokens_per_s_per_gpu
        cost = "no price" if run.cost_usd is None else f"{run.cost_usd / run.tokens * 1e6:.3f}"
        fits = "" if memory.fits else ", does not fit"
        print(
            f"{chip.name:12s}  {number:6.0f}  {precision:6s}  {step.time_s:8.2f}"
            f"  {step.tokens_per_s_per_gpu:13.0f}  {cost:>13s}  {memory.total_bytes / 1e9:11.1f}"
            f"  {result.confidence} ({profile}){fits}"
        )
        missing = [*missing_figures(chip), *(["price"] if run.cost_usd is None else [])]
        if missing:
            gaps.append(f"{chip.name}: {', '.join(missing)}")
    print("\nnot found in any public source")
    for gap in gaps:
        print(f"  {gap}")


if __name__ == "__main__":
    main()
