"""What if communication kernels held fewer or more SMs?

Covers: `moesim.sweep` over a list expression, refused points with their reason, bounds.
Scenario: DeepSeek-V3 on 2,048 H800 with 0 to 48 of 132 SMs given to the expert-parallel kernels.
"""

from __future__ import annotations

import moesim

HOME = "deepseek-v3-2048xh800"


def main() -> None:
    """Print step time and pair time against the number of communication SMs."""
    found = moesim.sweep(HOME, {"communication.sms": "0,4,8,12,16..24:4,32,48"})
    print("SMs   step (s)   pair (ms)   exposed communication (s)   bounds (s)")
    for point in found.points:
        sms, row = point.values["communication.sms"], point.figures
        if point.status != "ok":
            print(f"{sms:3d}   {point.status}: {point.reason}")
            continue
        pair_ms = (row["pair_s"] or 0.0) * 1e3
        print(
            f"{sms:3d}   {row['step_time_s']:8.2f}   {pair_ms:9.1f}   {row['exposed_communication_s']:8.2f}"
            f"                    {row['lower_bound_s']:.2f} to {row['upper_bound_s']:.2f}"
        )
    best = found.best()
    print(f"best of these: {best.values['communication.sms']} SMs, {best.figures['step_time_s']:.2f} s")


if __name__ == "__main__":
    main()
