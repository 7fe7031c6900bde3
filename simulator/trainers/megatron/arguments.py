"""A plan as Megatron-LM arguments: exactly the plan that was priced, with what they cannot express."""

from __future__ import annotations

from moesim.hwmodels.accelerator import Accelerator
from moesim.hwmodels.errors import InputError
from moesim.simulator.dispatchers.registry import dispatcher
from moesim.simulator.frameworks.software import GraphPart, Software
from moesim.simulator.layout.parallel import hides_experts
from moesim.simulator.model.precision import Precision
from moesim.simulator.model.recompute import Module, Recompute
from moesim.simulator.model.repeated import modules_of_model
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.predict.step import prepare
from moesim.simulator.scenario import Scenario
from moesim.simulator.scenario.parallel import ParallelPlan
from moesim.simulator.schedules.interleaved import per_round
from moesim.simulator.trainers.export import SETTINGS, VARIABLES, Arguments, Words, unwritten
from moesim.simulator.trainers.megatron.layout import layout_text
from moesim.simulator.trainers.megatron.model_arguments import (
    CLAMPED,
    SWIGLU,
    expert_arguments,
    model_arguments,
)
from moesim.simulator.trainers.rules import PlanFacts, facts_of
from moesim.simulator.trainers.trainer import Writer, build_trainer

# -- environment -------------------------------------------------------------------------------------
# Environment variables that Megatron-LM demands for a plan.

FREE_ARCHITECTURES = frozenset({"Blackwell", "Blackwell Ultra", "Rubin"})
"""Architectures on which Megatron-LM asks for no single hardware queue (compute capability from 10 on)."""


def megatron_environment(plan: PlanFacts, accelerator: Accelerator) -> dict[str, str]:
    """Variables without which Megatron-LM stops at its own checks.

    With tensor or context parallelism it demands CUDA_DEVICE_MAX_CONNECTIONS=1 before Blackwell, and with
    FSDP (ZeRO stages 2 and 3) any other value; for expert overlap alone it advises 32
    (NVIDIA/Megatron-LM@d98e8a6 megatron/training/arguments.py).
    """
    split = plan.parallel.tp > 1 or plan.parallel.cp > 1
    if split and plan.parallel.zero_stage < 2 and accelerator.architecture not in FREE_ARCHITECTURES:
        return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    return {"CUDA_DEVICE_MAX_CONNECTIONS": "32"} if hides_experts(plan.schedule) and not split else {}


# -- plan arguments ----------------------------------------------------------------------------------
# Parallelism, dispatcher, precision, recompute and kernels as Megatron-LM arguments.

STRATEGIES = {2: "optim_grads", 3: "optim_grads_params"}
"""Value of `--data-parallel-sharding-strategy` for a ZeRO stage of Megatron-FSDP."""

GRAPH_MODULES: dict[GraphPart, str] = {"attention": "attn", "router": "moe_router", "experts": "moe"}
"""Value of `--cuda-graph-modules` for a part of a layer."""

OVERLAP, DELAY = "--overlap-moe-expert-parallel-comm", "--delay-wgrad-compute"
EARLY, EARLY_ORDER = "--ep-overlap-early-attn-memory-release", "megatron-early-attention"
"""An argument of 0.20, and its `communication.overlap`."""

NEAREST: tuple[Module, ...] = ("layernorm", "mla_up_proj", "moe_act")
"""Modules that come nearest to the policy `selective`."""


def parallel_arguments(plan: ParallelPlan, shape: ModelShape) -> dict[str, Words]:
    """Degrees of parallelism and the sharding of parameters, gradients and optimizer states."""
    spelled: dict[str, Words] = {
        "--tensor-model-parallel-size": str(plan.tp),
        "--pipeline-model-parallel-size": str(plan.pp),
        "--context-parallel-size": str(plan.cp),
    }
    if shape.moe is not None:
        spelled["--expert-model-parallel-size"] = str(plan.ep)
        spelled["--expert-tensor-parallel-size"] = str(plan.expert_tp)
    if plan.sequence_parallel:
        spelled["--sequence-parallel"] = None
    if plan.zero_stage:
        spelled["--use-distributed-optimizer"] = None
    if plan.zero_stage > 1:
        spelled["--use-megatron-fsdp"] = None
        spelled["--data-parallel-sharding-strategy"] = STRATEGIES[plan.zero_stage]
    return spelled


