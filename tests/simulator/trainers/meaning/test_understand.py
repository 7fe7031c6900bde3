"""What arguments of Megatron-LM mean: scenario keys, defaults, duplicates, contradictions, missing values."""

from __future__ import annotations

import pytest
from megatron_launches import DEEPSEEK, MIXTRAL, launch_of, read, row

from moesim.hwmodels.errors import InputError
from moesim.simulator.model.catalogue import load_model
from moesim.simulator.scenario import load_scenario
from moesim.simulator.trainers.launch import Argument, LaunchFile, Machine, Unknown
from moesim.simulator.trainers.meaning.understand import understand

HOME = "mixtral-8x7b-64xh100"


def test_every_argument_has_a_row_with_its_place() -> None:
    understanding = read(MIXTRAL, 64, HOME)
    stated = {argument.name for argument in launch_of(MIXTRAL).arguments}
    placed = {r.argument for r in understanding.rows if r.place.startswith("run.sh, line")}
    assert stated <= placed
    assert row(understanding, "--lr").kind == "irrelevant"
    assert row(understanding, "--context-parallel-size").meaning.endswith("Megatron-LM's default")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("--num-layers-per-virtual-pipeline-stage 2", "--num-virtual-stages-per-pipeline-rank 4"),
        ("--num-virtual-stages-per-pipeline-rank 2", "--pipeline-model-parallel-layout Et*8|t*8|t*8|t*8L"),
        ("--decoder-first-pipeline-num-layers 4", "--pipeline-model-parallel-layout Et*8|t*8|t*8|t*8L"),
        ("--bf16", "--fp16"),
        ("--recompute-activations", "--recompute-granularity full"),
        ("--use-torch-fsdp2", "--use-distributed-optimizer"),
        ("--grad-reduce-in-bf16", "--accumulate-allreduce-grads-in-fp32"),
    ],
)
def test_contradictions_name_both_with_their_places(one: str, other: str) -> None:
    text = (
        MIXTRAL.replace("--bf16", "").replace("--use-distributed-optimizer", "") + one + "\n" + other + "\n"
    )
    lines = text.strip().splitlines()
    with pytest.raises(InputError, match="contradict each other") as caught:
        read(text, 64, HOME)
    message = str(caught.value)
    assert one.split()[0] in message and other.split()[0] in message
    assert f"line {len(lines) - 1}:" in message and f"line {len(lines)}:" in message


def test_given_twice_the_last_counts() -> None:
    understanding = read(MIXTRAL + "--micro-batch-size 2\n", 64, HOME)
    assert understanding.scenario.parallel.microbatch == 2
    first = row(understanding, "--micro-batch-size", "ignored")
    assert first.value == "1" and "given twice, the last counts: --micro-batch-size 2" in first.meaning
    same = read(MIXTRAL + "--micro-batch-size 1\n", 64, HOME)
    assert not [r for r in same.rows if r.kind == "ignored"]


def test_a_missing_value_matters_only_where_the_argument_does() -> None:
    harmless = read(MIXTRAL + "--data-path ${DATA}\n", 64, HOME)
    assert row(harmless, "--data-path").kind == "irrelevant"
    with pytest.raises(
        InputError, match=r"--tensor-model-parallel-size \$\{TP\}.*TP is not set.*--env TP=VALUE"
    ):
        read(MIXTRAL.replace("parallel-size 1 --pipe", "parallel-size ${TP} --pipe"), 64, HOME)


def test_what_is_not_priced_says_the_direction() -> None:
    text = "--fp32-residual-connection --no-overlap-p2p-communication\n"
    understanding = read(MIXTRAL + text, 64, HOME)
    residual = row(understanding, "--fp32-residual-connection")
    assert residual.kind == "not priced" and "slower" in residual.meaning and "memory" in residual.meaning
    assert "the real step is slower" in row(understanding, "--no-overlap-p2p-communication").meaning


OVERLAP = "--overlap-moe-expert-parallel-comm\n"
STAGED = OVERLAP + "--num-virtual-stages-per-pipeline-rank 2\n"


def test_sharp_adds_up_in_the_switches() -> None:
    assert read(MIXTRAL + "--use-sharp\n", 64, HOME).scenario.communication.in_network == "all"
    one = row(
        read(MIXTRAL + "--num-distributed-optimizer-instances 1\n", 64, HOME),
        "--num-distributed-optimizer-instances",
    )
    assert one.kind == "irrelevant"


