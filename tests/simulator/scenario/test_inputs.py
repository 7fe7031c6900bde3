"""What a result is of: its inputs load into the same scenario, from memory and from JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import moesim
from moesim.hwmodels.errors import InputError
from moesim.simulator.scenario import Scenario
from moesim.simulator.scenario.inputs import inputs_of
from moesim.simulator.studies import result_cache

PAIR = "deepseek-v3-trace-pair"
EXAMPLES = Path(__file__).parents[3] / "examples"
MOST_BYTES = 4_000
"""Most bytes that its inputs add to the JSON of a result on shipped parts."""
CONFIG = {
    "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "hidden_size": 1024,
    "intermediate_size": 3584, "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 8,
    "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000, "max_position_embeddings": 4096,
    "tie_word_embeddings": False, "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip


def round_trip(result: moesim.Result, path: Path) -> None:
    """The JSON of a result, read as a file, gives the same bytes."""
    path.write_text(result.model_dump_json(indent=2), "utf-8")
    assert moesim.simulate(path).model_dump_json() == result.model_dump_json()


@pytest.mark.parametrize("preset", moesim.presets())
def test_inputs_load_into_the_same_scenario(preset: str) -> None:
    scenario = moesim.load(preset, "seed=3")
    inputs = inputs_of(scenario)
    again = moesim.load(json.loads(json.dumps({"inputs": inputs.model_dump(mode="json")})))
    assert again == scenario and inputs_of(again) == inputs
    assert inputs.overrides == ("seed=3",) and inputs.source == preset
    if preset != PAIR:  # its cluster is written out in the preset
        assert len(inputs.model_dump_json()) < MOST_BYTES


def test_the_json_of_a_result_loads_into_the_same_prediction(tmp_path: Path) -> None:
    round_trip(moesim.simulate(PAIR, "communication.sms=16"), tmp_path / "pair.json")
    fleet = moesim.simulate(EXAMPLES / "mixed.yaml", "batch.sequences=64")
    round_trip(fleet, tmp_path / "fleet.json")
    assert fleet.inputs.plan is not None and fleet.inputs.plan.n_gpus == 128


def test_a_result_of_a_model_file_carries_the_model(tmp_path: Path) -> None:
    config, scenario = tmp_path / "config.json", tmp_path / "own.yaml"
    config.write_text(json.dumps(CONFIG), "utf-8")
    five = (EXAMPLES / "five-lines.yaml").read_text("utf-8").replace("qwen3-30b-a3b", "config.json")
    scenario.write_text(five.replace("512", "64"), "utf-8")
    result = moesim.simulate(scenario, "cluster.node.gpus=8")
    config.unlink()
    scenario.unlink()
    round_trip(result, tmp_path / "result.json")
    assert result.inputs.source == str(scenario)


def test_a_file_that_a_result_names_must_not_have_changed(tmp_path: Path) -> None:
    profile, path = tmp_path / "own.yaml", tmp_path / "result.json"
    text = "name: own\naccelerator: any\ndescription: x\ninclude: [generic-roofline]\nentries: []\n"
    profile.write_text(text, "utf-8")
    scenario = moesim.load(PAIR, f"profile={profile}")
    inputs = inputs_of(scenario)
    assert list(inputs.files) == ["profile", "schedule"]
    path.write_text(json.dumps({"inputs": inputs.model_dump(mode="json")}), "utf-8")
    assert moesim.load(path) == scenario
    profile.write_text(text.replace("x", "y"), "utf-8")
    with pytest.raises(InputError, match=r"result read profile=.* this file has changed"):
        moesim.load(path)
    profile.unlink()
    with pytest.raises(InputError, match="this file is not there"):
        moesim.load(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"files": {"profile.x": "0"}}, "inputs.files names 'profile.x', where the scenario names no file"),
        ({"files": {"faults.0": "0"}}, "where the scenario names no file"),
        ({"scenario": {"model": "x"}, "files": {}}, "the keys parallel, batch are missing"),
        ({"plan": 3}, "result.json: inputs: plan=3"),
        ({"engines": "x"}, "engines: unknown key .nearest: 'engine'."),
    ],
)
def test_a_damaged_result_is_refused_in_words(
    change: dict[str, object], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "result.json"
    inputs = inputs_of(moesim.load(PAIR)).model_dump(mode="json")
    path.write_text(json.dumps({"inputs": inputs | change}), "utf-8")
    with pytest.raises(InputError, match=message):
        moesim.load(path)


def test_overrides_are_told_whatever_the_way_they_were_given() -> None:
    ways = (
        moesim.load(PAIR, "communication.sms=16"),
        moesim.load(PAIR).overridden("communication.sms=8").overridden("communication.sms=16"),
        moesim.load(PAIR).replace(communication={"sms": 16}),
        moesim.load(PAIR).replace(**{"communication.sms": 16}),
    )
    assert {inputs_of(way).overrides for way in ways} == {("communication.sms=16",)}
    copied = moesim.load(PAIR, "parallel.zero_stage=0").model_copy(update={"seed": 7})
    inputs = inputs_of(copied)
    assert moesim.load(PAIR, *inputs.overrides).to_dict() == inputs.scenario != moesim.load(PAIR).to_dict()
    assert inputs.overrides == ("parallel.zero_stage=0", "seed=7")


def test_the_first_lines_name_source_overrides_and_plan_within_80_columns() -> None:
    result = moesim.simulate(PAIR, "communication.sms=16", "seed=5")
    lines = str(result).splitlines()[:5]
    assert lines[1] == "  with    communication.sms=16, seed=5"
    assert lines[2].startswith("  plan    EP64 DP64 MBS1, trace-pair.csv, ") and "16 SMs" in " ".join(lines)
    assert max(map(len, lines)) <= 80


def test_every_kind_of_result_says_what_it_is_of() -> None:
    what = moesim.load(PAIR, "communication.sms=16")
    report = moesim.run(what, uncertainty=False)
    swept = moesim.sweep(what, {"seed": [1, 2]}, workers=1)
    found = [
        moesim.check(what).inputs,
        moesim.timeline(what).inputs,
        report.inputs,
        swept.inputs,
        moesim.explain(what, counterfactuals=False).inputs,
        moesim.sensitivity(what).inputs,
        moesim.compare([PAIR, what]).sides[1].inputs,
    ]
    assert all(inputs == inputs_of(what) for inputs in found)
    assert moesim.load(report) == what, "a report loads as well"
    estimate = moesim.estimate(EXAMPLES / "five-lines.yaml", "recompute=full")
    assert estimate.inputs.engine == "closed form"
    assert moesim.estimate(estimate) == estimate


def test_a_kept_prediction_says_what_it_was_asked_for(
    small: Scenario, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(result_cache.FOLDER, str(tmp_path))
    scenario = small.overridden("communication.sms=16")
    result_cache.keep(scenario, moesim.simulate(scenario))
    other = moesim.load(small.replace(communication={"sms": 16}).to_dict())
    kept = result_cache.find(other)
    assert kept is not None and kept.model_dump_json() == moesim.simulate(other).model_dump_json()
    assert kept.inputs.source is None
