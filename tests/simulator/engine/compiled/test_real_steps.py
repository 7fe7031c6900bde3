"""The compiled engine against SimPy on prepared scenarios: every record, and the bytes that users get."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from random_steps import differences

from moesim.simulator.engine.compiled.engine import end_at, repeated
from moesim.simulator.engine.compiled.lower import StepRates
from moesim.simulator.engine.registry import VARIABLE, engine_of
from moesim.simulator.predict.step import prepare
from moesim.simulator.scenario import Scenario

FULL = ("resolution=full", "cluster.network=ft3-ib-400g")

STEPS: dict[str, tuple[str, ...]] = {
    "one F1B": ("schedule=1f1b",),
    "interleaved": ("schedule=zb-h1", "seed=3"),
    "few SMs": ("communication.sms=4",),
    "uneven experts": ("routing.expert_load_cv=0.4", "seed=5"),
    "dropped rows": ("routing.capacity={factor: 1.1, per: rank}", "routing.expert_load_cv=0.4"),
    "NCCL": ("communication.kernels=nccl", "schedule=1f1b"),
    "narrow NIC": ("cluster.node.nic_bandwidth=100 Gb/s",),
    "every GPU": FULL,
    "every GPU, dropped rows": (
        *FULL,
        "routing.capacity={factor: 1.1, per: rank}",
        "routing.expert_load_cv=0.3",
    ),
    "slow GPU and NIC": (
        *FULL,
        "faults=[{kind: slow-gpu, gpu: 3, speed: 0.8}, {kind: slow-link, link: 'nic:5', bandwidth: 0.5}]",
    ),
    "dead plane": ("resolution=full", "faults=[{kind: down, link: 'nic:5'}]"),
    "jitter": (*FULL, "faults=[{kind: jitter, gpu: all, cv: 0.1}]"),
}


@pytest.mark.usefixtures("compiled_code")
@pytest.mark.parametrize("name", STEPS)
def test_every_record_of_a_prepared_step_is_equal(small: Scenario, name: str) -> None:
    programs = prepare(small.overridden(*STEPS[name])).programs
    ours, reference = (engine_of(engine).execute(programs) for engine in ("compiled", "simpy"))
    assert not differences(ours, reference)


REPEATED: dict[str, tuple[tuple[str, ...], bool]] = {
    "SMs": (("communication.sms=8",), True),
    "durations decide shares": (("communication.overlap=megatron", "communication.sms=8"), True),
    "NIC": (("cluster.node.nic_bandwidth=100 Gb/s",), True),
    "load": (("routing.expert_load_cv=0.4",), True),
    "noise": (("variation.jitter_cv=0.05", "variation.clock_cv=0.02"), True),
    "another seed": (("seed=4",), False),
    "no noise": (("variation.jitter_cv=0",), False),
    "dropped rows": (("routing.capacity={factor: 1.1, per: rank}", "routing.expert_load_cv=0.4"), False),
}
"""What changes after a step, and whether the tables of the step before serve."""


@pytest.mark.usefixtures("compiled_code")
@pytest.mark.parametrize("name", REPEATED)
def test_a_step_at_other_rates_runs_in_the_tables_of_the_one_before(small: Scenario, name: str) -> None:
    changes, serves = REPEATED[name]
    base = small.overridden(*changes[:1]) if "overlap" in changes[0] else small
    step = repeated(prepare(base).program)
    other = prepare(small.overridden(*changes)).program
    assert step.possible
    found = step.at(StepRates(other.costs, other.variation, other.link_map)) is not None
    reference = engine_of("simpy").execute([other])
    if found:
        assert end_at(step, StepRates(other.costs, other.variation, other.link_map)) == reference[0].end_ns
    for scenario in (base, base, small.overridden(*changes)):  # the third takes the tables of the second
        ours = engine_of("compiled").execute(prepare(scenario).programs)
    assert found == serves and not differences(ours, reference)


@pytest.mark.usefixtures("compiled_code")
def test_every_record_of_a_fleet_is_equal(mixed: Scenario) -> None:
    programs = prepare(mixed).programs
    reference = engine_of("simpy").execute(programs)
    for _ in range(3):  # the tables of one pool's prices never serve for all of them
        assert not differences(engine_of("compiled").execute(programs), reference)
    assert not repeated(programs[0]).possible


@pytest.mark.usefixtures("compiled_code")
def test_the_bytes_of_results_and_traces_are_equal(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MOESIM_CACHE", "off")
    answers, traces = [], []
    for engine in ("simpy", "compiled"):
        monkeypatch.setenv(VARIABLE, engine)
        trace = tmp_path / f"{engine}.json"
        done = run("simulate", "deepseek-v3-trace-pair", "--json", "--trace", str(trace))
        assert done.code == 0
        answers.append(done.out)
        traces.append(trace.read_bytes())
    assert answers[0] == answers[1] and traces[0] == traces[1]
