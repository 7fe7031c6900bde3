"""Over how many GPUs should the experts of a layer be spread?

Covers: `moesim.sweep` over a list of points, plans that are illegal or do not fit.
Scenario: DeepSeek-V3 on 2,048 H800, EP 8 to 256; EP256 needs 256 data-parallel ranks, so 8 pipeline ranks.
"""

from __future__ import annotations

import moesim

HOME = "deepseek-v3-2048xh800"


def main() -> None:
    """Print step time, waiting and memory against the size of the expert-parallel group."""
    points = [{"parallel.ep": ep, "parallel.pp": 16} for ep in (8, 16, 32, 64, 128, 256)]
    points += [{"parallel.ep": ep, "parallel.pp": 8} for ep in (64, 256)]
    found = moesim.sweep(HOME, points, design="list")
    print(" EP   PP   step (s)   exposed communication (s)   memory (GiB)")
    for point in found.points:
        row = point.figures
        place = f"{point.values['parallel.ep']:3d}   {point.values['parallel.pp']:2d}"
        if not row:
            print(f"{place}   {point.status}: {point.reason}")
            continue
        note = "" if point.status == "ok" else f"   {point.status}"
        print(
            f"{place}   {row['step_time_s']:8.2f}   {row['exposed_communication_s']:25.2f}"
            f"   {(row['memory_bytes'] or 0.0) / 2**30:12.1f}{note}"
        )
    print("Small groups move fewer bytes between nodes, and each GPU holds more experts.")


if __name__ == "__main__":
    main()
