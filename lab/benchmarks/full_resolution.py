"""Cost of full resolution against the number of GPUs: the home case with more or fewer data-parallel ranks.

    python -m lab.benchmarks.full_resolution [--most 16384]

Every size runs in a process of its own; CPU seconds are those of that process alone, so that they hold
on a busy machine too.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time

from moesim.simulator.predict.driver import simulate
from moesim.simulator.scenario import load_scenario

HOME = "deepseek-v3-2048xh800"
SIZES = (256, 512, 1024, 2048, 4096, 8192, 16384)
PP = 16
MICROBATCHES = 120


def one(gpus: int) -> dict[str, float]:
    """One size: CPU and wall seconds, peak memory, step time."""
    ep = min(64, gpus // PP)
    scenario = load_scenario(
        HOME,
        [
            "resolution=full",
            f"cluster={{node: hgx-h800, nodes: {gpus // 8}, network: mpft-ib-400g, name: {gpus}xh800}}",
            f"parallel.ep={ep}",
            f"batch.sequences={MICROBATCHES * gpus // PP}",
        ],
    )
    wall, cpu = time.perf_counter(), time.process_time()
    result = simulate(scenario)
    assert result.full is not None
    return {
        "gpus": gpus,
        "groups": result.full.groups,
        "cpu_s": time.process_time() - cpu,
        "wall_s": time.perf_counter() - wall,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "step_s": result.step.time_s,
    }


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--most", type=int, default=SIZES[-1])
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(options.one)))
        return
    print("  GPUs  groups   CPU s  wall s  CPU ms/GPU  peak MB  step s")
    for gpus in (size for size in SIZES if size <= options.most):
        child = [sys.executable, __file__, "--one", str(gpus)]
        row = json.loads(subprocess.run(child, check=True, capture_output=True, text=True).stdout)
        each = 1e3 * row["cpu_s"] / gpus
        print(
            f"{gpus:6d}  {row['groups']:6.0f}  {row['cpu_s']:6.1f}  {row['wall_s']:6.1f}  {each:10.2f}  "
            f"{row['peak_mb']:7.0f}  {row['step_s']:6.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
