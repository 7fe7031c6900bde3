"""Limits of schedules that hide the transfers of experts, as Megatron core checks them (pure)."""

from __future__ import annotations

from moesim.hwmodels.errors import InputError
from moesim.simulator.model.recompute import Recompute, modules_of
from moesim.simulator.scenario.parallel import ParallelPlan
from moesim.simulator.schedules.spec import SCHEDULES


def hides_experts(schedule: str) -> bool:
    """Whether the pairs of a named schedule are Megatron core's expert overlap; no schedule of a file is."""
    spec = SCHEDULES.get(schedule)
    return spec is not None and spec.hides_expert_transfers


def repeats_experts(recompute: Recompute) -> bool:
    """Whether a policy runs the transfers of experts again in the backward."""
    return recompute == "full" or "moe" in modules_of(recompute)


def check_expert_overlap(schedule: str, plan: ParallelPlan, *, routed: bool) -> None:
    """Raise InputError for a plan without transfers to hide, or without another virtual stage to hide them.

    `routed`: whether the model has routed experts. Source: NVIDIA/Megatron-LM@core_v0.15.0
    megatron/core/transformer/transformer_config.py, checks of `overlap_moe_expert_parallel_comm`.
    """
    if not hides_experts(schedule):
        return
    what = f"schedule={schedule} hides the transfers of experts"
    if not routed or plan.ep == 1:
        raise InputError(
            f"{what}, and this plan has none (parallel.ep={plan.ep}); use 1f1b or interleaved-1f1b",
            key="schedule",
            nearest=("interleaved-1f1b" if plan.vpp > 1 else "1f1b",),
        )
    if plan.pp > 1 and plan.vpp == 1:
        raise InputError(
            f"{what} behind another virtual stage, and parallel.vpp is 1 with pp={plan.pp}; use a vpp of 2",
            key="parallel.vpp",
            nearest=(2,),
        )
