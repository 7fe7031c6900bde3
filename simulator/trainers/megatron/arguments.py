"""Writes a plan as Megatron-LM arguments, and lists the parts that Megatron-LM cannot express."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from moesim.simulator.model.shape import ModelShape
from moesim.simulator.scenario import Scenario
from moesim.simulator.schedules import SCHEDULES
from moesim.simulator.trainers.megatron.layout import layout_text

LISTS = {"--recompute-modules"}
"""Flags whose value is several words, each its own argument."""

MODULES = {"attention": "core_attn", "selective": "layernorm mla_up_proj moe_act"}
"""Value of Megatron-LM's `--recompute-modules` for a recompute policy."""


@dataclass(frozen=True, slots=True)
class Spelled:
    """Arguments by flag (None for a flag without a value), and sentences on what they cannot express."""

    arguments: dict[str, str | None]
    unspelled: tuple[str, ...]

    def text(self) -> str:
        """One argument a line with shell continuations, below comments on what is not expressed."""
        lines = [
            flag if value is None else f"{flag} {_quoted(flag, value)}"
            for flag, value in self.arguments.items()
        ]
        comments = "".join(f"# not spelled: {sentence}\n" for sentence in self.unspelled)
        return comments + " \\\n".join(lines) + "\n"


def _quoted(flag: str, value: str) -> str:
    return " ".join(map(shlex.quote, value.split())) if flag in LISTS else shlex.quote(value)


def megatron_arguments(scenario: Scenario) -> Spelled:
    """Arguments of Megatron-LM's pretraining script for a scenario's model and plan.

    Flags: NVIDIA/Megatron-LM `megatron/training/arguments.py` and yanring/Megatron-MoE-ModelZoo@e865051.
    Raises InputError for a model that cannot be loaded.
    """
    shape = scenario.shape
    found: dict[str, str | None] = {}
    missing: list[str] = []
    _parallel(scenario, shape, found, missing)
    _precision(scenario, found, missing)
    _recompute(scenario, found, missing)
    if scenario.routing.eplb is not None:
        missing.append("placement of experts and their replicas: Megatron-LM trains with experts in order")
    _model(shape, found, missing)
    return Spelled(found, tuple(missing))


def _parallel(
    scenario: Scenario, shape: ModelShape, found: dict[str, str | None], missing: list[str]
) -> None:
    plan = scenario.parallel
    found["--tensor-model-parallel-size"] = str(plan.tp)
    found["--pipeline-model-parallel-size"] = str(plan.pp)
    found["--context-parallel-size"] = str(plan.cp)
    if shape.moe is not None:
        found["--expert-model-parallel-size"] = str(plan.ep)
        found["--expert-tensor-parallel-size"] = str(plan.expert_tp)
    if plan.sequence_parallel:
        found["--sequence-parallel"] = None
    found["--micro-batch-size"] = str(plan.microbatch)
    found["--global-batch-size"] = str(scenario.batch.sequences)
    found["--seq-length"] = str(scenario.batch.sequence_length)
    names = {spec.name: spec.names_elsewhere.get("megatron-lm") for spec in SCHEDULES.values()}
    runs = {name: theirs for name, theirs in names.items() if theirs is not None}
    if scenario.schedule not in runs:
        missing.append(
            f"schedule {scenario.schedule}: Megatron-LM runs {' and '.join(runs.values())} only"
            + (", so its stages are left out too" if plan.pp > 1 else "")
        )
    elif plan.pp > 1:
        if plan.vpp > 1:
            found["--num-virtual-stages-per-pipeline-rank"] = str(plan.vpp)
        if scenario.stages.layers is not None:
            text = layout_text(scenario.stages.layers, shape.mtp_layers, scenario.stages.mtp)
            found["--pipeline-model-parallel-layout"] = text
        else:
            missing.append("stage layout: the scenario leaves it to moesim's balance; state stages.layers")
    if shape.moe is not None and plan.ep > 1:
        found["--moe-token-dispatcher-type"] = "flex"
        found["--moe-flex-dispatcher-backend"] = "deepep"
        found["--moe-deepep-num-sms"] = str(scenario.communication.sms)
    if plan.zero_stage == 1:
        found["--use-distributed-optimizer"] = None
    elif plan.zero_stage > 1:
        found["--use-megatron-fsdp"] = None
        strategy = {2: "optim_grads", 3: "optim_grads_params"}[plan.zero_stage]
        found["--data-parallel-sharding-strategy"] = strategy


