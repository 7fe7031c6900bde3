"""Names of Megatron-Bridge, NeMo, torchtitan and DeepSpeed mean the same keys."""

from __future__ import annotations

from typing import Any

import pytest
from megatron_launches import DEEPSEEK, launch_of

from moesim.hwmodels.errors import InputError
from moesim.simulator.scenario import load_scenario
from moesim.simulator.trainers.launch import Argument, LaunchFile, Machine
from moesim.simulator.trainers.meaning.arguments import NAMED_TRAINERS
from moesim.simulator.trainers.meaning.understand import Understanding, understand


def read(trainer: str, names: dict[str, Any], base: str = DEEPSEEK, gpus: int = 2048) -> Understanding:
    """The meaning of a configuration file."""
    arguments = tuple(
        Argument(name, value, f"file, line {n}") for n, (name, value) in enumerate(names.items())
    )
    machine = Machine(gpus // 8, 8, {"nodes": "file, line 99"})
    return understand(LaunchFile(trainer, None, arguments, machine), load_scenario(base), "file")


def test_megatron_bridge() -> None:
    understanding = read(
        "megatron-bridge",
        {
            "model.tensor_model_parallel_size": 2,
            "model.pipeline_model_parallel_size": 8,
            "model.virtual_pipeline_model_parallel_size": 2,
            "model.num_layers": 64,
            "model.expert_model_parallel_size": 64,
            "model.expert_tensor_parallel_size": 1,
            "model.sequence_parallel": True,
            "model.moe_token_dispatcher_type": "alltoall",
            "model.moe_permute_fusion": True,
            "model.recompute_granularity": "selective",
            "model.recompute_modules": ("mla_up_proj", "mlp"),
            "train.global_batch_size": 8192,
            "train.micro_batch_size": 1,
            "train.train_iters": 50,
            "ddp.overlap_grad_reduce": True,
            "ddp.overlap_param_gather": True,
            "ddp.use_distributed_optimizer": True,
            "logger.log_interval": 1,
            "checkpoint.save": "/x",
        },
        gpus=1024,
    )
    scenario = understanding.scenario
    assert scenario.parallel.model_dump() == {
        "tp": 2, "pp": 8, "ep": 64, "cp": 1, "vpp": 2, "microbatch": 1, "zero_stage": 1,
        "sequence_parallel": True, "expert_tp": 1, "shard_group": None, "shard_optimizer_over_groups": True,
    }  # fmt: skip
    assert scenario.shape.n_layers == 64 and scenario.shape.hidden == 7168
    assert scenario.stages.layers == (4,) * 16 and scenario.schedule == "interleaved-1f1b"
    assert scenario.communication.kernels == "nccl" and scenario.recompute == ("mla_up_proj", "mlp")
    assert scenario.software.overlap_data_parallel and scenario.batch.sequences == 8192
    assert scenario.batch.sequence_length == 4096  # the base's
    kinds = {row.argument: row.kind for row in understanding.rows}
    assert kinds["logger.log_interval"] == kinds["checkpoint.save"] == "irrelevant"


def test_nemo() -> None:
    scenario = read(
        "nemo",
        {
            "training.trainer.num_nodes": 8,
            "training.model.tensor_model_parallel_size": 4,
            "training.model.pipeline_model_parallel_size": 4,
            "training.model.sequence_parallel": True,
            "training.model.micro_batch_size": 1,
            "training.model.global_batch_size": 128,
            "training.model.activations_checkpoint_granularity": None,
            "training.model.optim.name": "distributed_fused_adam",
            "training.model.optim.lr": 1e-4,
        },
        base="llama-3-70b-64xh100",
        gpus=64,
    ).scenario
    assert (scenario.parallel.tp, scenario.parallel.pp, scenario.parallel.zero_stage) == (4, 4, 1)
    assert scenario.batch.sequences == 128 and scenario.model == "llama-3-70b"


def test_torchtitan() -> None:
    names = {
        "model.name": "llama3",
        "training.local_batch_size": 4,
        "training.seq_len": 8192,
        "parallelism.data_parallel_shard_degree": -1,
        "parallelism.tensor_parallel_degree": 1,
        "activation_checkpoint.mode": "selective",
        "metrics.log_freq": 10,
        "compile.enable": True,
    }
    understanding = read("torchtitan", names, base="llama-3-70b-64xh100", gpus=64)
    scenario = understanding.scenario
    assert scenario.parallel.zero_stage == 3 and scenario.recompute == "op"
    assert (scenario.parallel.microbatch, scenario.batch.sequences) == (4, 4 * 64)
    pipeline = names | {
        "parallelism.pipeline_parallel_degree": 4,
        "parallelism.pipeline_parallel_schedule": "1F1B",
        "parallelism.data_parallel_shard_degree": 1,
    }
    scenario = read("torchtitan", pipeline, base="llama-3-70b-64xh100", gpus=64).scenario
    assert (scenario.parallel.microbatch, scenario.batch.sequences, scenario.schedule) == (1, 4 * 16, "1f1b")
    rows = {row.argument: row for row in understanding.rows}
    assert rows["compile.enable"].kind == "not priced"
    assert rows["parallelism.data_parallel_shard_degree"].value == "-1"
    assert rows["context-parallel-size"].kind == "default"


def test_deepspeed() -> None:
    understanding = read(
        "deepspeed",
        {
            "zero_optimization.stage": 2,
            "zero_optimization.overlap_comm": True,
            "zero_optimization.reduce_bucket_size": 5e8,
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 4,
            "train_batch_size": "auto",
            "bf16.enabled": True,
            "gradient_clipping": 1.0,
        },
        base="llama-3-70b-64xh100",
        gpus=64,
    )
    scenario = understanding.scenario
    dp = 64 // (scenario.parallel.tp * scenario.parallel.pp * scenario.parallel.cp)
    assert scenario.parallel.zero_stage == 2 and scenario.parallel.microbatch == 2
    assert scenario.batch.sequences == 2 * 4 * dp and scenario.recipe.linear == "bf16"


def test_a_deepspeed_file_beside_megatrons_arguments() -> None:
    text = (
        "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --vocab-size 32000 --fp16 --deepspeed\n"
    )
    text += "--micro-batch-size 2 --global-batch-size 512 --seq-length 2048 --zero-stage 1\n"
    launch = launch_of(text, 64)
    extra = Argument("zero_optimization.stage", 1, "ds.json")
    both = LaunchFile("megatron-lm", None, (*launch.arguments, extra), launch.machine)
    assert understand(both, load_scenario("llama-3-70b-64xh100"), "x").scenario.parallel.zero_stage == 1


@pytest.mark.parametrize("trainer", NAMED_TRAINERS)
def test_an_unknown_name_is_refused_with_its_place(trainer: str) -> None:
    with pytest.raises(InputError, match=r"file, line 0: 'flux\.capacitor' is not known"):
        read(trainer, {"flux.capacitor": 1})


def test_the_variables_of_a_wrapper_count_and_the_rest_is_the_bases() -> None:
    # Values: yanring/Megatron-MoE-ModelZoo@e8650517 best_practice/qwen3/run_h100_235b.sh
    text = "--recompute-granularity selective --recompute-modules moe_act layernorm\n"
    variables = {
        "TP": "2",
        "PP": "8",
        "VPP": "4",
        "EP": "32",
        "NNODES": "32",
        "GBS": "2048",
        "PR": "bf16",
        "X": "",
    }
    launch = LaunchFile(None, "./sbatch_benchmarking.sh", launch_of(text).arguments, Machine(), variables)
    base = load_scenario("qwen3-235b-a22b-256xh100")
    understanding = understand(launch, base, "run.sh")
    plan = understanding.scenario.parallel
    assert (plan.tp, plan.pp, plan.vpp, plan.ep) == (2, 8, 4, 32)
    assert plan.zero_stage == base.parallel.zero_stage and plan.expert_tp == base.parallel.expert_tp
    assert understanding.scenario.batch.sequences == 2048 and understanding.scenario.machine.n_gpus == 256
    assert understanding.scenario.recompute == ("layernorm", "moe_act")
    kinds = {row.argument: row.kind for row in understanding.rows}
    assert kinds["TP"] == "key" and kinds["PR"] == "base" and "X" not in kinds


# What decides the plan is applied or refused: the size of a node, a wrapper's prefix, an explicit None, a
# flavor, the SMs of a dispatcher.

GB200 = "deepseek-v3-256xgb200"
WRAPPER = "./sbatch_benchmarking.sh"


def wrapped(
    variables: dict[str, str],
    base: str,
    text: str = "",
    gpus: int | None = None,
    ignore: tuple[str, ...] = (),
) -> Understanding:
    """The meaning of a wrapper's prefix of variables."""
    arguments = launch_of(text).arguments if text else ()
    launch = LaunchFile(None, WRAPPER, arguments, Machine(), variables)
    return understand(launch, load_scenario(base), "run.sh", gpus=gpus, ignore=ignore)


def test_nodes_of_a_rack_scale_base_need_their_gpus() -> None:
    # 64 nodes of 4 GPUs once became 4,096 GPUs, with the 64 GPUs of the base's scale-up domain each.
    variables = {"NNODES": "64", "TP": "1", "PP": "8"}
    with pytest.raises(InputError, match=r"variable NNODES=64: asks for 64 nodes .* give --gpus N"):
        wrapped(variables, GB200)
    assert wrapped(variables, GB200, gpus=256).scenario.machine.n_gpus == 256
    for stated in ({"GPUS_PER_NODE": "4"}, {"GB200_CLUSTER": "1"}):
        assert wrapped(variables | stated, GB200).scenario.machine.n_gpus == 256
    assert wrapped({"NNODES": "64", "PP": "8"}, "qwen3-235b-a22b-256xh100").scenario.machine.n_gpus == 512


def test_nodes_that_only_a_header_states_count_too() -> None:
    launch = launch_of("--tensor-model-parallel-size 1")
    header = Machine(64, None, {"nodes": "run.sh, line 2"})
    launch = LaunchFile(None, WRAPPER, launch.arguments, header, {})
    with pytest.raises(InputError, match=r"run\.sh, line 2: asks for 64 nodes"):
        understand(launch, load_scenario(GB200), "run.sh")


def test_the_prefix_of_a_benchmarking_wrapper_is_understood() -> None:
    # Meanings: sbatch_benchmarking.sh of yanring/Megatron-MoE-ModelZoo@e8650517
    prefix = {"PR": "mxfp8", "A2A_OVERLAP": "1", "DISPATCHER": "hybridep", "PP": "8", "VPP": "4"}
    understanding = wrapped(prefix, GB200)
    recipe = understanding.scenario.recipe
    assert (recipe.linear, recipe.scaling, recipe.parameters, recipe.moments) == ("fp8", "mx", "fp8", "bf16")
    assert (understanding.scenario.communication.kernels, understanding.scenario.communication.sms) == (
        "hybridep",
        32,
    )
    rows = {row.argument: row for row in understanding.rows}
    assert rows["A2A_OVERLAP"].kind == "key"
    assert understanding.scenario.schedule == "interleaved-1f1b-overlapped"
    assert understanding.scenario.communication.delay_weight_gradients
    with pytest.raises(InputError, match=r"PR=nvfp9 is not known; known: bf16, fp8, mxfp8"):
        wrapped({"PR": "nvfp9", "PP": "8"}, GB200)


def test_a_variable_that_may_decide_the_plan_is_refused_unless_it_is_ignored() -> None:
    variables = {"MOE_CAPACITY": "2", "PP": "8", "VPP": "4", "WANDB_PROJECT": "x", "OUTPUT_PATH": "/y"}
    with pytest.raises(InputError, match=r"MOE_CAPACITY=2 is for .*which is not read.*--ignore MOE_CAPACITY"):
        wrapped(variables, GB200)
    rows = {row.argument: row.kind for row in wrapped(variables, GB200, ignore=("MOE_CAPACITY",)).rows}
    assert rows["MOE_CAPACITY"] == "ignored" and rows["WANDB_PROJECT"] == "not priced"


BRIDGE = {"model.pipeline_model_parallel_size": 16, "model.expert_model_parallel_size": 64}


def test_an_explicit_none_switches_off_what_the_base_has() -> None:
    base = "qwen3-235b-a22b-256xh100"
    names = {"model.pipeline_model_parallel_size": 8, "model.virtual_pipeline_model_parallel_size": 4}
    assert load_scenario(base).recompute == "selective"
    off = read("megatron-bridge", names | {"model.recompute_granularity": None}, base, 256)
    assert off.scenario.recompute == "none"
    eight_bits = read("megatron-bridge", BRIDGE | {"model.fp8": None, "model.num_layers": 64}, DEEPSEEK)
    assert eight_bits.scenario.recipe.linear == "bf16"


def test_an_explicit_none_that_decides_the_plan_is_refused() -> None:
    with pytest.raises(InputError, match=r"line 2: model\.expert_tensor_parallel_size = None.*--ignore"):
        read("megatron-bridge", BRIDGE | {"model.expert_tensor_parallel_size": None})


def test_a_flavor_of_other_sizes_than_the_bases_model_is_refused() -> None:
    names = {"model.name": "deepseek_v3", "training.seq_len": 4096, "parallelism.pipeline_parallel_degree": 1}
    with pytest.raises(InputError, match=r"'16B' of 27 layers and width 2048, and the base's model"):
        read("torchtitan", {"model.flavor": "16B", **names})
    with pytest.raises(
        InputError, match=r"'17B', a flavor of torchtitan whose sizes are not known.*--ignore"
    ):
        read("torchtitan", {"model.flavor": "17B", **names})
    names |= {"training.global_batch_size": 16384}
    fitting = read("torchtitan", {"model.flavor": "671B", **names})
    assert fitting.scenario.shape.n_layers == 61


def test_sms_of_a_dispatcher_that_only_the_base_states_count() -> None:
    base = "qwen3-235b-a22b-256xh100"
    prefix = {"EP": "32", "PP": "8", "VPP": "4", "TP": "2"}
    assert wrapped(prefix, base, "--moe-deepep-num-sms 24\n").scenario.communication.sms == 24
    with pytest.raises(InputError, match=r"--moe-deepep-num-sms 24: are SMs of DeepEP .* the base has nccl"):
        wrapped({"EP": "8", "PP": "4", "VPP": "8"}, "mixtral-8x7b-64xh100", "--moe-deepep-num-sms 24\n")
