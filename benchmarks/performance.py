"""The table of docs/performance.md, as Markdown: the speed of the simulator, paired against SimPy.

    python benchmarks/performance.py [--repeats 5] [--most 65536] [--only home,shell] [--quick]

Every row runs in processes of its own, the compiled engine and SimPy in turn in one run, so that the ratio
holds on a busy machine too; absolute seconds hold only on a quiet one, so every row states the load. SimPy is
left out where it takes minutes. `--quick` takes fewer draws, plans and points, to try the script.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

HOME = "deepseek-v3-2048xh800"
COMPILED, SIMPY = "compiled", "simpy"
Row = dict[str, float]
"""Figures of a part: wall seconds `s`, CPU seconds `cpu_s` and, where it counts, peak MB `mb`."""

WORKERS = 2
MOST_ON_PLANES = 16_384
"""GPUs that the home case's two-layer planes join; more are on a fat-tree of three layers."""


def timed(call: Callable[[], object]) -> Row:
    """Wall and CPU seconds of one call."""
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return {"s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}


def medians(rows: list[Row]) -> Row:
    """Median of every figure."""
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def peak_mb(who: int = resource.RUSAGE_SELF) -> float:
    """Largest resident memory of this process, or of its children, in MB."""
    return resource.getrusage(who).ru_maxrss / 1024.0


def home(options: argparse.Namespace) -> Row:
    """The home case in a warm process, another number of SMs every time."""
    from moesim.simulator.predict.driver import simulate
    from moesim.simulator.scenario import load_scenario

    scenario, sms = load_scenario(HOME), iter(range(8, 100))
    for _ in range(2):
        simulate(scenario.replace(communication={"sms": next(sms)}))
    changed = [scenario.replace(communication={"sms": next(sms)}) for _ in range(options.repeats)]
    return medians([timed(lambda one=one: simulate(one)) for one in changed])  # type: ignore[misc]


def engine(options: argparse.Namespace) -> Row:
    """The engine alone on the prepared home case."""
    from moesim.simulator.predict.step import execute, prepare
    from moesim.simulator.scenario import load_scenario

    prepared = prepare(load_scenario(HOME))
    execute(prepared)
    return medians([timed(lambda: execute(prepared)) for _ in range(options.repeats)])


def shell(options: argparse.Namespace) -> Row:
    """From the shell to the answer, without a kept answer."""
    command = [sys.executable, "-P", "-c", "from moesim.cli import main; main()", "simulate", HOME, "--json"]
    fresh = {**os.environ, "MOESIM_CACHE": "off"}
    fresh.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has its bytecode
    if fresh["MOESIM_ENGINE"] == COMPILED:
        fresh["MOESIM_ENGINE"] = "auto"  # what a user gets

    def call() -> None:
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=fresh)

    call()
    rows = []
    for _ in range(options.repeats):
        before = os.times()
        row, after = timed(call), os.times()
        cpu = after.children_user + after.children_system - before.children_user - before.children_system
        rows.append({**row, "cpu_s": cpu, "mb": peak_mb(resource.RUSAGE_CHILDREN)})
    return medians(rows)


def full(options: argparse.Namespace, gpus: int = 2048) -> Row:
    """Every GPU by itself; up to 2,048 GPUs warm, after one run that is not counted."""
    from moesim.simulator.predict.driver import simulate
    from moesim.simulator.scenario import load_scenario

    network = "mpft-ib-400g" if gpus <= MOST_ON_PLANES else "ft3-ib-400g"
    scenario = load_scenario(
        HOME,
        [
            "resolution=full",
            f"cluster={{node: hgx-h800, nodes: {gpus // 8}, network: {network}, name: {gpus}xh800}}",
            f"batch.sequences={120 * gpus // 16}",
        ],
    )
    warm = gpus <= 2048
    if warm:
        simulate(scenario)
    rows = [timed(lambda: simulate(scenario)) for _ in range(min(3, options.repeats) if warm else 1)]
    return {**medians(rows), "mb": peak_mb()}


def search(options: argparse.Namespace, top: int) -> Row:
    """The plan search over the whole default space."""
    from moesim.simulator.planner.search import plan

    return timed(lambda: plan(HOME, top=20 if options.quick else top, workers=WORKERS))


def interval(options: argparse.Namespace) -> Row:
    """Bands by engine draws, with the prediction and the first-order bands."""
    from moesim.simulator.scenario import load_scenario
    from moesim.simulator.studies.uncertainty import with_uncertainty

    draws = 20 if options.quick else 200
    return timed(lambda: with_uncertainty(load_scenario(HOME), engine_draws=draws))


