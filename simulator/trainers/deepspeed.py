"""DeepSpeed: what it can run of a plan, and a plan as its JSON configuration."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct

from moesim.simulator.dispatchers.registry import dispatcher
from moesim.simulator.model.recompute import recompute_label
from moesim.simulator.scenario import Scenario
from moesim.simulator.trainers.export import ConfigurationFile, unwritten
from moesim.simulator.trainers.rules import PlanFacts, facts_of
from moesim.simulator.trainers.trainer import unknown_features

WRITTEN = ("routing.capacity", "software.attention", "software.dropout", "software.overlap_data_parallel")
"""Keys of `export.SETTINGS` that the configuration or the arguments hold."""


class DeepSpeedPlan(Struct, frozen=True):
    """The configuration file's content, arguments of Megatron-DeepSpeed, and what neither can express.

    DeepSpeed takes the degrees of parallelism and the layers that are recomputed from the script that it
    wraps; `arguments` are those of deepspeedai/Megatron-DeepSpeed beside the sizes of the model. `unspelled`
    also lists the problems of the plan.
    """

    configuration: Mapping[str, Any]
    arguments: tuple[str, ...]
    unspelled: tuple[str, ...]

    def text(self) -> str:
        """The configuration as JSON, which has no comments."""
        return json.dumps(self.configuration, indent=2) + "\n"

    def script(self, label: str) -> str:
        """A shell fragment that writes the configuration to `ds_config.json` and sets TRAINING_ARGS."""
        comments = "".join(f"# not spelled: {sentence}\n" for sentence in self.unspelled)
        flags = " ".join(self.arguments).replace(" --", "\n    --")
        return (
            f"# {label} with Megatron-DeepSpeed's script, whose arguments on the model are yours.\n{comments}"
            f"cat > ds_config.json <<'JSON'\n{self.text()}JSON\n"
            f"TRAINING_ARGS=(\n    {flags}\n)\n"
        )


def deepspeed_problems(plan: PlanFacts, version: str = "") -> Iterator[str]:
    """Reasons why DeepSpeed cannot run the plan as predicted; there is one supported version."""
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
    yield from _expert_problems(plan)
    if not plan.placement_in_order:
        yield "placement of experts and their replicas: DeepSpeed trains with experts in order"
    if plan.recompute not in ("none", "full") and not plan.flash_recomputes_alone:
        yield f"recompute={recompute_label(plan.recompute)}: DeepSpeed recomputes whole layers or nothing"
    kept = (recipe.parameters, recipe.dispatch, recipe.combine, recipe.gradients)
    if recipe.linear != "bf16" or "fp8" in kept:
        yield "FP8 or FP4: DeepSpeed's configuration has BF16 and FP16 only"
    if recipe.moments != "fp32" or recipe.master_weights != "fp32":
        yield "optimizer states other than FP32: DeepSpeed's BF16 optimizer keeps FP32"


def _expert_problems(plan: PlanFacts) -> Iterator[str]:
    """What DeepSpeed's MoE layer (deepspeed/moe) and its arguments cannot do."""
    moe = plan.shape.moe
    if moe is None:
        return
    dense = sum(not plan.shape.is_moe_layer(layer) for layer in range(plan.shape.n_layers))
    if dense:
        yield f"{dense} dense layers: Megatron-DeepSpeed repeats experts every --expert-interval layers"
    if moe.shared_experts:
        yield "shared experts: DeepSpeed's MoE layer has routed experts only"
    if moe.scoring != "softmax" or moe.score_bias or moe.group_limited:
        yield "the router: DeepSpeed's gate has softmax scores without biases and groups"
    if plan.parallel.ep > 1 and "deepspeed" not in dispatcher(plan.kernels).words:
        yield (
            f"communication.kernels={plan.kernels}: DeepSpeed's MoE layer sends tokens with NCCL's "
            "all-to-all; use communication.kernels=nccl"
        )


