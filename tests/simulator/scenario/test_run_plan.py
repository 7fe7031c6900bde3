from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.validation import validate_model
from moesim.simulator.scenario import load_scenario
from moesim.simulator.scenario.run_plan import RunPlan, load_run_plan, run_plan_names

HOME = "deepseek-v3-2048xh800"
SAVE = {"interval": "30 min", "storage": "llama3-tectonic"}
STOPS: dict[str, Any] = {"failures": "llama3-16k-h100", "restart": "megascale", "checkpoint": SAVE}


def plan(**keys: Any) -> RunPlan:
    return validate_model(RunPlan, {"tokens": 1e12, **keys}, "s.yaml")


def test_tokens_alone_ask_for_nothing_more() -> None:
    assert not plan().asks_for_more
    assert not plan(replicas=7).asks_for_more
    for more in ({"start": "2026-12-01"}, {"checkpoint": SAVE}, {"ramp": {"sequences": 2, "tokens": 1e9}}):
        assert plan(**more).asks_for_more


def test_deepseek_v3_as_published() -> None:
    assert run_plan_names() == ["deepseek-v3"]
    v3 = load_run_plan("deepseek-v3")
    assert v3.tokens == 14.8e12
    assert v3.ramp is not None and (v3.ramp.sequences, v3.ramp.tokens) == (3072, 469e9)
    steps = [(p.steps, p.sequences, p.sequence_length) for p in v3.phases]
    assert steps == [(1000, 1920, 32768), (1000, 480, 131072), (None, None, None)]
    assert v3.phases[2].gpu_hours is not None and v3.phases[2].gpu_hours.value == 5000.0


def test_a_scenario_takes_a_plan_by_name_and_changes_one_key_of_it() -> None:
    scenario = load_scenario(
        HOME, ["run=deepseek-v3", "run.start=2026-12-01", "run.checkpoint.interval=10 min"]
    )
    assert scenario.run.start == datetime.date(2026, 12, 1)
    assert scenario.run.checkpoint is not None and scenario.run.checkpoint.interval_s == 600.0
    assert len(scenario.run.phases) == 3
    assert load_scenario(HOME).run.tokens == 14.8e12


def test_a_plan_from_a_file_beside_the_scenario(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("tokens: 2.0e12\nstart: 2027-01-01\n")
    text = (Path(__file__).parents[2] / "golden" / "scenario-small.yaml").read_text()
    (tmp_path / "s.yaml").write_text(text.replace("run: {tokens: 1.0e+12}", "run: mine.yaml"))
    assert load_scenario(str(tmp_path / "s.yaml")).run.tokens == 2.0e12


def test_dumps_load_back() -> None:
    for kept in (
        load_run_plan("deepseek-v3"),
        plan(**STOPS, price={"buy": "h100-bought"}, start="2026-12-01"),
    ):
        data = kept.model_dump(mode="json", exclude_none=True)
        assert validate_model(RunPlan, data, "dump.json") == kept


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokens": -1}, ["tokens=-1", "greater than 0"]),
        ({"tokns": 1}, ["tokns: unknown key (nearest: 'tokens')"]),
        ({"failures": "llama3-16k-h100"}, ["run.failures needs run.checkpoint and run.restart"]),
        ({**STOPS, "failures": "llama4"}, ["unknown failure rate 'llama4'", "llama3-16k-h100"]),
        ({**STOPS, "failures": {"interruptions": "-3 /node-day"}}, ["not negative"]),
        ({**STOPS, "failures": {"interruptions": 3}}, ["bare number", "/1000 node-days"]),
        ({**STOPS, "restart": {"detection": "5 min"}}, ["restart", "recovery: missing"]),
        ({**STOPS, "restart": {"detection": "-5 min", "recovery": "1 min"}}, ["not negative"]),
        ({"checkpoint": {**SAVE, "interval": "0 s"}}, ["must be longer than 0"]),
        ({"checkpoint": {**SAVE, "interval": "30"}}, ["bare number", "'optimal'"]),
        ({"checkpoint": {**SAVE, "interval": "optimal"}}, ["optimal needs run.failures"]),
        ({"checkpoint": {**SAVE, "storage": "tape"}}, ["unknown storage system 'tape'"]),
        ({"checkpoint": {**SAVE, "storage": {"write": "0 GB/s"}}}, ["nearest: 1 MB/s"]),
        ({"checkpoint": {**SAVE, "storage": {}}}, ["give write or write_per_node"]),
        ({"spares": {"count": -1, "repair": "1 day"}}, ["spares.count=-1"]),
        ({"spares": {"count": 2}}, ["spares.repair", "missing"]),
        ({"start": "tomorrow"}, ["start='tomorrow'"]),
        ({"replicas": 0}, ["replicas=0"]),
        ({"ramp": {"sequences": 3, "tokens": 2e12}}, ["run.ramp.tokens=2e+12 exceeds run.tokens=1e+12"]),
        ({"phases": [{"name": "x"}]}, ["exactly one of tokens, steps, gpu_hours"]),
        ({"phases": [{"name": "x", "steps": 3, "tokens": 3}]}, ["exactly one of"]),
        ({"phases": [{"name": "x", "gpu_hours": 5000}]}, ["bare number", "GPU-h"]),
        ({"phases": [{"name": "main", "steps": 3}]}, ["'main' is the first one's"]),
        ({"phases": [{"name": "a.b", "steps": 3}]}, ["phases.0.name"]),
        ({"phases": [{"name": "x", "steps": 3, "override": ["batch.sequences=3"]}]}, ["keys of the phase"]),
        ({"phases": [{"name": "x", "gpu_hours": "5 kGPU-h", "sequences": 3}]}, ["nothing else can be set"]),
        ({"price": {}}, ["exactly one of offer, rent, buy; has none"]),
        ({"price": {"offer": "$2/h"}}, ["price.offer: a price needs the date"]),
        ({"price": {"offer": "-$2/h"}}, ["price.offer"]),
        ({"price": {"rent": {"term": "forever"}}}, ["term='forever' is not one of", "spot"]),
        ({"price": {"buy": "h900-bought"}}, ["unknown purchase 'h900-bought'"]),
        (
            {"price": {"buy": {"system_per_gpu": "$30000", "amortisation": "4 years", "utilisation": 0.8}}},
            ["system_per_gpu, amortisation, utilisation: a price needs provenance with its date"],
        ),
    ],
)
def test_bad_plans(change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        plan(**change)
    for word in words:
        assert word in str(caught.value)
