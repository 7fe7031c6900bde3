"""Compares the speed of two trees: the home case in alternating pairs, one process a tree.

    python -m lab.benchmarks.speed_against /path/to/the/tree/before [--pairs 15] [--scenario NAME]

Both trees answer through the public API alone. Prints the median of the pairs' ratios, after over before.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parents[2]
WORKER = """
import sys, time
import moesim
scenario = moesim.load(sys.argv[1])
for _ in range(2):
    moesim.simulate(scenario)
print("ready", flush=True)
for _ in sys.stdin:
    begin = time.perf_counter()
    moesim.simulate(scenario)
    print(time.perf_counter() - begin, flush=True)
"""


class Tree:
    """A process that runs the scenario with the code of one tree."""

    def __init__(self, folder: Path, scenario: str) -> None:
        """Start it and wait until its imports and first runs are over."""
        environment = {**os.environ, "PYTHONPATH": str(folder / "src"), "MOESIM_CACHE": "off"}
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", WORKER, scenario],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.read() == "ready"

    def read(self) -> str:
        """The next line of the process."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def seconds(self) -> float:
        """Wall time of one prediction."""
        assert self.process.stdin is not None
        self.process.stdin.write("again\n")
        self.process.stdin.flush()
        return float(self.read())


def main() -> None:
    """Run the pairs and print both medians and the ratio."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--scenario", default="deepseek-v3-2048xh800")
    options = parser.parse_args()
    trees = [Tree(folder.resolve(), options.scenario) for folder in (options.before, HERE)]
    pairs = []
    for number in range(options.pairs):
        order = (0, 1) if number % 2 == 0 else (1, 0)
        took = {which: trees[which].seconds() for which in order}
        pairs.append((took[0], took[1]))
    for which, name in enumerate(("before", "after")):
        print(f"{name:7s} {statistics.median(pair[which] for pair in pairs):.4f} s median of {len(pairs)}")
    print(f"ratio   {statistics.median(after / before for before, after in pairs):.3f} median of the pairs")
    for tree in trees:
        tree.process.terminate()


if __name__ == "__main__":
    main()
