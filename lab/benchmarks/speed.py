"""Speed of the simulator itself: the home case inside a running process, its stages, and its scaling.

    python -m lab.benchmarks.speed [--profile] [--repeats 7]

Prints medians; machines differ, so compare runs of one session only.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

from moesim.simulator.predict.step import prepare
from moesim.simulator.predict.driver import simulate
from moesim.simulator.predict.step import execute
from moesim.simulator.predict.summarise import summarise
from moesim.simulator.scenario import Scenario, load_scenario

HOME = "deepseek-v3-2048xh800"


def median_s(call: Callable[[], object], repeats: int) -> float:
    """Median wall time of `call`, after one warm-up."""
    call()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def home_case(scenario: Scenario, repeats: int) -> None:
    """Whole prediction and its three stages."""
    prepared = prepare(scenario)
    step = execute(prepared)
    print(f"simulate            {median_s(lambda: simulate(scenario), repeats):7.3f} s median of {repeats}")
    print(f"  prepare           {median_s(lambda: prepare(scenario), repeats):7.3f} s")
    print(f"  execute           {median_s(lambda: execute(prepared), repeats):7.3f} s")
    print(f"  summarise         {median_s(lambda: summarise(step), repeats):7.3f} s")
    print(f"tasks               {step.executions[0].events:7d}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"peak memory         {peak:7.0f} MB of this process, which keeps several executions")


def from_shell(repeats: int) -> None:
    """Shell to answer, and the peak memory of that process."""
    command = [sys.executable, "-P", "-c", "from moesim.cli import main; main()", "simulate", HOME, "--json"]
    fresh = {**os.environ, "MOESIM_CACHE": "off"}
    seconds = median_s(
        lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=fresh), repeats
    )
    print(f"shell to answer     {seconds:7.3f} s median of {repeats}")
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    print(f"  peak memory       {peak:7.0f} MB")


def scaling(repeats: int) -> None:
    """Cost against micro-batches: tasks and seconds should grow in proportion."""
    for sequences in (7680, 15360, 30720):
        scenario = load_scenario(HOME, [f"batch.sequences={sequences}"])
        execution = execute(prepare(scenario)).executions[0]
        seconds = median_s(lambda s=scenario: simulate(s), repeats)  # type: ignore[misc]
        each = f"{seconds / execution.events * 1e6:.1f} us for each of {execution.events} tasks"
        print(f"{sequences // 128:4d} micro-batches   {seconds:7.3f} s   {each}")


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--profile", action="store_true", help="print where one prediction spends its time")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    scenario = load_scenario(HOME)
    home_case(scenario, options.repeats)
    from_shell(options.repeats)
    scaling(max(1, options.repeats // 2))
    if options.profile:
        profiler = cProfile.Profile()
        profiler.runcall(simulate, scenario)
        pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
