"""How many GPUs, which, and for how much: DeepSeek-V3 in 60 days, and why more GPUs bring less.

Covers: `size` over accelerators, both sides of a deadline, the published plan, a scaling curve and its bends.
Scenario: DeepSeek-V3 (671B) and its 14.8 T tokens; sizes of three accelerators, then the published plan.
"""

from __future__ import annotations

import moesim
from moesim.simulator.planner.sized import WINS, bend_text, sized_text

HOME = "deepseek-v3-2048xh800"
DAYS = 60.0


def main() -> None:
    """Print what wins within 60 days, what the published plan takes, and where it bends."""
    sizing = moesim.size(HOME, gpus="1536,2048", accelerators=("h800", "h100", "h200"), deadline_days=DAYS)
    print(f"within {DAYS:g} days, stops included")
    for key, row in sizing.winners.items():
        days, cost = row.band("days"), row.band("cost_usd")
        assert days is not None and cost is not None
        print(f"{WINS[key]:12} {sized_text(row)}")
        print(f"{'':12} 80 %: {days.p10:.1f} to {days.p90:.1f} days, ${cost.p10:,.0f} to ${cost.p90:,.0f}")

    published = moesim.size(
        HOME, "run.failures=none", gpus=(1024, 2048, 3072), deadline_days=DAYS, search="own", curve="strong"
    )
    print("\nthe published plan without failures, on both sides of 60 days")
    for side in published.sides:
        for beside in (side.misses, side.keeps):
            if beside is not None:
                print(f"{sized_text(beside)}; {beside.gpu_hours:,.0f} GPU-hours")
    print("\nwhat more GPUs lose against ideal scaling")
    for curve in published.curves:
        for bend in curve.bends:
            print(bend_text(bend))


if __name__ == "__main__":
    main()
