"""Plans as Megatron-LM arguments: complete, and exactly the plan that was priced."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from moesim.simulator.model.shape import ModelShape
from moesim.simulator.scenario import Scenario, load_scenario
from moesim.simulator.trainers.export import Arguments
from moesim.simulator.trainers.megatron.arguments import megatron_arguments
from moesim.simulator.trainers.megatron.model_arguments import attention_arguments
from moesim.simulator.trainers.registry import trainer_of

HOME = "deepseek-v3-2048xh800"
FILLED = {
    "LEARNING_RATE": "2.2e-4",
    "DATA_PATH": "/data/with space/text",
    "TOKENIZER_MODEL": "/models/tokenizer",
    "CHECKPOINT_DIR": "/checkpoints",
}


def runnable(*overrides: str) -> Scenario:
    scenario = load_scenario(HOME, ["schedule=1f1b", "recompute=full", "precision=bf16", *overrides])
    return trainer_of("megatron").adapted(scenario)[0]


def test_nothing_is_unspelled_for_a_plan_that_megatron_runs() -> None:
    export = megatron_arguments(runnable())
    assert export.unspelled == ()
    assert export.gpus == 2048
    assert export.trainer == "Megatron-LM 0.20"


def test_what_differs_from_the_priced_plan_is_said() -> None:
    text = " ".join(megatron_arguments(load_scenario(HOME)).unspelled)
    for reason in ("1F1B and interleaved 1F1B only", "no such recompute policy", "precision.dispatch=bf16"):
        assert reason in text
    assert "--pipeline-model-parallel-layout" not in megatron_arguments(load_scenario(HOME)).arguments


def test_a_model_file_without_its_rotary_base_asks_for_it() -> None:
    shape = load_scenario(HOME).shape.model_copy(update={"numerics": None})
    export = megatron_arguments(runnable().model_copy(update={"model": shape}))
    assert export.arguments["--rotary-base"] == "$ROTARY_BASE"
    assert "rope_theta" in export.variables["ROTARY_BASE"]


def received(export: Arguments) -> list[str]:
    """What a program receives that a shell starts with the printed arguments."""
    script = export.text() + 'printf "%s\\0" "${TRAINING_ARGS[@]}"'
    run = subprocess.run(
        ["bash", "-c", script], env={**FILLED, "PATH": "/usr/bin:/bin"}, capture_output=True, check=True
    )
    return run.stdout.decode().split("\0")[:-1]


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_a_shell_passes_on_exactly_the_arguments() -> None:
    export = megatron_arguments(runnable())
    assert received(export) == export.words(FILLED)
    assert "([0]*3+[1]*58)" in received(export)


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_a_variable_that_is_not_set_stops_the_shell() -> None:
    text = megatron_arguments(runnable()).text()
    run = subprocess.run(["bash", "-c", text], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True)
    assert run.returncode != 0
    assert "DATA_PATH: the tokenised training data" in run.stderr


def gpt_oss(*overrides: str) -> Scenario:
    plain = ["parallel={pp: 2, ep: 8, zero_stage: 1}", "schedule=1f1b", "recompute=none"]
    scenario = load_scenario("qwen3-235b-a22b-256xh100", ["model=gpt-oss-120b", *plain, *overrides])
    return trainer_of("megatron").adapted(scenario)[0]


def test_windows_sinks_and_biases_of_gpt_oss_have_arguments() -> None:
    # Names and values: NVIDIA/Megatron-LM@d98e8a64 examples/post_training/modelopt/conf/openai/gpt-oss-20b.sh
    export = megatron_arguments(gpt_oss())
    assert export.unspelled == ()
    arguments = export.arguments
    assert arguments["--window-size"] == "127,0" and arguments["--window-attn-skip-freq"] == "2"
    assert arguments["--softmax-type"] == "learnable"
    assert {"--quick-geglu", "--glu-linear-offset", "--activation-func-clamp-value"} <= arguments.keys()
    assert not {"--swiglu", "--disable-bias-linear", "--add-qkv-bias"} & arguments.keys()
    older = trainer_of("megatron@0.14").problems_of(gpt_oss())
    assert any("--window-attn-skip-freq" in reason for reason in older)


SLIDING = {"kind": "sliding", "heads": 64, "kv_heads": 8, "head_dim": 64, "window": 128}
FULL = {"kind": "gqa", "heads": 64, "kv_heads": 8, "head_dim": 64}


@pytest.mark.parametrize(
    ("layers", "full", "frequency"),
    [
        (["sliding", "sliding", "full"], FULL, "3"),
        (["full", "sliding"], FULL, "([0]*1+[1]*1+[0]*1+[1]*1+[0]*1+[1]*1)"),
        (["sliding"], FULL, None),
        (["sliding", "full"], FULL | {"sinks": True}, "none of them"),
        (["sliding", "full"], FULL | {"kv_heads": 4}, "none of them"),
    ],
)
def test_layers_may_differ_in_a_window_alone(
    layers: list[str], full: dict[str, object], frequency: str | None
) -> None:
    kinds = {"sliding": SLIDING, "full": full}
    shape = ModelShape.model_validate(
        {
            "name": "windows",
            "source": {"kind": "derived", "reference": "a test"},
            "n_layers": 6,
            "hidden": 512,
            "vocab": 1024,
            "dense_ffn": 1024,
            "tied_embeddings": False,
            "attentions": {name: kinds[name] for name in dict.fromkeys(layers)},
            "attention_layers": layers,
        }
    )
    spelled = attention_arguments(shape)
    if frequency == "none of them":
        assert spelled is None
    else:
        assert spelled is not None and spelled["--window-size"] == "127,0"
        assert spelled.get("--window-attn-skip-freq") == frequency


def test_an_activation_that_is_no_swiglu_is_said() -> None:
    scenario = load_scenario("llama-3-70b-64xh100")
    numerics = {"activation": "gelu_pytorch_tanh"}
    model = scenario.shape.model_dump(mode="json", exclude_none=True) | {"numerics": numerics}
    sentences = megatron_arguments(scenario.replace(model=model)).unspelled
    assert any("gelu_pytorch_tanh" in sentence for sentence in sentences)
