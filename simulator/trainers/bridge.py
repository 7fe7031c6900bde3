"""Megatron-Bridge: what it can run of a plan, and a plan as settings of its configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from msgspec import Struct

from moesim.simulator.dispatchers.registry import dispatcher
from moesim.simulator.layout.parallel import hides_experts, repeats_experts
from moesim.simulator.scenario import Scenario
from moesim.simulator.schedules import SCHEDULES
from moesim.simulator.trainers.export import ConfigurationFile, unwritten
from moesim.simulator.trainers.megatron.arguments import (
    EARLY_ORDER,
    STRATEGIES,
    other_order,
    recomputed_modules,
)
from moesim.simulator.trainers.megatron.layout import layout_text
from moesim.simulator.trainers.rules import PlanFacts, facts_of
from moesim.simulator.trainers.trainer import unknown_features

REVISION = "067f987"
"""Commit of NVIDIA-NeMo/Megatron-Bridge whose configuration the names were read in."""

PRECISIONS: Mapping[tuple[str, str], str] = {
    ("bf16", "tile"): "bf16_mixed",
    ("bf16", "tensor"): "bf16_mixed",
    ("fp8", "tile"): "bf16_with_fp8_subchannel_scaling_mixed",
    ("fp8", "tensor"): "bf16_with_fp8_current_scaling_mixed",
    ("fp8", "mx"): "bf16_with_mxfp8_mixed",
    ("fp4", "tile"): "bf16_with_nvfp4_mixed",
}
"""Mixed-precision recipe by the format of linear layers and the scales (training/mixed_precision.py)."""

WRITTEN = ("software.overlap_data_parallel", "software.overlap_tensor_parallel")
"""Keys of `export.SETTINGS` that the settings hold, or that `_unspelled` names."""

Value = bool | int | str | tuple[str, ...] | None


class Overrides(Struct, frozen=True):
    """Values by dotted name of `ConfigContainer`, and sentences on what they cannot express.

    Names in `types` are of torch (torch.bfloat16), all other texts are strings.
    """

    values: Mapping[str, Value]
    types: Mapping[str, str]
    unspelled: tuple[str, ...]

    def text(self) -> str:
        """A Python module with a function `apply_plan(config)` that sets the values."""
        written = {k: repr(list(v) if isinstance(v, tuple) else v) for k, v in self.values.items()}
        written |= {name: f"torch.{value}" for name, value in self.types.items()}
        head = f"# Settings of Megatron-Bridge@{REVISION} for a recipe of the same model, written by moesim."
        return "\n".join(
            [
                head,
                *(f"# not spelled: {sentence}" for sentence in self.unspelled),
                *(["import torch", "", ""] if self.types else []),
                "def apply_plan(config):",
                '    """Set the plan in a ConfigContainer."""',
                *(f"    config.{name} = {value}" for name, value in written.items()),
                "",
            ]
        )


def bridge_problems(plan: PlanFacts, version: str = REVISION) -> Iterator[str]:
    """Reasons why Megatron-Bridge cannot run the plan as predicted; there is one supported version."""
    yield from unknown_features("bridge", plan.shape)
    p, recipe = plan.parallel, plan.recipe
    spec = SCHEDULES.get(plan.schedule)
    if p.pp > 1 and (spec is None or "megatron-lm" not in spec.names_elsewhere):
        yield f"schedule {plan.schedule}: Megatron-Core runs 1F1B and interleaved 1F1B only"
    elif p.pp > 1 and p.vpp > 1 and plan.microbatches % p.pp:
        yield f"{plan.microbatches} micro-batches: interleaved 1F1B needs a multiple of parallel.pp={p.pp}"
    if hides_experts(plan.schedule):
        yield from _overlap_problems(plan)
    if not plan.placement_in_order:
        yield "placement of experts and their replicas: Megatron-Core trains with experts in order"
    if plan.recompute == "op":
        yield "recompute=op: Megatron-Core recomputes modules or layers, not operators"
    if plan.recompute == "deepseek-v3":
        yield "recompute=deepseek-v3: no attention output in 12 bits (E5M6); nearest: selective"
    graphed = {"attention", "router", "experts"}.intersection(plan.software.cuda_graphs)
    if plan.recompute == "full" and graphed:
        yield "recompute=full: Megatron-Core repeats layers under CUDA graphs only with one of the whole step"
    if p.tp > 1 and plan.shape.moe is not None and not p.sequence_parallel:
        yield "tensor parallelism of experts needs parallel.sequence_parallel: true"
    known = {
        "head": ("bf16",), "dispatch": ("bf16",), "combine": ("bf16",), "moments": ("fp32", "bf16"),
        "gradients": ("fp32",), "master_weights": ("fp32",), "activation_cache": (recipe.linear, "bf16"),
    }  # fmt: skip
    for key, allowed in known.items():
        if getattr(recipe, key) not in allowed:
            yield f"precision.{key}={getattr(recipe, key)}: Megatron-Core has {' and '.join(allowed)} only"


def _overlap_problems(plan: PlanFacts) -> Iterator[str]:
    """Reasons against expert overlap: the checks of training/comm_overlap.py and of Megatron-Core."""
    p, overlap = plan.parallel, f"schedule {plan.schedule}"
    if p.pp == 1 and p.vpp > 1:
        yield f"parallel.vpp={p.vpp}: virtual stages of Megatron-Core need two pipeline ranks"
    if repeats_experts(plan.recompute):
        yield f"{overlap}: expert overlap does not repeat experts; name recompute modules without moe"
    if plan.shape.mtp_layers > 1:
        yield f"{overlap}: expert overlap takes one MTP module, and the model has {plan.shape.mtp_layers}"
    if dispatcher(plan.kernels).words.get("megatron") == "allgather":
        yield f"{overlap}: expert overlap takes alltoall and flex only; use communication.kernels=nccl"
    if p.zero_stage > 1:
        yield f"{overlap}: expert overlap of pipeline stages takes no Megatron-FSDP; use zero_stage 1"
    if {"experts", "all"} & set(plan.software.cuda_graphs):
        yield f"{overlap}: expert overlap takes no CUDA graphs over the experts"


def bridge_overrides(scenario: Scenario) -> Overrides:
    """The plan of a scenario as settings of a Megatron-Bridge recipe for the same model.

    Names: NVIDIA-NeMo/Megatron-Bridge@067f987, training/config.py and training/mixed_precision.py, and
    Megatron-Core's TransformerConfig. Raises InputError for a model or cluster that cannot be loaded, and for
    a fleet.
    """
    if scenario.fleet is not None:
        raise scenario.needs_one_cluster()
    plan = facts_of(scenario)
    p, recipe = plan.parallel, plan.recipe
    values: dict[str, Value] = {
        "model.tensor_model_parallel_size": p.tp,
        "model.pipeline_model_parallel_size": p.pp,
        "model.context_parallel_size": p.cp,
        "model.sequence_parallel": p.sequence_parallel,
        "train.micro_batch_size": p.microbatch,
        "train.global_batch_size": plan.sequences,
        "model.seq_length": plan.sequence_length,
        "dataset.seq_length": plan.sequence_length,
        "model.mtp_num_layers": plan.shape.mtp_layers or None,
        "mixed_precision": PRECISIONS[recipe.linear, recipe.scaling],
        "model.recompute_granularity": None,
    }
    if plan.shape.moe is not None:
        values["model.expert_model_parallel_size"] = p.ep
        values["model.expert_tensor_parallel_size"] = p.expert_tp
        values["model.moe_grouped_gemm"] = True
        if p.ep > 1:
            moves = dispatcher(plan.kernels)
            backend = moves.words.get("megatron", "deepep")
            values["model.moe_token_dispatcher_type"] = backend if moves.by_library else "flex"
            if not moves.by_library:
                values["model.moe_flex_dispatcher_backend"] = backend
                values[f"model.moe_{backend}_num_sms"] = plan.sms
    if p.pp > 1:
        values["model.virtual_pipeline_model_parallel_size"] = p.vpp if p.vpp > 1 else None
        if plan.layers is not None and len(plan.layers) == p.pp * p.vpp:
            values["model.pipeline_model_parallel_layout"] = layout_text(plan.layers, plan.shape.mtp_layers)
    values |= _sharding(plan) | _recompute(plan) | _overlap(scenario)
    types = {}
    if recipe.moments == "bf16":
        values["optimizer.use_precision_aware_optimizer"] = True
        types = {"optimizer.exp_avg_dtype": "bfloat16", "optimizer.exp_avg_sq_dtype": "bfloat16"}
    order = other_order(scenario, REVISION)
    missing = (
        *bridge_problems(plan),
        *_unspelled(plan),
        *order,
        *unwritten(scenario, WRITTEN, "Megatron-Bridge"),
    )
    return Overrides(values, types, missing)


def _sharding(plan: PlanFacts) -> dict[str, Value]:
    stage, overlap = plan.parallel.zero_stage, plan.software.overlap_data_parallel
    values: dict[str, Value] = {
        "ddp.use_distributed_optimizer": stage > 0,
        "optimizer.use_distributed_optimizer": stage > 0,
        "ddp.overlap_grad_reduce": overlap,
        "ddp.overlap_param_gather": overlap and stage > 0,
        "ddp.grad_reduce_in_fp32": plan.recipe.gradient_reduce == "fp32",
    }
    if stage > 1:
        values["ddp.use_megatron_fsdp"] = True
        values["ddp.data_parallel_sharding_strategy"] = STRATEGIES[stage]
        values["checkpoint.ckpt_format"] = "fsdp_dtensor"
    return values


def _overlap(scenario: Scenario) -> dict[str, Value]:
    """Expert overlap, and user buffers of tensor parallelism, in a recipe that has a `comm_overlap`."""
    values: dict[str, Value] = {}
    if scenario.parallel.tp > 1 and scenario.software.overlap_tensor_parallel == "userbuffers":
        values["comm_overlap.tp_comm_overlap"] = True
    if scenario.communication.overlap_shared_experts and not hides_experts(scenario.schedule):
        values["model.moe_shared_expert_overlap"] = True
    if hides_experts(scenario.schedule):
        values["comm_overlap.overlap_moe_expert_parallel_comm"] = True
        values["comm_overlap.delay_wgrad_compute"] = scenario.communication.delay_weight_gradients
        if scenario.communication.overlap == EARLY_ORDER:
            values["model.ep_overlap_early_attn_memory_release"] = True
    return values


def _recompute(plan: PlanFacts) -> dict[str, Value]:
    if plan.recompute in ("none", "op") or plan.flash_recomputes_alone:
        return {}
    if plan.recompute == "full":
        return {
            "model.recompute_granularity": "full",
            "model.recompute_method": "uniform",
            "model.recompute_num_layers": 1,
        }
    modules = recomputed_modules(plan.recompute, plan.shape)
    return {"model.recompute_granularity": "selective", "model.recompute_modules": modules}


def _unspelled(plan: PlanFacts) -> Iterator[str]:
    p = plan.parallel
    if p.pp > 1 and plan.layers is None:
        yield "stage layout: the scenario leaves it to moesim's balance; state stages.layers"
    elif p.pp > 1 and plan.layers is not None and len(plan.layers) != p.pp * p.vpp:
        yield "stage layout: its stages belong to a schedule that Megatron-Core has not"
    if plan.shape.moe is not None and p.ep > 1 and "megatron" not in dispatcher(plan.kernels).words:
        yield f"communication.kernels={plan.kernels}: Megatron-Core calls DeepEP's normal kernels"
    if plan.recompute in ("selective", "deepseek-v3") and plan.shape.dense_ffn is not None:
        yield "SwiGLU outputs of dense layers: Megatron-Core recomputes those of experts only"
    if plan.software.overlap_tensor_parallel not in ("none", "userbuffers"):
        yield "overlap of tensor-parallel collectives: set comm_overlap.tp_comm_overlap in the recipe"


def bridge_export(scenario: Scenario, version: str) -> ConfigurationFile:
    """The settings of a scenario's plan; raises InputError for a model or cluster that cannot be loaded."""
    settings = bridge_overrides(scenario)
    return ConfigurationFile(f"Megatron-Bridge {version}", settings.text(), settings.unspelled)
