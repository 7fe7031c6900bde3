"""What if communication kernels held fewer or more SMs?

Covers: overrides, `moesim.simulate`, bounds.
Scenario: DeepSeek-V3 on 2,048 H800 with 8 to 32 of 132 SMs given to the expert-parallel kernels.
"""

from __future__ import annotations

import moesim

HOME = "deepseek-v3-2048xh800"


def main() -> None:
    """Print step time and pair time against the number of communication SMs."""
    print("SMs   step (s)   pair (ms)   exposed communication (s)")
    for sms in (4, 8, 16, 20, 24, 32):
        result = moesim.simulate(HOME, f"communication.sms={sms}")
        pair_ms = (result.forward_backward_pair_s or 0.0) * 1e3
        exposed = result.breakdown_s.exposed_communication
        print(f"{sms:3d}   {result.step.time_s:8.2f}   {pair_ms:9.1f}   {exposed:8.2f}")


if __name__ == "__main__":
    main()
