"""What is one freed SM worth?

Covers: generations of communication kernels as data, the price of a run by trillion tokens.
Scenario: DeepSeek-V3 on 2,048 H800 with expert-parallel kernels that hold 24 or 20 SMs (first generation),
6 or 4 (as DeepEP V2 claims, at equal bandwidth), or none (an offload that does not exist yet).
"""

from __future__ import annotations

from pathlib import Path

import moesim

HOME = "deepseek-v3-2048xh800"
PROFILE = Path(__file__).parent / "profiles" / "kernel-generations.yaml"
CASES = (("deepep-2025-02", 24), ("deepep-2025-02", 20), ("v2", 6), ("v2", 4), ("offload", 0))


def main() -> None:
    """Print the step and what each SM that was given back is worth."""
    home = moesim.load(HOME, f"profile={PROFILE}")
    points = [{"communication.kernels": name, "communication.sms": sms} for name, sms in CASES]
    found = moesim.sweep(home, points, design="list")
    base = next(p for p in found.points if p.values["communication.sms"] == 20).figures
    trillions = home.run.tokens / 1e12
    print("kernels          SMs   step (s)   k$ a trillion tokens   k$ a freed SM and trillion tokens")
    for point in found.points:
        name, sms = point.values["communication.kernels"], point.values["communication.sms"]
        cost = float(point.figures["cost_usd"] or 0.0) / trillions
        worth = ""
        if sms != 20:
            worth = f"{(float(base['cost_usd'] or 0.0) / trillions - cost) / (20 - sms) / 1e3:.2f}"
        step = point.figures["step_time_s"]
        print(f"{name:15s}  {sms:3d}   {step:8.2f}   {cost / 1e3:20.1f}   {worth:>12s}".rstrip())
    print("The bandwidth is that of 20 SMs in all rows below 20, so the difference is what compute gains.")


if __name__ == "__main__":
    main()
