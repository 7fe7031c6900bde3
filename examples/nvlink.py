"""What does the H800's narrow NVLink cost?

Covers: one figure inside a named description replaced, `moesim.compare`, its waterfall by cause.
Scenario: DeepSeek-V3 on 2,048 H800 whose NVLink carries 200 GB/s a direction (160 GB/s of payload, as
published), and the same GPUs with the 450 GB/s of an H100.
"""

from __future__ import annotations

import moesim

HOME = "deepseek-v3-2048xh800"
NVLINK = "cluster.node.accelerator.scale_up_bandwidth"


def main() -> None:
    """Print step times, and the seconds by cause that the difference is made of."""
    published = moesim.load(HOME)
    wide = published.replace(**{NVLINK: "450 GB/s"})
    few = {"communication.sms": 8}
    names = ["200 GB/s", "450 GB/s", "200 GB/s, 8 SMs", "450 GB/s, 8 SMs"]
    found = moesim.compare([published, wide, published.replace(**few), wide.replace(**few)], names=names)
    for side in found.sides:
        print(f"{side.name:16s} step {side.figures['step_time_s']:.3f} s")
    print("\ncritical path (s)   200 GB/s   450 GB/s   change")
    for item in found.waterfall:
        first, second = item.seconds[:2]
        if abs(second - first) >= 0.001:
            print(f"{item.cause:18s}  {first:8.3f}   {second:8.3f}   {second - first:+.3f}")
    total = [sum(item.seconds[n] for item in found.waterfall) for n in (0, 1)]
    print(f"{'all causes':18s}  {total[0]:8.3f}   {total[1]:8.3f}   {total[1] - total[0]:+.3f}")
    print(
        "\nThe expert-parallel groups span 8 nodes, so the NICs decide their transfers with either NVLink;\n"
        "what gets faster are the data-parallel collectives at the end of the step."
    )


if __name__ == "__main__":
    main()
