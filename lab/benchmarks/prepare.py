"""CPU time of preparing the home case: the first time in a process, again, and after moving one slider.

    python -m lab.benchmarks.prepare [--full]

Prints median milliseconds of the process's CPU. It uses what older trees have too: to compare, set PYTHONPATH
to the src of each tree and run the same file in turn.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

from moesim.simulator.predict.step import prepare
from moesim.simulator.scenario import Scenario, load_scenario

HOME = "deepseek-v3-2048xh800"
SLIDERS: dict[str, tuple[str, ...]] = {
    "run.tokens": ("2e12", "3e12", "4e12", "5e12"),
    "communication.sms": ("16", "12", "24", "8", "28", "14", "17", "10", "26"),
    "cluster.node.nic_bandwidth_effective": ("39 GB/s", "37 GB/s", "35 GB/s", "41 GB/s", "33 GB/s"),
    "routing.expert_load_cv.value": ("0.1", "0.2", "0.3", "0.05", "0.25"),
    "batch.sequences": ("14336", "12288", "10240", "8192"),
    "seed": ("1", "2", "3"),
}
"""Values that no earlier scenario of the process had."""


def milliseconds(scenario: Scenario) -> float:
    """CPU milliseconds of one `prepare`."""
    begin = time.process_time()
    prepare(scenario)
    return 1e3 * (time.process_time() - begin)


def median(scenarios: Sequence[Scenario]) -> float:
    """Median CPU milliseconds of preparing scenarios one after the other."""
    return statistics.median([milliseconds(scenario) for scenario in scenarios])


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--full", action="store_true", help="every GPU (resolution: full)")
    options = parser.parse_args()
    home = load_scenario(HOME, ["resolution=full"] if options.full else [])
    print(f"{'CPU ms':>8}  scenario")
    print(f"{milliseconds(home):8.1f}  the first of the process, files included")
    print(f"{median([home] * 5):8.1f}  the same again")
    for key, values in SLIDERS.items():
        print(f"{median([home.overridden(f'{key}={value}') for value in values]):8.1f}  {key}", flush=True)
        prepare(home)


if __name__ == "__main__":
    main()