def deepspeed_plan(scenario: Scenario) -> DeepSpeedPlan:
    """The plan of a scenario for DeepSpeed with Megatron-DeepSpeed's script.

    Keys: deepspeed.ai/docs/config-json, read by DeepSpeed 0.19.8. Raises InputError for a model or cluster
    that cannot be loaded, and for a fleet.
    """
    if scenario.fleet is not None:
        raise scenario.needs_one_cluster()
    plan = facts_of(scenario)
    p, recipe, capacity = plan.parallel, plan.recipe, scenario.routing.capacity
    configuration: dict[str, Any] = {
        "train_batch_size": plan.sequences,
        "train_micro_batch_size_per_gpu": p.microbatch,
        "gradient_accumulation_steps": plan.microbatches,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "bf16" if recipe.gradients == "bf16" else "fp32"},
        "communication_data_type": "bf16" if recipe.gradient_reduce == "bf16" else "fp32",
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
    if p.pp > 1:
        interval = int(plan.recompute == "full")
        configuration["pipeline"] = {"stages": p.pp, "activation_checkpoint_interval": interval}
    written = WRITTEN if capacity is None or capacity.per == "expert" else WRITTEN[1:]
    missing = [*deepspeed_problems(plan)]
    # Megatron-DeepSpeed cuts its model by the number of layers (`partition_method="type:transformer"`).
    if p.pp > 1 and plan.layers is None:
        missing.append(
            "stage layout: the scenario leaves it to moesim's balance; DeepSpeed's stages have equal layers"
        )
    elif p.pp > 1 and len(set(plan.layers or ())) > 1:
        missing.append(
            f"stages.layers={list(plan.layers or ())}: DeepSpeed's stages have equal numbers of layers"
        )
    missing += unwritten(scenario, written, "DeepSpeed")
    return DeepSpeedPlan(configuration, _arguments(scenario, plan), tuple(missing))


def _arguments(scenario: Scenario, plan: PlanFacts) -> tuple[str, ...]:
    """Degrees, batch, recomputation and experts; flags of Megatron-DeepSpeed@4efb479d, megatron/arguments.py.

    DeepSpeed gets the experts from the model: `ep_size`, `k` and capacity of its MoE layer.
    """
    p, moe, capacity = plan.parallel, plan.shape.moe, scenario.routing.capacity
    words = ["--deepspeed", "--deepspeed_config", "ds_config.json"]
    words += ["--tensor-model-parallel-size", str(p.tp)]
    words += ["--pipeline-model-parallel-size", str(p.pp), "--zero-stage", str(p.zero_stage)]
    words += ["--micro-batch-size", str(p.microbatch), "--global-batch-size", str(plan.sequences)]
    words += ["--seq-length", str(plan.sequence_length), "--bf16"]
    words += ["--no-pipeline-parallel"] if p.pp == 1 else []
    words += ["--sequence-parallel"] if p.sequence_parallel else []
    if plan.recompute == "full":
        words += ["--checkpoint-activations", "--deepspeed-activation-checkpointing"]
    words += ["--use-flash-attn-v2"] if plan.software.attention != "unfused" else []
    dropout = "0.1" if plan.software.dropout else "0.0"
    words += ["--attention-dropout", dropout, "--hidden-dropout", dropout]
    if moe is None:
        return tuple(words)
    words += ["--num-experts", str(moe.experts), "--topk", str(moe.top_k), "--expert-interval", "1"]
    words += ["--moe-expert-parallel-size", str(p.ep), "--create-moe-param-group"]
    words += ["--enable-expert-tensor-parallelism"] if p.expert_tp > 1 else []
    if capacity is None:
        return (*words, "--disable-moe-token-dropping")
    return (*words, "--moe-train-capacity-factor", f"{capacity.factor.value:g}")


def deepspeed_export(scenario: Scenario, version: str) -> ConfigurationFile:
    """The configuration of a scenario's plan; raises InputError for what cannot be loaded, and a fleet."""
    plan, label = deepspeed_plan(scenario), f"DeepSpeed {version}"
    return ConfigurationFile(label, plan.script(label), plan.unspelled, arguments=plan.arguments)
