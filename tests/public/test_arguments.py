"""The first argument of every function stands for a scenario, in one of five forms; then come overrides."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import moesim
from moesim.hwmodels.errors import InputError
from moesim.simulator.predict.result import Result
from moesim.simulator.scenario import AnyScenario, Scenario

PAIR = "deepseek-v3-trace-pair"
FEW = "communication.sms=8"
SPACE = moesim.PlanSpace(tp=(1,), pp=(2,), ep=(8,), vpp=(1,), recompute=("full",), microbatch=(1,))
FIVE_LINES = Path(__file__).parents[2] / "examples" / "five-lines.yaml"

FUNCTIONS: dict[str, Callable[..., object]] = {
    "load": lambda what, *texts: moesim.load(what, *texts).to_dict(),
    "simulate": lambda what, *texts: moesim.simulate(what, *texts).step,
    "check": lambda what, *texts: moesim.check(what, *texts).inputs.plan,
    "timeline": lambda what, *texts: moesim.timeline(what, *texts).step_s,
    "explain": lambda what, *texts: moesim.explain(what, *texts, counterfactuals=False).causes,
    "compare": lambda what, *texts: moesim.compare([what, what], *texts).sides[1].figures,
    "sweep": lambda what, *texts: moesim.sweep(what, {"seed": [1]}, *texts, workers=1).points[0].figures,
    "sensitivity": lambda what, *texts: moesim.sensitivity(what, *texts),
    "interval": lambda what, *texts: moesim.interval(what, *texts, metric="days"),
    "run": lambda what, *texts: moesim.run(what, *texts, uncertainty=False).days,
}
"""Every function with its scenario first, as what it says of it."""
SLOW = {
    "sensitivity": "moesim.simulator.studies.uncertainty.sensitivity",
    "interval": "moesim.simulator.studies.uncertainty.interval",
}
"""Functions of seconds: the test asks what scenario they are given."""


@pytest.fixture(scope="module")
def pair() -> Scenario:
    return moesim.load(PAIR)


@pytest.fixture(scope="module")
def pair_result(pair: Scenario) -> Result:
    return moesim.simulate(pair)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_overrides_apply_to_a_scenario_as_to_a_name(
    name: str, pair: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = FUNCTIONS[name]
    if name in SLOW:
        monkeypatch.setattr(SLOW[name], lambda scenario, *rest, **more: scenario.to_dict())
    changed = function(pair, FEW)
    assert changed == function(PAIR, FEW)
    assert changed != function(pair)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("text", ["communication.sm=8", "communication.sms", 8])
def test_an_override_is_never_dropped(name: str, text: object, pair: Scenario) -> None:
    for what in (pair, PAIR):
        with pytest.raises(InputError, match=r"nearest: 'sms'|write key=value|an override is a text"):
            FUNCTIONS[name](what, text)


def test_all_forms_of_a_scenario_are_the_same_one(tmp_path: Path, pair_result: Result) -> None:
    path = tmp_path / "five-lines.yaml"
    path.write_text(FIVE_LINES.read_text("utf-8"), "utf-8")
    forms: list[AnyScenario] = [path, str(path), moesim.load(path), moesim.load(path).to_dict()]
    assert len({moesim.estimate(form, "recompute=full").step_time_s for form in forms}) == 1
    again = moesim.simulate(pair_result)
    assert again.model_dump_json() == pair_result.model_dump_json()


@pytest.mark.parametrize("what", [3, None, ["deepseek-v3"], object()])
def test_anything_else_is_refused_in_words(what: Any) -> None:
    with pytest.raises(InputError, match="is no scenario: give a Scenario, the name of a preset"):
        moesim.simulate(what)
    with pytest.raises(InputError, match="takes a list of two to four scenarios"):
        moesim.compare(PAIR)


def test_plan_takes_overrides_beside_its_space() -> None:
    found = moesim.plan(FIVE_LINES, "batch.sequences=64", SPACE, top=1)
    assert found.inputs is not None and found.inputs.overrides == ("batch.sequences=64",)
    assert found.best.scenario.batch.sequences == 64
    with pytest.raises(InputError, match="unknown key"):
        moesim.plan(FIVE_LINES, "batch.sequence=64", SPACE)
    with pytest.raises(InputError, match="one space"):
        moesim.plan(FIVE_LINES, SPACE, SPACE)


def test_a_result_is_repriced_only_for_its_own_scenario(pair: Scenario, pair_result: Result) -> None:
    with pytest.raises(InputError, match=r"reprice: .*communication\.sms=20 in the result, 8 here"):
        moesim.reprice(pair_result, pair.replace(communication={"sms": 8}))
    with pytest.raises(InputError, match=r"communication\.sms=20 in the result, 8 here"):
        moesim.reprice(pair_result, PAIR, FEW)
    dearer = moesim.reprice(pair_result, pair, "cluster.price_per_gpu_hour=$9/h")
    assert dearer.run.cost_usd == pytest.approx(9.0 * dearer.run.gpu_hours)
    assert "cluster.price_per_gpu_hour=$9/h" in dearer.inputs.overrides
    source = {row.path: row.source for row in dearer.provenance}["cluster.price_per_gpu_hour"]
    assert source == "stated by you", "the old price is gone from the evidence"
    back = moesim.reprice(dearer, pair)
    assert sorted(map(str, back.provenance)) == sorted(map(str, pair_result.provenance))
    assert back.model_copy(update={"provenance": pair_result.provenance}) == pair_result


def test_neighbours_and_published_take_names_and_check_their_result(pair_result: Result) -> None:
    assert moesim.published(PAIR, pair_result) == moesim.published(moesim.load(PAIR), pair_result)
    for function in (moesim.neighbours, moesim.published):
        with pytest.raises(InputError, match=r"is not of this scenario: communication\.sms=20"):
            function(PAIR, pair_result, FEW)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"search": "quick"}, r"search='quick' is not one of narrow, whole"),
        ({"payment": "spots"}, r"payment='spots' is not one of .*nearest: 'spot'"),
        ({"gpus": {"h100-1025": 8}}, r"gpus: 'h100-1025' is none of the clusters .*nearest: 'h100-1024'"),
    ],
)
def test_compare_hardware_refuses_its_options_before_it_searches(
    options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moesim.simulator.planner.hardware.plan_on", None)
    with pytest.raises(InputError, match=message):
        moesim.compare_hardware("deepseek-v3-2048xh800", ["h100-1024", "h200-1024"], **options)
    with pytest.raises(InputError, match="clusters is a list of names"):
        moesim.compare_hardware("deepseek-v3-2048xh800", "h100-1024")


def test_the_base_of_a_launch_file_takes_overrides(tmp_path: Path) -> None:
    script = tmp_path / "train.json"
    script.write_text(json.dumps({"train_batch_size": 64}), "utf-8")
    with pytest.raises(InputError, match="nearest: 'sms'"):
        moesim.import_launch(script, PAIR, "communication.sm=8")


HOME = "deepseek-v3-2048xh800"


def test_a_trainer_says_what_it_cannot_run_and_writes_what_it_can() -> None:
    trainer = moesim.trainer("megatron@0.14")
    assert "1F1B" in trainer.problems_of(moesim.load(HOME))[0]
    scenario = moesim.load(HOME, "schedule=1f1b", "recompute=full", "precision=bf16")
    assert trainer.problems_of(scenario) == ()
    assert "--num-layers 61" in trainer.arguments(scenario).text()
    with pytest.raises(moesim.InputError, match="known: "):
        moesim.trainer("nemo")


def test_a_launch_file_becomes_a_scenario(tmp_path: Path) -> None:
    scenario = moesim.load(HOME, "schedule=1f1b", "recompute=[layernorm, moe_act]", "precision=bf16")
    exported = moesim.trainer("megatron").arguments(scenario)
    script = tmp_path / "run.sh"
    script.write_text(exported.text() + 'torchrun --nnodes 256 pretrain_gpt.py "${TRAINING_ARGS[@]}"\n')
    values = dict.fromkeys(("LEARNING_RATE", "DATA_PATH", "TOKENIZER_MODEL", "CHECKPOINT_DIR"), "1")
    understood = moesim.import_launch(script, HOME, environment=values, gpus=2048)
    assert understood.scenario.parallel == scenario.parallel
    assert understood.scenario.recompute == ("layernorm", "moe_act")
    assert understood.scenario.shape.name == "deepseek-v3"
    assert any(row.argument == "--lr" for row in understood.rows)