def test_expert_overlap_is_a_schedule_and_delay_splits_its_weight_gradients() -> None:
    plain = read(MIXTRAL + STAGED, 64, HOME).scenario
    assert (plain.schedule, plain.communication.overlap) == ("interleaved-1f1b-overlapped", "schedule")
    assert not plain.communication.delay_weight_gradients
    more = "--delay-wgrad-compute --ep-overlap-early-attn-memory-release\n"
    early = read(MIXTRAL + STAGED + more, 64, HOME).scenario.communication
    assert early.delay_weight_gradients and early.overlap == "megatron-early-attention"
    shared = read(MIXTRAL + "--moe-shared-expert-overlap\n", 64, HOME).scenario
    assert shared.communication.overlap_shared_experts and shared.schedule == "1f1b"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (OVERLAP, "add --num-virtual-stages-per-pipeline-rank 2"),
        ("--delay-wgrad-compute\n", "needs --overlap-moe-expert-parallel-comm too"),
        (STAGED + "--moe-shared-expert-overlap\n", "both hide the transfers"),
        (STAGED + "--recompute-granularity full --recompute-method uniform\n", "without moe"),
        (STAGED + "--recompute-granularity selective --recompute-modules moe\n", "without moe"),
    ],
)
def test_expert_overlap_that_megatron_refuses_is_refused(text: str, named: str) -> None:
    with pytest.raises(InputError, match=named):
        read(MIXTRAL + text, 64, HOME)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("--num-layers-per-virtual-pipeline-stage 3", "do not divide into virtual stages of 3"),
        ("--pipeline-model-parallel-layout 'Et*2|(ttttt|)*5t*3|tL'", "has 31 of decoder layers"),
        ("--fp4-format e2m1", "FP4"),
        ("--optimizer-cpu-offload", "in host memory and the CPU"),
        ("--fine-grained-activation-offloading", "recompute modules"),
        ("--moe-paged-stash", "recompute modules"),
        ("--first-last-layers-bf16", "among others in FP8"),
        ("--num-distributed-optimizer-instances 2", "use 1"),
        ("--experimental-attention-variant gated_delta_net", "linear attention"),
        ("--batch-size 4", "--micro-batch-size"),
        ("--use-checkpoint-args", "another file"),
        ("--fancy-tokens x", "--ignore --fancy-tokens"),
        ("--recompute-granularity some", "full, selective"),
        ("--recompute-granularity selective --recompute-modules core_atn", "core_attn"),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy all", "optim_grads_params"),
        ("--fp8-format e4m3 --fp8-recipe rowwise", "blockwise"),
        ("--exp-avg-dtype bf16", "--use-precision-aware-optimizer"),
        ("--expert-model-parallel-size 3", "divide"),
        ("--global-batch-size 100", "no multiple"),
        ("--moe-layer-freq ([0]*3+[1]*20)", "23 entries"),
        ("--micro-batch-size two", "whole number"),
        ("--num-query-groups 5", "does not divide"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_its_place(text: str, named: str) -> None:
    with pytest.raises(InputError) as caught:
        read(MIXTRAL + text + "\n", 64, HOME)
    assert named in str(caught.value)


def test_all_unknown_arguments_are_named_at_once() -> None:
    with pytest.raises(InputError, match=r"(?s)'--one-a'.*'--one-b'.*'--one-d'.*; and 1 more"):
        read(MIXTRAL + " ".join(f"--one-{letter} 1" for letter in "abcde") + "\n", 64, HOME)


def test_an_argument_is_skipped_where_the_user_says_so() -> None:
    text = MIXTRAL + "--fancy-tokens Qwen\n"
    understanding = read(text, 64, HOME, ignore=("--fancy-tokens",))
    assert row(understanding, "--fancy-tokens").kind == "ignored"
    with pytest.raises(InputError, match="does not have this argument"):
        read(MIXTRAL, 64, HOME, ignore=("--no-such",))


# -- the model -----------------------------------------------------------------------------------------


def test_another_model_is_built_from_its_sizes() -> None:
    text = MIXTRAL.replace("--hidden-size 4096", "--hidden-size 2048") + "--vocab-size 50000\n"
    shape = read(text, 64, HOME).scenario.shape
    assert (shape.name, shape.hidden, shape.n_layers, shape.vocab) == ("run.sh", 2048, 32, 50048)
    assert shape.moe is not None and shape.moe.expert_ffn == 14336 and shape.dense_ffn is None


def test_the_vocabulary_is_padded_as_megatron_pads_it() -> None:
    text = (
        MIXTRAL.replace("size 1 --pipe", "size 8 --pipe").replace("size 8\n", "size 2\n")
        + "--vocab-size 32000\n"
    )
    shape = read(text, 64, HOME).scenario.shape
    assert shape.vocab == 32768  # a multiple of 128 x 8
    unpadded = read(text + "--make-vocab-size-divisible-by 16\n", 64, HOME)
    assert unpadded.scenario.model == "mixtral-8x7b"


def test_a_vocabulary_that_is_not_stated_is_the_bases_or_is_asked_for() -> None:
    assert row(read(MIXTRAL, 64, HOME), "--vocab-size").kind == "base"
    with pytest.raises(InputError, match=r"--vocab-size N \(the rest is mixtral-8x7b: --vocab-size 32000\)"):
        read(MIXTRAL, 64, DEEPSEEK)
    assert read(MIXTRAL, 64, DEEPSEEK, vocab=32000).scenario.model == "mixtral-8x7b"


def test_defaults_of_the_model_are_megatrons() -> None:
    text = "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --vocab-size 50257 --bf16\n"
    text += "--micro-batch-size 4 --global-batch-size 8192 --seq-length 1024\n"
    understanding = read(text, 2048)
    shape = understanding.scenario.shape
    assert shape.dense_ffn == 4096 and not shape.ffn_gated and shape.tied_embeddings and shape.vocab == 50304
    attention = shape.attention
    assert attention is not None
    assert attention.model_dump(include={"kv_heads", "head_dim", "qkv_bias", "o_bias", "rotary"}) == {
        "kv_heads": 16, "head_dim": 64, "qkv_bias": True, "o_bias": True, "rotary": False,
    }  # fmt: skip
    assert understanding.scenario.software.dropout  # 0.1 unless stated
    assert "LayerNorm" in " ".join(shape.not_modelled)


def test_a_script_that_describes_no_model_has_the_bases() -> None:
    understanding = read("--pipeline-model-parallel-size 16 --bf16\n--expert-model-parallel-size 64\n"
                         "--decoder-last-pipeline-num-layers 1\n")  # fmt: skip
    assert understanding.scenario.shape == load_model("deepseek-v3")
    assert row(understanding, "--num-layers").kind == "base"
    with pytest.raises(InputError, match="--hidden-size is missing"):
        read("--num-layers 61 --bf16\n")


# -- GPUs ----------------------------------------------------------------------------------------------


def test_the_cluster_gets_the_gpus_of_the_file() -> None:
    understanding = read(MIXTRAL, 128, HOME)
    assert understanding.scenario.machine.n_gpus == 128
    assert "cluster.nodes = 16" in row(understanding, "GPUs").meaning
    many = read(MIXTRAL.replace("batch-size 256", "batch-size 8192"), 8192, DEEPSEEK, vocab=32000).scenario
    assert many.machine.n_gpus == 8192 and many.machine.node == load_scenario(DEEPSEEK).machine.node


def test_gpus_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InputError, match="72 GPUs are no multiple of tp x pp x cp = 1 x 16 x 1"):
        read(MIXTRAL.replace("parallel-size 4", "parallel-size 16"), 72, HOME)
    launch = launch_of(MIXTRAL)
    both = LaunchFile(
        "megatron-lm", None, launch.arguments, Machine(8, 8, {"nodes": "a, line 1"}), {"WORLD_SIZE": "32"}
    )
    with pytest.raises(InputError, match=r"different numbers of GPUs: a, line 1 64 and WORLD_SIZE 32"):
        understand(both, load_scenario(HOME), "a")
    unset = Machine(Unknown("$NNODES", "the variable NNODES is not set"), 8, {"nodes": "a, line 1"})
    with pytest.raises(InputError, match="--env NNODES=VALUE"):
        understand(LaunchFile("megatron-lm", None, launch.arguments, unset), load_scenario(HOME), "a")
    with pytest.raises(InputError, match="fewer than the 8 of one node"):
        understand(LaunchFile("megatron-lm", None, launch.arguments, Machine(1, 4)), load_scenario(HOME), "a")


