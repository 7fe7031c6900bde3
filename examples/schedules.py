"""Which pipeline schedule? Every one on the same job, with its bubble and its memory.

Covers: schedules by name, memory of the fullest GPU, illegal combinations as errors.
Scenario: DeepSeek-V3 on 2,048 H800, PP16, EP64.
"""

from __future__ import annotations

import moesim
from moesim.simulator.schedules import SCHEDULES

HOME = "deepseek-v3-2048xh800"


def main() -> None:
    """Print step time, rank-0 bubble and memory of every schedule."""
    print("schedule                  step (s)   bubble (s)   memory (GB)")
    for name in SCHEDULES:
        try:
            result = moesim.simulate(HOME, f"schedule={name}")
        except moesim.InputError as error:
            print(f"{name:24s}  not possible: {error}")
            continue
        memory = result.memory
        verdict = "" if memory.fits else "  does not fit"
        print(
            f"{name:24s}  {result.step.time_s:8.2f}   {result.breakdown_s.bubble:10.2f}"
            f"   {memory.total_bytes / 1e9:11.1f}{verdict}"
        )


if __name__ == "__main__":
    main()
