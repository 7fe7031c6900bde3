"""Launch files of forks, older versions and other trainers, with constructs that an import once misread."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moesim.hwmodels.errors import InputError
from moesim.simulator.scenario import load_scenario
from moesim.simulator.trainers.meaning.understand import Understanding, understand
from moesim.simulator.trainers.reading import read_launch

DEEPSEEK = "deepseek-v3-2048xh800"
MODEL = "--num-layers 22 --hidden-size 1024 --num-attention-heads 8 --seq-length 512 --vocab-size 1000 "
DEGREES = "--pipeline-model-parallel-size 4 --micro-batch-size 1 --global-batch-size 16 "
OLD = "deepspeed --num_nodes 1 --num_gpus 8 pretrain_gpt.py " + MODEL + DEGREES


def imported(
    folder: Path, text: str, name: str = "run.sh", base: str = DEEPSEEK, **given: Any
) -> Understanding:
    path = folder / name
    path.write_text(text)
    return understand(read_launch(path), load_scenario(base), name, **given)


def kinds(understanding: Understanding, argument: str) -> set[str]:
    return {row.kind for row in understanding.rows if row.argument == argument}


def test_megatron_deepspeed_shards_the_states_of_a_bf16_pipeline(tmp_path: Path) -> None:
    # The construct of train/tr11-176B-ml/tr11-176B-ml.slurm of bigscience-workshop/bigscience.
    text = OLD + (
        "--bf16 --deepspeed --zero-stage 0 --checkpoint-activations --position-embedding-type alibi "
        "--pp-partition-method 'type:transformer|embedding' --pad-vocab-size-to 1024 --embed-layernorm\n"
    )
    understanding = imported(tmp_path, text)
    scenario = understanding.scenario
    assert scenario.parallel.zero_stage == 1 and scenario.recompute == "full"
    assert scenario.stages is not None and tuple(scenario.stages.layers or ()) == (5, 6, 6, 5)
    assert scenario.software.attention == "unfused" and scenario.shape.vocab == 1024
    assert scenario.parallel.tp == 1  # Megatron-LM's default, and not the base's
    assert scenario.schedule == "1f1b" and kinds(understanding, "--embed-layernorm") == {"not priced"}
    half = imported(tmp_path, text.replace("--bf16", "--fp16"))
    assert half.scenario.parallel.zero_stage == 0


def test_the_method_of_an_older_version_means_full_recomputation(tmp_path: Path) -> None:
    # The construct of examples/pretrain_gpt3_175B.sh of stanford-futuredata/Megatron-LM.
    text = "torchrun --nproc_per_node 8 pretrain_gpt.py " + MODEL.replace("22", "24") + DEGREES + "--fp16 "
    assert imported(tmp_path, text + "\n").scenario.recompute == "none"
    assert imported(tmp_path, text + "--activations-checkpoint-method uniform\n").scenario.recompute == "full"


def test_a_file_of_deepspeed_that_is_not_read_is_listed(tmp_path: Path) -> None:
    text = OLD.replace("22", "24") + "--fp16 --deepspeed --deepspeed_config other.json\n"
    assert kinds(imported(tmp_path, text), "--deepspeed_config") == {"irrelevant", "not priced"}
    assert kinds(imported(tmp_path, text[:-1] + " --zero-stage 1\n"), "--deepspeed_config") == {"irrelevant"}


def test_gpus_of_deepspeed_are_those_of_one_node(tmp_path: Path) -> None:
    text = OLD.replace("22", "24").replace("--num_nodes 1 --num_gpus 8", "--num_gpus 2") + "--fp16\n"
    with pytest.raises(InputError, match="asks for 2 GPUs, fewer than the 8"):
        imported(tmp_path, text)


TOML = """[model]
name = "{name}"
flavor = "{flavor}"
converters = [{converters}]
[training]
local_batch_size = 1
seq_len = 4096
[activation_checkpoint]
mode = "full"
"""


@pytest.mark.parametrize(("converters", "linear"), [("", "bf16"), ('"float8"', "fp8")])
def test_torchtitan_trains_in_bf16_unless_a_converter_says_else(
    tmp_path: Path, converters: str, linear: str
) -> None:
    # The construct of models/llama3/train_configs/llama3_405b.toml of pytorch/torchtitan.
    text = TOML.format(name="deepseek_v3", flavor="671B", converters=converters)
    assert imported(tmp_path, text, "a.toml").scenario.recipe.linear == linear


def test_a_batch_in_tokens_is_refused(tmp_path: Path) -> None:
    # The construct of models/llama3/config_registry.py of pytorch/torchtitan@b5bcd76.
    text = TOML.format(name="deepseek_v3", flavor="671B", converters="").replace(
        "local_batch_size = 1", "num_tokens_per_microbatch_per_dp_rank = 4096"
    )
    with pytest.raises(InputError, match="num_tokens_per_microbatch_per_dp_rank"):
        imported(tmp_path, text, "a.toml")


def test_stages_of_a_configuration_count_and_its_schedule_is_no_dualpipe(tmp_path: Path) -> None:
    # The values of nemo/collections/llm/recipes/deepseek_v3.py of NVIDIA/NeMo.
    text = (
        "trainer: {strategy: {tensor_model_parallel_size: 2, num_layers_in_first_pipeline_stage: 3,\n"
        "  num_layers_in_last_pipeline_stage: 2, virtual_pipeline_model_parallel_size: null}}\n"
    )
    scenario = imported(tmp_path, text, "deepseek_v3.yaml").scenario
    assert scenario.schedule == "1f1b" and scenario.parallel.vpp == 1
    assert scenario.stages is not None and tuple(scenario.stages.layers or ()) == (3, *[4] * 14, 2)


def test_a_script_of_which_nothing_is_used_is_refused(tmp_path: Path) -> None:
    # The construct of simu_tools/megatron_scripts/run_llama3.sh of MooreThreads/SimuMax.
    with pytest.raises(InputError, match="none of its arguments sets a key"):
        imported(tmp_path, "export STEPS=3\nbash other/run.sh\n")


def test_a_dense_model_of_a_configuration_does_not_take_the_bases_experts(tmp_path: Path) -> None:
    # The construct of launcher_scripts/conf/training/gpt3/20b.yaml of NVIDIA/NeMo-Framework-Launcher.
    text = (
        "trainer: {num_nodes: 4, devices: 8, precision: bf16}\n"
        "model: {tensor_model_parallel_size: 2, pipeline_model_parallel_size: 1, context_parallel_size: 1,\n"
        "  virtual_pipeline_model_parallel_size: null, micro_batch_size: 1, global_batch_size: 64,\n"
        "  encoder_seq_length: 512, num_layers: 4, hidden_size: 256, num_attention_heads: 4,\n"
        "  activations_checkpoint_granularity: null, data: {seq_length: 512}}\n"
    )
    scenario = imported(tmp_path, text, "a.yaml", vocab=1000).scenario
    assert (scenario.parallel.ep, scenario.parallel.vpp, scenario.recompute) == (1, 1, "none")
    assert scenario.shape.moe is None and scenario.batch.sequence_length == 512


@pytest.mark.parametrize(
    ("frequency", "dense"), [("'([0]*2+[1]*2)*1'", [0, 1]), ("\"'([0]+[1])*2'\"", [0, 2]), ("[0]+[1]*3", [0])]
)
def test_layers_with_experts_may_be_repeated_and_quoted(
    tmp_path: Path, frequency: str, dense: list[int]
) -> None:
    # The constructs of run_pretrain_deepseekv2.sh of MooreThreads/SimuMax, and of Kimi-K2.yaml of
    # yanring/Megatron-MoE-ModelZoo.
    text = "torchrun --nproc_per_node 8 pretrain_gpt.py " + MODEL.replace("22", "4") + "--bf16 --swiglu "
    text += "--num-experts 8 --micro-batch-size 1 --global-batch-size 16 --moe-layer-freq " + frequency + "\n"
    moe = imported(tmp_path, text).scenario.shape.moe
    assert moe is not None and list(moe.dense_layers) == dense


def test_full_recomputation_of_a_block_of_no_layers_is_none(tmp_path: Path) -> None:
    # The construct of run_pretrain_deepseekv2.sh of MooreThreads/SimuMax.
    text = "torchrun --nproc_per_node 8 pretrain_gpt.py " + MODEL.replace("22", "24") + DEGREES + "--bf16 "
    text += "--recompute-granularity full --recompute-method block --recompute-num-layers "
    assert imported(tmp_path, text + "0\n").scenario.recompute == "none"
    assert imported(tmp_path, text + "1\n").scenario.recompute == "full"


def test_a_quoted_layout_and_the_expert_parallelism_of_megatron_deepspeed_are_read(tmp_path: Path) -> None:
    text = "torchrun --nproc_per_node 8 pretrain_gpt.py " + MODEL.replace("22", "4") + "--bf16 --swiglu "
    text += "--num-experts 8 --moe-expert-parallel-size 4 --micro-batch-size 1 --global-batch-size 16 "
    text += "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout \"'Ett|ttL'\"\n"
    scenario = imported(tmp_path, text).scenario
    assert scenario.parallel.ep == 4 and scenario.stages is not None
    assert tuple(scenario.stages.layers or ()) == (2, 2)