def dispatcher_arguments(scenario: Scenario, shape: ModelShape, version: str) -> dict[str, Words]:
    """The dispatcher of tokens to experts as it is priced: DeepEP's kernels, or NCCL's all-to-all.

    Experts on one GPU need no dispatch between GPUs.
    """
    if shape.moe is None:
        return {}
    plan = scenario.parallel
    fused: dict[str, Words] = {} if scenario.software.kernels == "eager" else {"--moe-permute-fusion": None}
    if scenario.software.router == "fused":
        fused["--moe-router-fusion"] = None
    if scenario.software.expert_kernels == "fused":
        fused["--use-transformer-engine-op-fuser"] = None
    kind = dispatcher(scenario.communication.kernels)
    if plan.ep == 1:
        return {"--moe-token-dispatcher-type": "alltoall", **fused}
    word = kind.words.get("megatron")
    if word is not None and kind.by_library:
        return {"--moe-token-dispatcher-type": word, **fused}
    sms = str(scenario.communication.sms)
    spelled: dict[str, Words] = {"--moe-token-dispatcher-type": "flex"}
    if word is None or (version == "0.14" and word != "deepep"):
        calls = "calls DeepEP's normal kernels; use communication.kernels=deepep-2025-04"
        older = "0.14 has no such dispatcher; use communication.kernels=deepep-2025-04, or Megatron-LM 0.20"
        raise InputError(
            f"communication.kernels={scenario.communication.kernels}: Megatron-LM "
            f"{calls if word is None else older}",
            key="communication.kernels",
            nearest=("deepep-2025-04",),
        )
    if version == "0.14":
        spelled |= {"--moe-enable-deepep": None, "--moe-deepep-num-sms": sms}
    else:
        spelled |= {"--moe-flex-dispatcher-backend": word, "--moe-flex-dispatcher-num-sms": sms}
        if scenario.communication.fused_permutation:
            spelled["--moe-permute-fusion-into-hybridep"] = None
    return spelled | fused


def overlap_arguments(scenario: Scenario) -> dict[str, Words]:
    """Overlap of the transfers of experts: behind the other micro-batch of a pair, or shared experts."""
    if not hides_experts(scenario.schedule):
        shared = scenario.communication.overlap_shared_experts and scenario.parallel.ep > 1
        return {"--moe-shared-expert-overlap": None} if shared else {}
    spelled: dict[str, Words] = {OVERLAP: None}
    if scenario.communication.delay_weight_gradients:
        spelled[DELAY] = None
    if scenario.communication.overlap == EARLY_ORDER:
        spelled[EARLY] = None
    return spelled


def other_order(scenario: Scenario, version: str) -> list[str]:
    """Sentences on an order inside the pairs of expert overlap that a version does not run."""
    order = scenario.communication.overlap
    known = ("schedule", "megatron", *([] if version == "0.14" else [EARLY_ORDER]))
    if not hides_experts(scenario.schedule) or order in known:
        return []
    text = order if isinstance(order, str) else "an order of the scenario's own"
    return [f"communication.overlap={text}: the run has Megatron-LM's order; use megatron"]


def precision_arguments(recipe: Precision, zero_stage: int) -> dict[str, Words]:
    """Formats of GEMMs, parameters, gradients and moments."""
    spelled: dict[str, Words] = {"--bf16": None}
    if recipe.linear == "fp4":
        spelled |= {"--fp4-format": "e2m1", "--fp4-recipe": "nvfp4"}
    if recipe.linear == "fp8":
        spelled["--fp8-format"] = "hybrid" if recipe.scaling == "tensor" else "e4m3"
        spelled["--fp8-recipe"] = {"tile": "blockwise", "tensor": "delayed", "mx": "mxfp8"}[recipe.scaling]
        if recipe.parameters == "fp8" or (zero_stage and recipe.parameter_gather == "fp8"):
            spelled["--fp8-param-gather"] = None
    small_gradients = recipe.gradients == "bf16"
    if recipe.moments != "fp32" or small_gradients:
        spelled["--use-precision-aware-optimizer"] = None
        spelled["--exp-avg-dtype"] = recipe.moments
        spelled["--exp-avg-sq-dtype"] = recipe.moments
    if small_gradients:
        spelled["--main-grads-dtype"] = "bf16"
        spelled["--grad-reduce-in-bf16"] = None
    else:
        spelled["--accumulate-allreduce-grads-in-fp32"] = None
    return spelled


