"""Counterfactual runs: each equals the scenario without its cause; all of them together leave compute."""

from __future__ import annotations

from collections import defaultdict
from math import fsum
from typing import Any

import numpy as np
import pytest

import moesim
from moesim.simulator.cost.table import CostTable
from moesim.simulator.engine.compiled.loader import is_ready
from moesim.simulator.engine.link_map import FoldedLinkMap
from moesim.simulator.model.operator import BlockKind
from moesim.simulator.predict.step import run_step
from moesim.simulator.scenario import Scenario
from moesim.simulator.schedules import Overlap, Step, longest_path, makespan
from moesim.simulator.schedules.template import FORWARD_CHAIN, INPUT_CHAIN, WEIGHT_OF
from moesim.simulator.studies.explain import Counterfactuals, counterfactuals, explain

KEYS: dict[str, dict[str, Any]] = {
    "differences between GPUs": {"variation.clock_cv": 0},
    "run-to-run jitter": {"variation.jitter_cv": 0},
    "unequal load of experts": {"routing.expert_load_cv": 0},
    "recompute": {"recompute": "none"},
}
"""Keys of a scenario that switch a cause off."""
EVERYWHERE = {
    "payloads of dispatch and combine",
    "launch and notify of dispatch and combine",
    "full links",
    "pipeline sends",
    "gradient reduction",
    "gradient norm",
    "optimizer",
    "parameter gather",
}
"""Other causes that a pipeline with expert parallelism over nodes always has."""
IN_PAIRS = "compute beside communication SMs"
HOST = {"software.host": "xeon-8480c"}


def runs_of(scenario: Scenario, engine: str | None = None) -> Counterfactuals:
    step = run_step(scenario, engine=engine)
    return counterfactuals(step.prepared, step.time_s)


def step_s(scenario: Scenario, **keys: Any) -> float:
    return run_step(scenario.replace(**keys)).time_s


@pytest.fixture(scope="module")
def runs(small: Scenario) -> Counterfactuals:
    """Of the small job."""
    return runs_of(small)


@pytest.fixture(scope="module")
def even(small: Scenario) -> Scenario:
    """The small job without skew and recompute, in a schedule without overlapped pairs."""
    keys = {key: value for change in KEYS.values() for key, value in change.items()}
    return small.replace(schedule="1f1b", **keys)


def test_every_cause_of_a_step_makes_it_slower(runs: Counterfactuals) -> None:
    assert {row.cause for row in runs.causes} == {*KEYS, *EVERYWHERE, IN_PAIRS}
    assert all(row.cost_s > 0.0 for row in runs.causes)
    assert all(row.without_s + row.cost_s == pytest.approx(runs.step_s) for row in runs.causes)
    assert runs.together.cost_s > max(row.cost_s for row in runs.causes)
    assert [row.cost_s for row in runs.causes] == sorted((r.cost_s for r in runs.causes), reverse=True)


def test_absent_causes_are_not_listed(even: Scenario) -> None:
    assert {row.cause for row in runs_of(even).causes} == EVERYWHERE
    one = even.replace(stages={"blocks": ["moe*8"]}, parallel={"pp": 1}, schedule="gpipe")
    assert {row.cause for row in runs_of(one).causes} == EVERYWHERE - {"pipeline sends"}


def test_a_run_equals_the_scenario_without_its_cause(small: Scenario, runs: Counterfactuals) -> None:
    """The programs are changed, not the scenario; both must lead to the same nanosecond."""
    without = {row.cause: row.without_s for row in runs.causes}
    for cause, keys in KEYS.items():
        assert without[cause] == step_s(small, **keys), cause


def test_launch_stalls_of_the_host(small: Scenario, runs: Counterfactuals) -> None:
    slowed = runs_of(small.replace(**HOST))
    without = {row.cause: row.without_s for row in slowed.causes}
    assert without["launch stalls of the host"] == step_s(small) < slowed.step_s
    assert slowed.together.without_s == runs.together.without_s


