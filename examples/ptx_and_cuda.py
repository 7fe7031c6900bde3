"""PTX or plain CUDA C++ for the communication kernels: what is it worth in a training step?

Covers: measured rates of our own kernels as generations of one profile, `moesim.sweep`.
Scenario: DeepSeek-V3 on 2,048 H800 with both versions of the dispatch and combine kernels of this
repository (rates by number of SMs measured side by side on 8 H200, lab/docs/kernels-tables.md).
"""

from __future__ import annotations

from pathlib import Path

import moesim

HOME = "deepseek-v3-2048xh800"
PROFILE = Path(__file__).parent / "profiles" / "kernel-generations.yaml"


def main() -> None:
    """Print step times of both versions against the number of communication SMs."""
    home = moesim.load(HOME, f"profile={PROFILE}")
    space = {"communication.sms": "2,4,6,8,20", "communication.kernels": ["ptx", "cuda-cpp"]}
    found = moesim.sweep(home, space)
    steps = {tuple(p.values.values()): float(p.figures["step_time_s"] or 0.0) for p in found.points}
    print("SMs   PTX (s)   CUDA C++ (s)   CUDA C++ against PTX")
    for sms in (2, 4, 6, 8, 20):
        ptx, cuda = steps[sms, "ptx"], steps[sms, "cuda-cpp"]
        print(f"{sms:3d}   {ptx:7.2f}   {cuda:12.2f}   {cuda / ptx - 1.0:+.1%}")
    versions = ("ptx", "cuda-cpp")
    best = [min(seconds for (_, kind), seconds in steps.items() if kind == name) for name in versions]
    worse = best[1] / best[0] - 1.0
    print(f"each at its best number of SMs: {best[0]:.2f} and {best[1]:.2f} s, {worse:+.1%}")
    print("With 20 SMs the H800's NICs and NVLink decide; PTX pays where few SMs do the reduction.")


if __name__ == "__main__":
    main()