def recompute_arguments(recompute: Recompute, shape: ModelShape) -> dict[str, Words]:
    """What the backward pass computes again: whole layers, or modules."""
    if recompute == "full":
        whole = {"--recompute-granularity": "full", "--recompute-method": "uniform"}
        return {**whole, "--recompute-num-layers": "1"}
    modules = recomputed_modules(recompute, shape)
    if not modules:
        return {}
    return {"--recompute-granularity": "selective", "--recompute-modules": modules}


def recomputed_modules(recompute: Recompute, shape: ModelShape) -> tuple[Module, ...]:
    """Megatron-LM's modules for a choice of recompute; for a policy the nearest that the model has."""
    if not isinstance(recompute, str):
        return recompute
    if recompute == "attention":
        return ("core_attn",)
    if recompute not in ("selective", "deepseek-v3", "op"):
        return ()
    return tuple(module for module in NEAREST if module in modules_of_model(shape))


def software_arguments(software: Software, plan: ParallelPlan, shape: ModelShape) -> dict[str, Words]:
    """Attention kernel, dropout, loss, overlap of collectives, CUDA graphs."""
    dropout = "0.1" if software.dropout else "0.0"
    spelled: dict[str, Words] = {
        "--transformer-impl": "transformer_engine",
        "--attention-dropout": dropout,
        "--hidden-dropout": dropout,
    }
    if software.attention == "unfused":
        spelled["--attention-backend"] = "unfused"
    if software.loss != "chain":
        spelled["--cross-entropy-loss-fusion"] = None
        spelled["--cross-entropy-fusion-impl"] = "te" if software.loss == "fused" else "native"
    if software.overlap_data_parallel:
        spelled["--overlap-grad-reduce"] = None
        if plan.zero_stage:
            spelled["--overlap-param-gather"] = None
        if software.overlap_optimizer:
            spelled["--overlap-param-gather-with-optimizer-step"] = None
        if software.bucket_parameters is not None:
            spelled["--ddp-bucket-size"] = str(software.bucket_parameters)
    if plan.tp > 1 and software.overlap_tensor_parallel in ("full", "userbuffers"):
        spelled["--tp-comm-overlap"] = None
    modules = tuple(GRAPH_MODULES[part] for part in software.cuda_graphs if part in GRAPH_MODULES)
    if "all" in software.cuda_graphs:
        spelled["--cuda-graph-impl"] = "full_iteration"
    elif modules:
        spelled["--cuda-graph-impl"] = "transformer_engine"
        spelled["--cuda-graph-modules"] = modules
    return spelled


UNWRITTEN = ("parallel.shard_group", "parallel.shard_optimizer_over_groups", "software.static_experts")
"""Keys of `export.SETTINGS` that the arguments do not hold."""


