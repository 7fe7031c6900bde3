"""Writes a plan as DeepSpeed's JSON configuration, and says what DeepSpeed cannot run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from moesim.simulator.model.recompute import recompute_label
from moesim.simulator.scenario import Scenario
from moesim.simulator.trainers.facts import PlanFacts, facts_of
from moesim.simulator.trainers.trainer import unknown_features


@dataclass(frozen=True, slots=True)
class DeepSpeedPlan:
    """The configuration file's content, arguments of Megatron-DeepSpeed, and what neither can express.

    DeepSpeed takes degrees of tensor and pipeline parallelism from the script that it wraps; `arguments` are
    those of deepspeedai/Megatron-DeepSpeed. `unspelled` also lists the problems of the plan.
    """

    configuration: Mapping[str, Any]
    arguments: tuple[str, ...]
    unspelled: tuple[str, ...]

    def text(self) -> str:
        """The configuration as JSON, which has no comments."""
        return json.dumps(self.configuration, indent=2) + "\n"


def problems(plan: PlanFacts) -> tuple[str, ...]:
    """Reasons why DeepSpeed cannot run the plan as predicted; none where it can."""
    return tuple(_problems(plan))


def _problems(plan: PlanFacts) -> Iterator[str]:
    yield from unknown_features("deepspeed", plan.shape)
    p, recipe, shape = plan.parallel, plan.recipe, plan.shape
    if p.pp > 1 and plan.schedule != "1f1b":
        yield f"schedule {plan.schedule}: DeepSpeed's pipeline engine runs 1F1B only"
    if p.pp > 1 and p.zero_stage > 1:
        yield f"ZeRO stage {p.zero_stage} with pipeline parallelism: DeepSpeed's pipeline allows up to 1"
    if p.pp > 1 and p.ep > 1:
        yield "expert parallelism with pipeline parallelism: DeepSpeed's MoE layers cannot be cut into stages"
    if p.cp > 1:
        yield "context parallelism: DeepSpeed splits sequences over attention heads (Ulysses) instead"
    if p.ep > 1 and p.zero_stage == 3:
        yield "ZeRO stage 3 with expert parallelism: DeepSpeed allows up to 2"
    if p.expert_tp not in (1, p.tp):
        yield f"parallel.expert_tp={p.expert_tp}: DeepSpeed's experts are whole, or split over parallel.tp"
    if any(attention.kind != "gqa" for attention in shape.attention_by_name.values()):
        yield "attention: Megatron-DeepSpeed has multi-head and grouped-query attention only"
    if shape.mtp_layers:
        yield "MTP modules: Megatron-DeepSpeed's model has none"
    if not plan.placement_in_order:
        yield "placement of experts and their replicas: DeepSpeed trains with experts in order"
    if plan.recompute not in ("none", "full") and not _flash_attention_alone(plan):
        yield f"recompute={recompute_label(plan.recompute)}: DeepSpeed recomputes whole layers or nothing"
    if recipe.linear != "bf16" or "fp8" in (
        recipe.parameters,
        recipe.dispatch,
        recipe.combine,
        recipe.gradients,
    ):
        yield "FP8 or FP4: DeepSpeed's configuration has BF16 and FP16 only"
    if recipe.moments != "fp32" or recipe.master_weights != "fp32":
        yield "optimizer states other than FP32: DeepSpeed's BF16 optimizer keeps FP32"


def _flash_attention_alone(plan: PlanFacts) -> bool:
    """Whether only the core attention is recomputed, which flash attention does in any case."""
    return plan.recompute == "attention" and plan.software.attention != "unfused"


def deepspeed_plan(scenario: Scenario) -> DeepSpeedPlan:
    """The plan of a scenario for DeepSpeed with Megatron-DeepSpeed's script.

    Keys: deepspeed.ai/docs/config-json, read by DeepSpeed 0.19.8. Raises InputError for a model or cluster
    that cannot be loaded, and for a fleet.
    """
    if scenario.fleet is not None:
        raise scenario.needs_one_cluster()
    plan = facts_of(scenario)
    p, recipe = plan.parallel, plan.recipe
    dtype = {"fp32": "fp32", "bf16": "bf16"}
    configuration: dict[str, Any] = {
        "train_batch_size": plan.sequences,
        "train_micro_batch_size_per_gpu": p.microbatch,
        "gradient_accumulation_steps": plan.microbatches,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": dtype.get(recipe.gradients, "fp32")},
        "communication_data_type": dtype.get(recipe.gradient_reduce, "fp32"),
        "zero_optimization": {
            "stage": p.zero_stage,
            "overlap_comm": plan.software.overlap_data_parallel,
            "contiguous_gradients": True,
        },
    }
    if p.zero_stage == 3:
        configuration["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    if plan.recompute == "full":
        configuration["activation_checkpointing"] = {"partition_activations": False}
    return DeepSpeedPlan(configuration, _arguments(plan), problems(plan))


def _arguments(plan: PlanFacts) -> tuple[str, ...]:
    p = plan.parallel
    words = ["--deepspeed", "--tensor-model-parallel-size", str(p.tp)]
    words += ["--pipeline-model-parallel-size", str(p.pp), "--zero-stage", str(p.zero_stage)]
    if p.pp == 1:
        words.append("--no-pipeline-parallel")
    if p.sequence_parallel:
        words.append("--sequence-parallel")
    if p.ep > 1:
        words += ["--moe-expert-parallel-size", str(p.ep)]
    if plan.recompute == "full":
        words.append("--deepspeed-activation-checkpointing")
    return tuple(words)
