"""Plan search measured: error of the closed form against the engine, bounds, and speed.

    python -m lab.benchmarks.planner [--plans 60] [--seed 0] [--scenario deepseek-v3-2048xh800]
    python -m lab.benchmarks.planner --search [--top 10] [--workers 2]

The sample is drawn evenly from the plans that are legal and fit, limited to those that the engine runs in
reasonable time (`MOST_CHUNKS`). Prints signed and absolute errors, and how far the lower bound is below.
CPU seconds are printed beside wall time: on a shared machine only the former compare. With `--search` the
phases of the search are timed one by one in this process, then the whole search with its processes.
"""

from __future__ import annotations

import argparse
import random
import time
from msgspec.structs import replace

import numpy as np

from moesim.hwmodels.calibration import load_profile
from moesim.simulator.common.processes import without_cyclic_collection
from moesim.simulator.layout.job import ResolvedJob
from moesim.simulator.planner.candidate_search import CandidateSearch
from moesim.simulator.planner.candidates import find_candidates
from moesim.simulator.planner.goal import Goal
from moesim.simulator.planner.plan_arrays import Candidates
from moesim.simulator.planner.goal import no_progress
from moesim.simulator.planner.result import scenario_of, simulate_plan
from moesim.simulator.planner.search import plan
from moesim.simulator.planner.space import PlanSpace, with_defaults
from moesim.simulator.planner.candidate_search import VariantSearch
from moesim.simulator.scenario import Scenario, load_scenario

MOST_CHUNKS = 8_000
"""Largest pipeline ranks x micro-batches x stages a rank of the sample: some seconds of the engine."""


def errors(scenario: Scenario, count: int, seed: int) -> None:
    """Closed form and bound against the engine over random plans."""
    shape, cluster = scenario.shape, scenario.machine
    profile = load_profile(scenario.path(scenario.profile))
    space = with_defaults(PlanSpace(), scenario, shape, cluster)
    cpu = time.process_time()
    found = find_candidates(ResolvedJob(scenario, shape, cluster, profile), space)
    bounds_s = time.process_time() - cpu
    study = CandidateSearch(scenario, shape, found)
    chosen = sample(found, count, seed)
    study.estimate(chosen)  # prices and orders, once
    estimates, low = [], []
    for number in chosen:
        simulated = simulate_plan(scenario_of(scenario, found, number)).time_s
        assert simulated is not None
        estimates.append(found.time_s[number] / simulated - 1.0)
        low.append(found.bound[number] / simulated - 1.0)
        label = found.axes(number)[0].label
        print(
            f"  {simulated:9.3f} s  closed form {estimates[-1]:+7.2%}  bound {low[-1]:+7.1%}  {label}",
            flush=True,
        )
    absolute = np.abs(estimates)
    print(f"plans               {space.size:,} considered, {found.legal:,} legal, {len(found.bound):,} fit")
    print(f"bounds and memory   {bounds_s:.1f} CPU s: {space.size / bounds_s:,.0f} plans/s a core")
    print(
        f"closed form         median {np.median(absolute):.2%}, "
        f"95 of 100 within {np.quantile(absolute, 0.95):.2%},"
    )
    print(f"                    worst {absolute.max():.2%}, mean signed {np.mean(estimates):+.2%}")
    print(f"lower bound         above the engine in {sum(b > 0 for b in low)} of {len(low)} plans")
    speed(study, found)


def sample(found: Candidates, count: int, seed: int) -> list[int]:
    """Plans of which the engine's work is bounded, drawn evenly."""
    draw, chosen = random.Random(seed), []
    while len(chosen) < count:
        number = draw.randrange(len(found.bound))
        frame = found.axes(number)[0]
        stages = frame.pattern.n_stages * frame.pattern.copies
        if stages * frame.microbatches <= MOST_CHUNKS and number not in chosen:
            chosen.append(number)
    return chosen


def speed(study: CandidateSearch, found: Candidates) -> None:
    """Closed forms a second for the plans of lowest bound, pricing included."""
    order = [int(n) for n in np.argsort(found.bound, kind="stable")[:20_000] if np.isnan(found.time_s[n])]
    with without_cyclic_collection():
        cpu = time.process_time()
        study.estimate(order)
        taken = time.process_time() - cpu
    again = CandidateSearch(
        study.scenario, study.shape, replace(found, time_s=np.full(len(found.bound), np.nan))
    )
    with without_cyclic_collection():
        cpu = time.process_time()
        again.estimate(order)
        priced = time.process_time() - cpu
    print(
        f"closed-form speed   {len(order) / taken:,.0f} plans/s a core, pricing included, "
        f"{len(order) / priced:,.0f} with prices and schedules known, over {len(order):,} plans"
    )


def search(scenario: Scenario, top: int, workers: int) -> None:
    """Seconds of the phases of a search, and of the whole."""
    with without_cyclic_collection():
        cpu = [time.process_time()]
        study = VariantSearch({}, scenario, PlanSpace(), Goal(top=top), no_progress)
        cpu.append(time.process_time())
        study.explore(None, no_progress)
        cpu.append(time.process_time())
        explored = study.study.estimated
        study.study.front()
        cpu.append(time.process_time())
    bounds, best, front = np.diff(cpu)
    print(
        f"bounds and memory   {bounds:.1f} CPU s: {study.candidates.space.size / bounds:,.0f} plans/s a core"
    )
    forms = f"{explored:,} closed forms: {explored / best:,.0f}/s a core"
    print(f"best {top} families    {best:.1f} CPU s for {forms}")
    print(f"front               {front:.1f} CPU s for {study.study.estimated - explored:,} closed forms")
    wall, cpu_s = time.perf_counter(), time.process_time()
    result = plan(scenario, top=top, workers=workers)
    print(
        f"search              {time.perf_counter() - wall:.1f} s, "
        f"{time.process_time() - cpu_s:.1f} CPU s in this process, {result.simulated:,} plans simulated"
    )
    parts = ", ".join(f"{part} {seconds:.1f} s" for part, seconds in result.seconds.items())
    print(f"  by part           {parts}")
    print(f"  best              {result.best.label}: {result.best.time_s:.3f} s")


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plans", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scenario", default="deepseek-v3-2048xh800")
    parser.add_argument("--search", action="store_true", help="time the whole search instead")
    parser.add_argument("--top", type=int, default=10, help="families that the engine ranks")
    parser.add_argument("--workers", type=int, default=2, help="processes that run the engine")
    options = parser.parse_args()
    scenario = load_scenario(options.scenario)
    if options.search:
        search(scenario, options.top, options.workers)
    else:
        errors(scenario, options.plans, options.seed)


if __name__ == "__main__":
    main()
