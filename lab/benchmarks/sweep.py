"""What a sweep costs beside the predictions it is made of.

    python -m lab.benchmarks.sweep [--points 48] [--workers 2]

Overhead = workers x wall time / seconds the workers spent predicting - 1: starting processes, imports, keys,
the store, and the wait for the last point. Then the same sweep again, from the store alone. On a shared
machine wall times do not compare: there the CPU seconds of all processes are held against those of as many
warm predictions in one.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import tempfile
import time
from pathlib import Path

import moesim
from moesim.simulator.studies.space import evaluate

HOME = "deepseek-v3-2048xh800"

WARM = 4
"""Predictions in this process that tell the CPU seconds of one."""


def cpu_s() -> float:
    """CPU seconds of this process and of its children that have ended."""
    while multiprocessing.active_children():
        time.sleep(0.05)
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def one_point_s(home: moesim.Scenario) -> float:
    """CPU seconds of a warm prediction; the first is not counted."""
    evaluate(home.replace(seed=0))
    began = time.process_time()
    for seed in range(1, WARM + 1):
        evaluate(home.replace(seed=seed))
    return (time.process_time() - began) / WARM


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
            before, began = cpu_s(), time.perf_counter()
            found = moesim.sweep(home, space, workers=options.workers, store=store)
            wall = time.perf_counter() - began
            print(f"{name}: {len(found.points)} points, {options.workers} workers, {wall:.2f} s")
            if found.work_s:
                overhead = options.workers * wall / found.work_s - 1.0
                print(f"  predictions {found.work_s:.2f} s, overhead {overhead:.1%}")
                cpu, work = cpu_s() - before, len(found.points) * one_point_s(home)
                share = cpu / work - 1.0
                print(f"  {cpu:.2f} CPU s, of that {work:.2f} in predictions: overhead {share:.1%}")


if __name__ == "__main__":
    main()
