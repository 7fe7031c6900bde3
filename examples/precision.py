"""BF16 or FP8?

Covers: precision recipes, memory by kind, an interval of the difference from shared draws.
Scenario: DeepSeek-V3 on 2,048 H800 with DeepSeek's FP8 recipe and in BF16, both with published stand-alone
kernel rates (the trace of the home case has FP8 kernels only).
"""

from __future__ import annotations

import moesim

HOME = "deepseek-v3-2048xh800"


def main() -> None:
    """Print both, the difference with its interval, and what changes on the critical path."""
    fp8 = moesim.load(HOME, "profile=h800-published")
    bf16 = fp8.replace(precision="bf16")
    found = moesim.compare([fp8, bf16], names=["fp8", "bf16"], uncertainty=True)
    print("         step (s)   MFU     memory (GiB)   days   cost (M$)")
    for side in found.sides:
        row = side.figures
        fits = "" if row["fits"] else "   does not fit"
        print(
            f"{side.name:6s}   {row['step_time_s']:8.2f}   {row['mfu_causal']:.1%}   "
            f"{(row['memory_bytes'] or 0.0) / 2**30:12.1f}   {row['days']:4.1f}   "
            f"{(row['cost_usd'] or 0.0) / 1e6:6.2f}{fits}"
        )
    delta = found.sides[1].delta_s
    assert delta is not None
    low, high = f"{delta.p10:+.2f}", f"{delta.p90:+.2f}"
    print(f"BF16 costs {delta.predicted:+.2f} s a step; with probability 0.8 between {low} and {high}")
    print("\ncritical path (s)      fp8     bf16   change")
    for row in found.waterfall_rows()[:8]:
        first, second = row["0: fp8"], row["1: bf16"]
        print(f"{row['cause']:18s}  {first:6.3f}   {second:6.3f}   {second - first:+.3f}")


if __name__ == "__main__":
    main()
