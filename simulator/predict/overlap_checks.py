"""Refuses overlaps that the plan, the model or the schedule does not allow, with the nearest legal choice."""

from __future__ import annotations

from moesim.hwmodels.errors import InputError
from moesim.simulator.cost.tensor_overlap import CUTS_GEMMS
from moesim.simulator.layout.expert_overlap import check_expert_overlap, hides_experts, repeats_experts
from moesim.simulator.model.attention import MLA
from moesim.simulator.model.recompute import recompute_label
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.scenario import Scenario
from moesim.simulator.schedules import Schedule

TENSOR_KEY = "software.overlap_tensor_parallel"


def check_overlaps(scenario: Scenario, shape: ModelShape, schedule: Schedule, gpus_per_node: int) -> None:
    """Raise InputError for an overlap that frameworks refuse or cannot run on this plan."""
    _check_tensor(scenario, shape, gpus_per_node)
    _check_experts(scenario, shape)
    _check_data_parallel(scenario, schedule)


def _check_tensor(scenario: Scenario, shape: ModelShape, gpus_per_node: int) -> None:
    plan, recipe = scenario.parallel, scenario.recipe
    overlap = scenario.software.overlap_tensor_parallel
    if recipe.tensor_gather == "fp8" and recipe.linear != "fp8":
        raise InputError(
            f"precision.tensor_gather=fp8 with precision.linear={recipe.linear}: only inputs of FP8 GEMMs "
            "are gathered in FP8; use tensor_gather: bf16",
            key="precision.tensor_gather",
            nearest=("bf16",),
        )
    if overlap not in CUTS_GEMMS or plan.tp == 1:
        return
    if not plan.sequence_parallel:
        raise InputError(
            f"{TENSOR_KEY}={overlap} needs parallel.sequence_parallel: true; without it the activations are "
            "all-reduced, which is not cut into pieces (Megatron-LM turns the overlap off)",
            key="parallel.sequence_parallel",
            nearest=(True,),
        )
    if plan.tp > gpus_per_node:
        raise InputError(
            f"{TENSOR_KEY}={overlap} with parallel.tp={plan.tp} on scale-up domains of {gpus_per_node} GPUs: "
            f"its buffers are mapped by the GPUs of one domain; use tp of at most {gpus_per_node}, or "
            "weight-gradient",
            key=TENSOR_KEY,
            nearest=("weight-gradient",),
        )
    latent = any(isinstance(attention, MLA) for attention in shape.attention_by_name.values())
    if overlap == "userbuffers" and latent:
        raise InputError(
            f"{TENSOR_KEY}=userbuffers with multi-head latent attention: Transformer Engine has buffers for "
            "qkv, proj, fc1 and fc2 only; use weight-gradient",
            key=TENSOR_KEY,
            nearest=("weight-gradient",),
        )


def _check_experts(scenario: Scenario, shape: ModelShape) -> None:
    check_expert_overlap(scenario.schedule, scenario.parallel, routed=shape.moe is not None)
    if hides_experts(scenario.schedule) and repeats_experts(scenario.recompute):
        raise InputError(
            f"schedule={scenario.schedule} hides the transfers of experts, which "
            f"recompute={recompute_label(scenario.recompute)} would run again in the backward; use "
            "recompute: selective, or a list of modules without moe",
            key="recompute",
            nearest=("selective",),
        )


def _check_data_parallel(scenario: Scenario, schedule: Schedule) -> None:
    software = scenario.software
    if software.data_parallel_buckets != "megatron":
        if software.overlap_optimizer:
            raise InputError(
                "software.overlap_optimizer needs software.data_parallel_buckets: megatron, whose first "
                "chunk is gathered beside the update of the others",
                key="software.data_parallel_buckets",
                nearest=("megatron",),
            )
        return
    if len(schedule.routes) > 1:
        raise InputError(
            f"software.data_parallel_buckets=megatron with schedule={schedule.name}: Megatron core has no "
            "bidirectional pipeline; use layer",
            key="software.data_parallel_buckets",
            nearest=("layer",),
        )
    if software.overlap_optimizer and len(schedule.stages_on_rank(0)) == 1:
        raise InputError(
            "software.overlap_optimizer updates a rank's other chunks while the first is gathered, and "
            f"parallel.vpp={scenario.parallel.vpp} leaves one chunk a rank; use vpp of at least 2",
            key="parallel.vpp",
            nearest=(2,),
        )