def megatron_arguments(scenario: Scenario, version: str = "0.20") -> Arguments:
    """Arguments of Megatron-LM's `pretrain_gpt.py` for a scenario's model, batch and plan.

    Stages are always written out, as they were priced. `unspelled` has a sentence for everything in which
    the run would differ from the prediction. Flags: `megatron/training/arguments.py` of the version. Raises
    InputError for a model that cannot be loaded, a plan that cannot be simulated and an unknown version.
    """
    trainer = build_trainer("megatron", version, Writer(megatron_arguments))
    shape, facts, p = scenario.shape, facts_of(scenario), scenario.parallel
    runs_schedule = facts.values(trainer.project)["schedule_there"] is not None
    adapted, changes = trainer.adapted(scenario)
    unspelled = [*trainer.problems_of(adapted), *changes]
    if scenario.routing.capacity is not None:
        unspelled.append("rows above a capacity are dropped: the arguments ask for a run that drops none")
    activation = None if shape.numerics is None else shape.numerics.activation
    if activation not in (*SWIGLU, CLAMPED) and shape.ffn_gated:
        unspelled.append(
            f"the activation {activation}: the arguments ask for SwiGLU, whose kernels are as long"
        )
    unspelled += other_order(scenario, trainer.version)
    unspelled += unwritten(scenario, set(SETTINGS) - set(UNWRITTEN), trainer.label)
    groups: dict[str, dict[str, Words]] = {
        "model": model_arguments(shape),
        "experts": {} if shape.moe is None else expert_arguments(shape, shape.moe),
        "parallel": parallel_arguments(scenario.parallel, shape),
        "dispatcher": dispatcher_arguments(scenario, shape, trainer.version) | overlap_arguments(scenario),
        "precision": precision_arguments(scenario.recipe, scenario.parallel.zero_stage),
        "recompute": recompute_arguments(scenario.recompute, shape),
        "software": software_arguments(scenario.software, scenario.parallel, shape),
        "batch": _batch(scenario),
        "optimizer": OPTIMIZER,
        "data": _data(scenario.parallel.zero_stage),
    }
    if runs_schedule and scenario.parallel.pp > 1:
        # The stages as they were priced: stated, or balanced as the prediction balances them.
        layers = scenario.stages.layers or prepare(scenario).stages.layers_per_stage
        layout = layout_text(layers, shape.mtp_layers, scenario.stages.mtp)
        groups["parallel"]["--pipeline-model-parallel-layout"] = layout
        if scenario.parallel.vpp > 1:
            group = per_round(scenario.parallel.pp, facts.microbatches)
            groups["parallel"]["--microbatch-group-size-per-virtual-pipeline-stage"] = str(group)
    words = [word for group in groups.values() for word in group.values() if isinstance(word, str)]
    used = {word[1:] for word in words if word.startswith("$")}
    variables = {name: text for name, text in VARIABLES.items() if name in used}
    return Arguments(
        trainer.label,
        f"{scenario.name}, TP{p.tp} PP{p.pp} EP{p.ep} CP{p.cp} VPP{p.vpp} {scenario.schedule}",
        {name: group for name, group in groups.items() if group},
        variables,
        megatron_environment(facts, scenario.machines[0].accelerator),
        facts.n_gpus,
        "${MEGATRON_PATH}/pretrain_gpt.py",
        tuple(unspelled),
        (
            f"{facts.n_gpus:,} GPUs, {facts.replicas} replicas, {facts.microbatches} micro-batches",
            "Learning-rate schedule, weight decay, betas and clipping do not change the time: set your own.",
        ),
    )


def _batch(scenario: Scenario) -> dict[str, Words]:
    batch, run = scenario.batch, scenario.run
    steps = -(-round(run.tokens) // (batch.sequences * batch.sequence_length))
    return {
        "--micro-batch-size": str(scenario.parallel.microbatch),
        "--global-batch-size": str(batch.sequences),
        "--seq-length": str(batch.sequence_length),
        "--max-position-embeddings": str(batch.sequence_length),
        "--train-samples": str(steps * batch.sequences),
    }


OPTIMIZER: dict[str, Words] = {
    "--optimizer": "adam", "--lr": "$LEARNING_RATE", "--lr-decay-style": "cosine",
    "--lr-warmup-fraction": "0.01", "--weight-decay": "0.1", "--adam-beta1": "0.9", "--adam-beta2": "0.95",
    "--clip-grad": "1.0", "--init-method-std": "0.02",
}  # fmt: skip
"""What does not change the time of a step."""


def _data(zero_stage: int) -> dict[str, Words]:
    return {
        "--tokenizer-type": "HuggingFaceTokenizer",
        "--tokenizer-model": "$TOKENIZER_MODEL",
        "--data-path": "$DATA_PATH",
        "--split": "99,1,0",
        "--no-create-attention-mask-in-dataloader": None,
        "--save": "$CHECKPOINT_DIR",
        "--load": "$CHECKPOINT_DIR",
        "--save-interval": "500",
        "--ckpt-format": "fsdp_dtensor" if zero_stage > 1 else "torch_dist",
        "--log-interval": "1",
        "--log-throughput": None,
        "--eval-iters": "0",
        "--distributed-timeout-minutes": "60",
    }