def _precision(scenario: Scenario, found: dict[str, str | None], missing: list[str]) -> None:
    recipe = scenario.recipe
    found["--bf16"] = None
    if recipe.linear == "fp8":
        found["--fp8-format"] = "e4m3"
        found["--fp8-recipe"] = "blockwise"
    if recipe.moments == "bf16":
        found["--use-precision-aware-optimizer"] = None
        found["--exp-avg-dtype"] = "bf16"
        found["--exp-avg-sq-dtype"] = "bf16"
    if recipe.gradient_reduce == "fp32":
        found["--accumulate-allreduce-grads-in-fp32"] = None
    if recipe.dispatch == "fp8":
        missing.append(
            "dispatch of tokens in FP8: the DeepEP backend of Megatron-LM sends what the layer gives"
        )
    if recipe.head == "fp32" or "fp8" in (
        recipe.combine,
        recipe.moments,
        recipe.gradients,
        recipe.parameters,
    ):
        missing.append("formats of head, combine, moments, gradients or parameters other than the usual ones")


def _recompute(scenario: Scenario, found: dict[str, str | None], missing: list[str]) -> None:
    policy = scenario.recompute
    if policy == "full":
        found["--recompute-granularity"] = "full"
        found["--recompute-method"] = "uniform"
        found["--recompute-num-layers"] = "1"
    elif policy != "none":
        modules = MODULES.get(policy, MODULES["selective"]) if isinstance(policy, str) else " ".join(policy)
        found["--recompute-granularity"] = "selective"
        found["--recompute-modules"] = modules
    if policy == "op":
        missing.append("recompute=op, torchtitan's choice of operators: the nearest modules stand for it")
    if policy == "deepseek-v3":
        missing.append("attention output kept in 12 bits (E5M6), a part of recompute=deepseek-v3")


def _model(shape: ModelShape, found: dict[str, str | None], missing: list[str]) -> None:
    attention, moe = shape.attention, shape.moe
    found["--num-layers"] = str(shape.n_layers)
    found["--hidden-size"] = str(shape.hidden)
    if shape.dense_ffn is not None:
        found["--ffn-hidden-size"] = str(shape.dense_ffn)
    spelled = None if attention is None else attention.megatron_arguments()
    if spelled is None:
        missing.append("attention: Megatron-LM has no arguments for its kind, or for several in one model")
    found |= spelled or {}
    found["--padded-vocab-size"] = str(shape.vocab)
    found["--swiglu"] = None
    found["--normalization"] = "RMSNorm"
    if not shape.tied_embeddings:
        found["--untie-embeddings-and-output-weights"] = None
    if shape.mtp_layers:
        found["--mtp-num-layers"] = str(shape.mtp_layers)
    if moe is None:
        return
    found["--num-experts"] = str(moe.experts)
    found["--moe-router-topk"] = str(moe.top_k)
    found["--moe-ffn-hidden-size"] = str(moe.expert_ffn)
    found["--moe-grouped-gemm"] = None
    if moe.shared_experts:
        found["--moe-shared-expert-intermediate-size"] = str(moe.shared_experts * moe.shared_ffn)
    if moe.group_limited:
        found["--moe-router-num-groups"] = str(moe.groups)
        found["--moe-router-group-topk"] = str(moe.groups_per_token)
    found["--moe-layer-freq"] = frequency_text([int(shape.is_moe_layer(i)) for i in range(shape.n_layers)])


def frequency_text(flags: list[int]) -> str:
    """The flags as a --moe-layer-freq list with repeats, such as "([0]*3+[1]*58)"."""
    runs: list[tuple[int, int]] = []
    for flag in flags:
        if runs and runs[-1][0] == flag:
            runs[-1] = (flag, runs[-1][1] + 1)
        else:
            runs.append((flag, 1))
    return "(" + "+".join(f"[{flag}]*{count}" for flag, count in runs) + ")"