# -- precision, recomputation, kernels -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {"linear": "bf16", "gradients": "fp32", "gradient_reduce": "fp32", "moments": "fp32"}),
        ("--grad-reduce-in-bf16", {"gradients": "bf16", "gradient_reduce": "bf16"}),
        ("--fp8-format hybrid", {"linear": "fp8", "scaling": "tensor", "activation_cache": "fp8"}),
        ("--fp8-format e4m3 --fp8-recipe blockwise --fp8-param-gather",
         {"linear": "fp8", "scaling": "tile", "parameters": "fp8", "parameter_gather": "fp8"}),
        ("--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16", {"moments": "bf16"}),
        ("--use-precision-aware-optimizer --main-params-dtype fp16", {"master_weights": "bf16"}),
        ("--cross-entropy-loss-fusion --cross-entropy-fusion-impl te", {"loss": "bf16"}),
    ],
)  # fmt: skip
def test_precision(text: str, expected: dict[str, str]) -> None:
    recipe = read(MIXTRAL + text + "\n", 64, HOME).scenario.recipe.model_dump()
    assert {key: recipe[key] for key in expected} == expected


def test_training_in_fp32_is_refused() -> None:
    with pytest.raises(InputError, match="trains in FP32"):
        read(MIXTRAL.replace("--bf16", ""), 64, HOME)


