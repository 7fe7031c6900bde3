"""What a sweep costs beside the predictions it is made of.

    python benchmarks/sweep.py [--points 48] [--workers 2]

Overhead = workers x wall time / seconds the workers spent predicting - 1: starting processes, imports, keys,
the store, and the wait for the last point. Then the same sweep again, from the store alone.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import moesim

HOME = "deepseek-v3-2048xh800"


def main() -> None:
    """Print seconds and overhead."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--points", type=int, default=48)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    home = moesim.load(HOME)
    space = {"seed": f"1..{options.points}"}
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "sweep.sqlite"
        for name in ("computed", "from the store"):
            began = time.perf_counter()
            found = moesim.sweep(home, space, workers=options.workers, store=store)
            wall = time.perf_counter() - began
            print(f"{name}: {len(found.points)} points, {options.workers} workers, {wall:.2f} s")
            if found.work_s:
                overhead = options.workers * wall / found.work_s - 1.0
                print(f"  predictions {found.work_s:.2f} s, overhead {overhead:.1%}")


if __name__ == "__main__":
    main()