def sweep(options: argparse.Namespace) -> Row:
    """A sweep over communication SMs, NIC bandwidth and seeds into a store."""
    from moesim.simulator.scenario import load_scenario
    from moesim.simulator.studies.sweep import sweep as run

    seeds = "0..1" if options.quick else "0..9"
    space = {
        "communication.sms": "8..26:2",
        "routing.expert_load_cv": [n / 20 for n in range(10)],
        "seed": seeds,
    }
    if options.quick:
        space["routing.expert_load_cv"] = [0.1, 0.2]
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "sweep.sqlite"
        return timed(lambda: run(load_scenario(HOME), space, workers=WORKERS, store=store))


PARTS: dict[str, tuple[str, Callable[[argparse.Namespace], Row], bool]] = {
    "home": ("home case, warm, in process, other SMs", home, True),
    "engine": ("its engine alone", engine, True),
    "shell": ("from the shell to the answer, cache off", shell, True),
    "2048": ("all 2,048 GPUs, warm, the same scenario again", full, True),
    "16384": ("16,384 GPUs", lambda options: full(options, 16_384), False),
    "65536": ("65,536 GPUs", lambda options: full(options, 65_536), False),
    "plan": ("plan search, whole space, ten families ranked by the engine", lambda o: search(o, 10), True),
    "plan1000": ("the same, 1,000 families", lambda options: search(options, 1000), False),
    "interval": ("interval by 200 engine draws", interval, False),
    "sweep": (f"sweep of 1,000 points, {WORKERS} workers", sweep, False),
}
"""Name: (title, function, whether SimPy runs it too)."""


def measured(name: str, engine_name: str, arguments: list[str]) -> Row:
    """The figures of a part from a process of its own."""
    command = [sys.executable, __file__, *arguments, "--part", name]
    env = {**os.environ, "MOESIM_ENGINE": engine_name, "MOESIM_CACHE": "off"}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=env)
    row: Row = json.loads(done.stdout.splitlines()[-1])
    return row


def machine() -> str:
    """One line on the processor, the versions and the load."""
    named = [line for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    cpu = named[0].split(":")[1].strip() if named else platform.processor() or platform.machine()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    used = ", ".join(f"{name} {_version(name)}" for name in ("NumPy", "Numba", "SimPy"))
    return f"{cores} cores of {cpu}, Python {platform.python_version()}, {used}, {time.strftime('%Y-%m-%d')}"


def _lines(path: str) -> Iterator[str]:
    place = Path(path)
    return iter(place.read_text().splitlines() if place.exists() else [])


def _version(name: str) -> str:
    try:
        return version(name.lower())
    except PackageNotFoundError:
        return "not installed"


def cells(row: Row) -> str:
    """The figures of a part for the table."""
    seconds = f"{1e3 * row['s']:,.0f} ms" if row["s"] < 1.0 else f"{row['s']:,.1f} s"
    return seconds + (f", {row['mb']:,.0f} MB" if "mb" in row else "")


def table(options: argparse.Namespace, arguments: list[str]) -> None:
    """Print the rows as they are measured."""
    left_out = {"65536"} if options.most < 65_536 else set()
    names = options.only.split(",") if options.only else [name for name in PARTS if name not in left_out]
    print(f"{machine()}\n")
    print("| what | compiled | SimPy | SimPy / compiled, CPU time | load |")
    print("|---|---|---|---|---|", flush=True)
    for name in names:
        title, _, paired = PARTS[name]
        fast = measured(name, COMPILED, arguments)
        slow = measured(name, SIMPY, arguments) if paired else None
        ratio = "" if slow is None else f"{slow['cpu_s'] / fast['cpu_s']:.1f}"
        other = "" if slow is None else cells(slow)
        print(f"| {title} | {cells(fast)} | {other} | {ratio} | {os.getloadavg()[0]:.1f} |", flush=True)


def main() -> None:
    """Measure one part as a child, or print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--most", type=int, default=16_384, help="65536 adds the row of 65,536 GPUs")
    parser.add_argument("--only", help=f"rows, of {', '.join(PARTS)}")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    unknown = set((options.only or "").split(",")) - {*PARTS, ""}
    if unknown:
        parser.error(f"--only: no row is called {', '.join(sorted(unknown))}; rows: {', '.join(PARTS)}")
    if options.part:
        print(json.dumps(PARTS[options.part][1](options)))
        return
    arguments = ["--repeats", str(options.repeats), *(["--quick"] if options.quick else [])]
    table(options, arguments)


if __name__ == "__main__":
    main()