@pytest.mark.parametrize(
    ("text", "policy", "not_priced"),
    [
        ("", "none", ""),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", "full", ""),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 4", "full",
         "--recompute-method"),
        ("--recompute-activations", ("core_attn",), ""),
        ("--recompute-granularity selective", ("core_attn",), ""),
        ("--recompute-granularity selective --recompute-modules moe_act layernorm",
         ("layernorm", "moe_act"), ""),
    ],
)  # fmt: skip
def test_recomputation(text: str, policy: str | tuple[str, ...], not_priced: str) -> None:
    understanding = read(MIXTRAL + text + "\n", 64, HOME)
    assert understanding.scenario.recompute == policy
    unpriced = [
        r.argument for r in understanding.rows if r.kind == "not priced" and "recompute" in r.argument
    ]
    assert unpriced == ([not_priced] if not_priced else [])


@pytest.mark.parametrize(
    ("text", "stage"),
    [
        ("--use-megatron-fsdp", 3),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads", 2),
        ("--use-torch-fsdp2", 3),
        ("", 0),
    ],
)
def test_sharding(text: str, stage: int) -> None:
    plain = MIXTRAL.replace("--use-distributed-optimizer", "").replace("--overlap-param-gather", "")
    plain = plain.replace("--pipeline-model-parallel-size 4", "").replace(
        "--expert-model-parallel-size 8", ""
    )
    scenario = read(plain + text + "\n", 64, HOME).scenario
    assert scenario.parallel.zero_stage == stage
    assert scenario.software.parameters_copied == ("torch" in text)


def test_one_of_two_overlaps_is_not_priced() -> None:
    understanding = read(MIXTRAL.replace("--overlap-param-gather", ""), 64, HOME)
    assert not understanding.scenario.software.overlap_data_parallel
    assert "faster" in row(understanding, "--overlap-grad-reduce", "not priced").meaning


def test_dispatchers() -> None:
    flex = MIXTRAL.replace("alltoall", "flex") + "--moe-deepep-num-sms 24\n"
    assert read(flex, 64, HOME).scenario.communication.model_dump(include={"kernels", "sms"}) == {
        "kernels": "deepep-2025-04", "sms": 24,
    }  # fmt: skip
    gathered = read(MIXTRAL.replace("--moe-token-dispatcher-type alltoall", ""), 64, HOME)
    assert gathered.scenario.communication.kernels == "nccl-allgather"
    hybrid = MIXTRAL.replace("alltoall", "flex") + "--moe-flex-dispatcher-backend hybridep\n"
    hybrid += "--moe-hybridep-num-sms 32 --moe-permute-fusion-into-hybridep\n"
    assert read(hybrid, 64, HOME).scenario.communication.model_dump(
        include={"kernels", "sms", "fused_permutation"}
    ) == {"kernels": "hybridep", "sms": 32, "fused_permutation": True}


def test_routing() -> None:
    text = "--moe-router-force-load-balancing --moe-expert-capacity-factor 1.25\n"
    routing = read(MIXTRAL + text, 64, HOME).scenario.routing
    assert routing.expert_load_cv.value == 0.0
    assert routing.capacity is not None and routing.capacity.factor.value == 1.25


def test_too_many_arguments_are_refused() -> None:
    many = tuple(Argument("--lr", "1", "x") for _ in range(5001))
    with pytest.raises(InputError, match="5001 arguments"):
        understand(LaunchFile("megatron-lm", None, many), load_scenario(HOME), "x")
