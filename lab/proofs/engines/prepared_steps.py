"""Every shipped scenario, and random legal changes of them, run by both engines."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from random_steps import differences

from moesim.hwmodels.errors import MoesimError
from moesim.simulator.engine.records import Execution
from moesim.simulator.engine.registry import engine_of
from moesim.simulator.predict.driver import predict
from moesim.simulator.predict.step import prepare
from moesim.simulator.predict.trace import chrome_trace, shown_places, trace_info
from moesim.simulator.scenario import Scenario, load_scenario, preset_names

MOST_TRACED_SENDS = 100_000
"""Sends of a step up to which its trace of all pipeline ranks is compared; it is then below some 500 MB."""

NETWORKS = ("mpft-ib-400g", "ft3-ib-400g")
SCHEDULES = ("dualpipe", "dualpipev", "1f1b", "zb-h1")
EXPERT_LOADS = (0.0, 0.2, 0.5)


def difference_of_preset(name: str) -> tuple[list[str], bool]:
    """Compare records, the bytes of the JSON result and of the trace between the engines for a scenario.

    Returns what differs, in words, and whether the trace was compared.
    """
    scenario = load_scenario(name)
    ours, reference = (predict(scenario, engine=engine) for engine in ("compiled", "simpy"))
    found = differences(ours.executions, reference.executions)
    if ours.result.model_dump_json(indent=2) != reference.result.model_dump_json(indent=2):
        found.append("JSON of the result")
    traced = len(ours.executions) == 1 and len(ours.executions[0].sends) <= MOST_TRACED_SENDS
    if traced:
        one, other = (trace_bytes(p.executions[0], p.prepared) for p in (ours, reference))
        found += [] if one == other else ["trace"]
    return found, traced


def trace_bytes(execution: Execution, prepared: Any) -> bytes:
    """The trace of all pipeline ranks of a folded run, as JSON."""
    return json.dumps(chrome_trace(shown_places(execution, trace_info(prepared)))).encode()


def random_overrides(seed: int) -> list[str]:
    """A small cluster with random parallelism, schedule, routing, resolution, spread of speed, and faults.

    Not every list is legal; `random_scenarios` leaves out those that are not.
    """
    random = np.random.default_rng([seed, 11])

    def one(values: Sequence[Any]) -> Any:
        return values[int(random.integers(len(values)))]

    nodes, pp, full = one((2, 4, 8)), one((1, 2, 2, 4, 4)), random.random() < 0.7
    gpus, schedule = 8 * nodes, one(SCHEDULES)
    ep = min(gpus // pp, one((4, 8, 16)))
    stages = ["moe*2"] * (2 * pp if schedule == "dualpipev" else pp)
    stages[0], stages[-1] = f"embedding {stages[0]}", f"{stages[-1]} head"
    overrides = [
        f"cluster={{node: hgx-h800, nodes: {nodes}, network: {one(NETWORKS)}, name: {gpus}xh800, "
        "price_per_gpu_hour: $2/h}",
        f"parallel={{tp: 1, pp: {pp}, ep: {ep}, cp: 1, microbatch: 1, zero_stage: 1}}",
        f"stages.blocks=[{', '.join(stages)}]",
        f"batch.sequences={gpus // pp * one((8, 12, 16, 32))}",
        f"schedule={schedule}",
        f"seed={int(random.integers(1000))}",
        f"routing.expert_load_cv={one(EXPERT_LOADS)}",
    ]
    if random.random() < 0.3:
        overrides.append("routing.capacity={factor: 1.1, per: rank}")
    if random.random() < 0.3:
        overrides.append(f"communication.sms={one((4, 12, 24))}")
    if full:
        overrides.append("resolution=full")
        faults = [
            f"{{kind: slow-gpu, gpu: {int(random.integers(gpus))}, speed: {one((0.5, 0.8, 0.97))}}}",
            f"{{kind: jitter, gpu: all, cv: {one((0.02, 0.1))}}}",
            f"{{kind: slow-link, link: 'nic:{int(random.integers(gpus))}', bandwidth: {one((0.3, 0.5))}}}",
            f"{{kind: down, link: 'nic:{int(random.integers(gpus))}'}}",
        ]
        chosen = [fault for fault in faults if random.random() < 0.3]
        if chosen:
            overrides.append(f"faults=[{', '.join(chosen)}]")
    return overrides


def random_scenarios(count: int) -> list[Scenario]:
    """So many random scenarios that can be prepared: changes of the home case."""
    legal: list[Scenario] = []
    for seed in range(40 * count):
        try:
            scenario = load_scenario("deepseek-v3-2048xh800", random_overrides(seed))
            prepare(scenario)
        except MoesimError:
            continue
        legal.append(scenario)
        if len(legal) == count:
            break
    return legal


def prove_presets(say: Callable[[str], None]) -> tuple[dict[str, int], list[str]]:
    """Compare all shipped scenarios; return rows of the table and what differs, in words."""
    different, traces = [], 0
    for name in preset_names():
        found, traced = difference_of_preset(name)
        traces += traced
        different += [f"preset {name}: {', '.join(found)}"] if found else []
        say(f"{name}: {found or 'equal'}")
    rows = {
        "Shipped scenarios, with the bytes of their JSON": len(preset_names()),
        "of them with the bytes of their trace": traces,
        "Shipped scenarios with any difference": len(different),
    }
    return rows, different


def prove_prepared(count: int) -> tuple[dict[str, int], list[str]]:
    """Compare every record of random prepared scenarios; return rows of the table and what differs."""
    different, tasks, full, faulty = [], 0, 0, 0
    scenarios = random_scenarios(count)
    for number, scenario in enumerate(scenarios):
        programs = prepare(scenario).programs
        ours, reference = (engine_of(engine).execute(programs) for engine in ("compiled", "simpy"))
        if found := differences(ours, reference):
            different.append(f"prepared scenario {number}: {', '.join(found)}")
        tasks += sum(execution.events for execution in reference)
        full += scenario.resolution == "full"
        faulty += bool(scenario.faults)
    rows = {
        "Random prepared scenarios": len(scenarios),
        "of them in full resolution": full,
        "of them with faults": faulty,
        "Tasks of prepared scenarios": tasks,
        "Prepared scenarios with any difference": len(different),
    }
    return rows, different
