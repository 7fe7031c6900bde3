"""How do I read a result?

Covers: the fields of a result, its printed text, the closed-form estimate, a comparison of changed copies.
Scenario: DeepSeek-V3 on 2,048 H800, and the same with 8 communication SMs.
"""

from __future__ import annotations

import moesim

HOME = "deepseek-v3-2048xh800"


def main() -> None:
    """Print a result as text, then field by field, beside its estimate and a changed copy."""
    home = moesim.load(HOME)
    result = moesim.simulate(home)
    print(result)

    print()
    print(f"step.time_s              {result.step.time_s:.3f} s")
    print(f"step.mfu_causal          {result.step.mfu_causal:.3f}")
    print(f"breakdown_s.bubble       {result.breakdown_s.bubble:.3f} s on pipeline rank 0")
    print(f"memory.total_bytes       {result.memory.total_bytes / 2**30:.1f} GiB; fits: {result.memory.fits}")
    print(f"run.days, run.cost_usd   {result.run.days:.1f} days, {result.run.cost_usd:,.0f} US dollars")

    print()
    estimate = moesim.estimate(home)
    print(f"closed form              {estimate.step_time_s:.3f} s, error {estimate.error:.0%}")

    print()
    print(moesim.compare([home, home.replace(communication={"sms": 8})]))


if __name__ == "__main__":
    main()
