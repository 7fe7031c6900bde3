"""Training frameworks from Python: what they can run, their arguments, and their launch files."""

from __future__ import annotations

from pathlib import Path

import pytest

import moesim

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