def test_every_gpu_and_its_faults(small: Scenario, runs: Counterfactuals) -> None:
    """In full resolution; the slow and the jittery GPU remain as they are."""
    faults = [{"kind": "slow-gpu", "gpu": 3, "speed": 0.8}, {"kind": "jitter", "gpu": 5, "cv": 0.05}]
    faulty = small.replace(resolution="full", faults=faults)
    of_faulty = runs_of(faulty)
    without = {row.cause: row.without_s for row in of_faulty.causes}
    for cause in ("differences between GPUs", "run-to-run jitter"):
        assert without[cause] == step_s(faulty, **KEYS[cause]), cause
    assert of_faulty.together.without_s > runs.together.without_s


def test_a_fleet(mixed: Scenario) -> None:
    without = {row.cause: row.without_s for row in runs_of(mixed).causes}
    assert {"pipeline sends", "optimizer", "exposed collectives inside compute"} <= set(without)
    for cause in ("differences between GPUs", "run-to-run jitter", "unequal load of experts"):
        assert without[cause] == step_s(mixed, **KEYS[cause]), cause


def test_sharding_collectives() -> None:
    sharded = moesim.load(
        "qwen3-235b-a22b-256xh100", "cluster.nodes=2", "batch.sequences=16", "schedule=gpipe",
        "parallel={pp: 1, tp: 1, ep: 8, zero_stage: 3, microbatch: 1}",
    )  # fmt: skip
    first = runs_of(sharded).causes[0]
    assert first.cause == "sharding collectives of ZeRO-3" and first.share > 0.3


SERIAL = {
    "F": set(FORWARD_CHAIN),
    "I": set(INPUT_CHAIN),
    "W": set(WEIGHT_OF),
    "B": {*INPUT_CHAIN, *WEIGHT_OF},
}


def phase_ns(costs: CostTable) -> dict[tuple[BlockKind, str], int]:
    """Nanoseconds of each kind of action on a block of a kind, alone, without waits."""
    total: defaultdict[tuple[BlockKind, str], int] = defaultdict(int)
    for (kind, phase, mode), price in costs.compute.items():
        if mode == "alone":
            for action, phases in SERIAL.items():
                seconds = price.fixed_s + price.row_s - price.host_s - price.exposed_s
                total[kind, action] += round(seconds * 1e9) if phase in phases else 0
    return total


def test_without_all_causes_the_longest_path_through_compute_is_left(even: Scenario) -> None:
    """The schedule's own longest path over the prices of compute, without the engine."""
    step = run_step(even)
    program = step.prepared.program
    of_block = phase_ns(program.costs)

    def duration(rank: int, action: Step) -> float:
        assert not isinstance(action, Overlap)
        return sum(of_block[kind, action.kind] for kind in program.blocks[action.stage])

    longest_ns = makespan(longest_path(program.schedule, duration))
    skewed = even.replace(**{"variation.clock_cv": "2 %", "variation.jitter_cv": "2 %"}, **HOST)
    for scenario in (even, skewed):
        assert round(runs_of(scenario).together.without_s * 1e9) == longest_ns
    assert step.time_s * 1e9 > longest_ns


def test_both_engines_agree(small: Scenario) -> None:
    if not is_ready():
        pytest.skip("the cache of compiled code is not ready; compiling takes half a minute")
    assert runs_of(small, "compiled") == runs_of(small, "simpy")


def test_an_explanation_of_a_scenario_has_the_runs_and_says_that_they_do_not_add_up(even: Scenario) -> None:
    result, runs = moesim.simulate(even), runs_of(even)
    with_runs, bare = moesim.explain(even), moesim.explain(even, counterfactuals=False)
    assert with_runs.counterfactuals == runs
    assert bare == moesim.explain(result) == explain(result)
    assert "counterfactuals" not in bare.to_dict()
    assert with_runs.to_dict()["counterfactuals"]["together"]["without_s"] == runs.together.without_s
    added = fsum(row.cost_s for row in runs.causes)
    assert (
        f"sum to {added:.3f} s, switched off together they save {runs.together.cost_s:.3f} s" in runs.sentence
    )
    assert runs.sentence in str(with_runs) and "pipeline sends" in str(with_runs)
    assert runs.rows()[-1] == runs.together.model_dump()


def test_links_without_limits_keep_dead_ones_dead() -> None:
    links = FoldedLinkMap(1, 0.0, 5e9, sends_cross_nodes=True).never_full()
    assert links.capacity_bytes_per_ns.tolist() == [0.0, 0.0, np.inf, np.inf]
