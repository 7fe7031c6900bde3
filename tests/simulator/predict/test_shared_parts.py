"""Parts that scenarios share: the caches change no result, and their keys name all that the parts read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from pydantic import BaseModel

from moesim.hwmodels.provenance import SourcedUsdPerHour
from moesim.simulator.common.bounded_cache import clear_caches
from moesim.simulator.cost.cost_table import cost_table
from moesim.simulator.cost.pricing import Pricer
from moesim.simulator.layout.job import resolve
from moesim.simulator.predict.driver import simulate
from moesim.simulator.predict.step import prepare
from moesim.simulator.scenario import Scenario, load_scenario

SMALL = Path(__file__).parents[2] / "golden" / "scenario-small.yaml"
CHANGES = (
    ("communication.sms=12", "cluster.node.nic_bandwidth_effective=30 GB/s"),
    ("batch.sequences=160", "routing.expert_load_cv.value=0.3"),
)


def test_results_do_not_depend_on_the_scenarios_before(small: Scenario) -> None:
    short = small.overridden("batch.sequences=128")
    scenarios = [short, *(short.overridden(*change) for change in CHANGES)]
    fresh = []
    for scenario in scenarios:
        clear_caches()
        fresh.append(simulate(scenario).model_dump_json())
    assert len(set(fresh)) == len(fresh)
    clear_caches()
    for number in (2, 1, 0, 2):
        assert simulate(scenarios[number]).model_dump_json() == fresh[number]


def test_a_key_that_the_step_does_not_read_keeps_the_program(small: Scenario) -> None:
    program = prepare(small).program
    assert prepare(small.overridden("run.tokens=3e12", "name=other")).program is program
    price = {"value": 2.0, "kind": "assumed", "source": "a test", "date": "2026-11"}
    dearer = small.machine.model_copy(update={"price_per_gpu_hour": SourcedUsdPerHour.model_validate(price)})
    other = small.model_copy(update={"cluster": dearer})
    assert other.machine.price_per_gpu_hour != small.machine.price_per_gpu_hour
    assert prepare(other).program is program
    changed = prepare(small.overridden("communication.sms=12")).program
    assert changed is not program and changed.costs is not program.costs


def test_arrays_of_a_program_are_shared_and_read_only(small: Scenario) -> None:
    first, second = (prepare(small.overridden(f"communication.sms={n}")).program for n in (16, 12))
    alone = [
        {id(task.rows_ns) for rank in p.ranks for s in rank if s.code.kind == "F" for task in s.code.tasks}
        for p in (first, second)
    ]
    assert alone[0] == alone[1]
    for rank in first.ranks:
        for task in rank[0].code.tasks:
            arrays = [task.rows_ns] if task.transfer is None else [task.rows_ns, task.transfer.member_ns]
            for array in arrays:
                assert array.flags.c_contiguous and array.dtype == np.int64
                with pytest.raises(ValueError, match="read-only"):
                    array[0, 0] = 1


READ_BY_PRICES = {
    "": {"parallel", "batch", "precision", "recompute", "software", "routing", "communication", "schedule"}
    | {"variation"},
    "batch": {"sequence_length", "sequences"},
    "routing": {"gate", "groups_per_token", "eplb"},
    "variation": {"power_clock", "jitter_cv"},
    "cluster": {"node", "network", "nodes"},
}
"""Fields of a scenario, its sections and its cluster that `cost/pricing.py` makes keys from."""


def _recorded(model: BaseModel, reads: set[str]) -> Any:
    """A copy of a model that notes the fields that are read from it."""
    kind: Any = type(model)

    class Recorder(kind):  # type: ignore[misc]
        def __getattribute__(self, name: str) -> Any:
            if name in kind.model_fields:
                reads.add(name)
            return super().__getattribute__(name)

    copy = model.model_copy()
    object.__setattr__(copy, "__class__", Recorder)
    return copy


@pytest.mark.parametrize(
    "change",
    [
        (),
        ("parallel.tp=2", "parallel.ep=8", "parallel.sequence_parallel=true", "recompute=full"),
        ("parallel.zero_stage=3", "schedule=1f1b", "communication.kernels=nccl"),
        ("software.host=xeon-8480c",),
    ],
)
def test_prices_read_only_what_their_key_names(small: Scenario, change: tuple[str, ...]) -> None:
    scenario = small.overridden(*change)
    prepared = prepare(scenario)
    reads: dict[str, set[str]] = {section: set() for section in READ_BY_PRICES}
    copy = _recorded(scenario, reads[""])
    for section in ("batch", "routing", "variation"):
        copy.__dict__[section] = _recorded(getattr(scenario, section), reads[section])
    plain = resolve(scenario)
    job = replace(plain, scenario=copy, cluster=_recorded(plain.cluster, reads["cluster"]))
    reads[""].clear()
    cost_table(Pricer(job, _before=(Pricer(job), frozenset())), prepared.schedule, prepared.stages)
    for section, names in reads.items():
        assert names <= READ_BY_PRICES[section], section
    assert {"parallel", "batch", "precision", "software"} <= reads[""]


OVERRIDES = {
    "communication.sms": ("communication.sms=8", "communication.sms=24"),
    "load": ("routing.expert_load_cv=30 %", "routing.expert_load_cv=0 %"),
    "seed": ("seed=3", "seed=4"),
    "jitter": ("variation.jitter_cv=3 %", "variation.jitter_cv=0 %"),
    "batch": ("batch.sequences=64", "batch.sequences=96"),
    "capacity": ("routing.capacity={factor: 0.5, per: rank}",),
    "schedule": ("schedule=1f1b", "schedule=zb-h1"),
    "profile": ("profile=generic-roofline",),
    "recompute": ("recompute=full", "recompute=none"),
}
ALONE = """
import os, sys
from moesim.simulator.predict.driver import simulate
from moesim.simulator.scenario import load_scenario

for line in sys.stdin:  # every prediction in a process that has predicted nothing before
    child = os.fork()
    if child == 0:
        scenario = load_scenario(sys.argv[1], line.split("\\t")[1:-1])
        print(simulate(scenario).model_dump_json(), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.long
@settings(max_examples=4, deadline=None)
@given(st.lists(st.sets(st.sampled_from(sum(OVERRIDES.values(), ())), max_size=4), min_size=4, max_size=6))
def test_alternating_scenarios_are_those_of_fresh_processes(chosen: list[set[str]]) -> None:
    of_key = {text: key for key, texts in OVERRIDES.items() for text in texts}
    overrides = [sorted({of_key[text]: text for text in sorted(texts)}.values()) for texts in chosen]
    lines = "".join("\t".join(["", *texts, ""]) + "\n" for texts in overrides)
    command = [sys.executable, "-P", "-c", ALONE, str(SMALL)]
    fresh = subprocess.run(command, input=lines, stdout=subprocess.PIPE, text=True, check=True)
    expected = fresh.stdout.splitlines()
    for number in (*range(len(overrides)), *reversed(range(len(overrides)))):
        assert simulate(load_scenario(SMALL, overrides[number])).model_dump_json() == expected[number]
