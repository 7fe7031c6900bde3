"""The `parallel` section of a scenario: degrees of parallelism."""

from __future__ import annotations

from typing import NamedTuple

from pydantic import Field, PositiveInt

from moesim.hwmodels.frozen import Section


class PlanDefault(NamedTuple):
    """A degree or option that a rule chose, with the reason and its source."""

    value: int | bool
    why: str
    source: str


class ParallelPlan(Section, strict=True):
    """Degrees of parallelism; the data-parallel degree follows from the number of GPUs.

    `ep` and `expert_tp` divide the GPUs of one pipeline rank (tp x cp x dp) a second time, for the
    experts only (folding, as in Megatron-Core). Every degree is 1, and every option off, unless given; with
    tp > 1 and experts, rules choose `sequence_parallel` and `expert_tp` (shown among the defaults).
    """

    tp: PositiveInt = 1
    """Tensor parallel."""
    pp: PositiveInt = 1
    """Pipeline ranks."""
    ep: PositiveInt = 1
    """Expert parallel; folded into tp x cp x dp."""
    cp: PositiveInt = 1
    """Context parallel."""
    vpp: PositiveInt = 1
    """Stages per rank of the interleaved schedules."""
    microbatch: PositiveInt = 1
    """Sequences in one micro-batch of one data-parallel rank."""
    zero_stage: int = Field(default=0, ge=0, le=3)
    """0 = replicated, 1 = optimizer states, 2 = + gradients, 3 = + parameters (FSDP) over data parallel."""
    shard_group: PositiveInt | None = None
    """With `zero_stage: 3`: GPUs of a pipeline rank that hold a parameter once between them (hybrid FSDP),
    such as those of one NVLink domain; absent: all. Groups reduce over each other at the end of the step."""
    shard_optimizer_over_groups: bool = True
    """With `shard_group`: optimizer states are sharded over all GPUs (Megatron's Hybrid-FSDP) instead of over
    each group (HSDP)."""
    sequence_parallel: bool = False
    """Activations split along the sequence between tensor-parallel collectives. Absent: on for tp > 1 with
    experts, which need it, else off."""
    expert_tp: PositiveInt = 1
    """Tensor parallel inside an expert. Absent: tp without expert parallelism, where Megatron core and
    torchtitan split experts over it; else 1 (torchtitan's default and Megatron's recipes, while Megatron core
    itself takes tp)."""


def sequence_parallel_of(plan: ParallelPlan, expert_ffn: int | None) -> PlanDefault:
    """Sequence parallelism of a plan that does not state it; `expert_ffn`: None for no experts."""
    on = plan.tp > 1 and expert_ffn is not None
    why = "tensor parallelism with experts needs it, in Megatron core as in torchtitan" if on else "off"
    return PlanDefault(
        on, why, "NVIDIA/Megatron-LM@d98e8a64 megatron/core/transformer/moe/moe_layer.py, forward"
    )


def expert_tp_of(plan: ParallelPlan, expert_ffn: int | None) -> PlanDefault:
    """Tensor parallelism inside experts of `expert_ffn` columns of a plan that does not state it."""
    source = "NVIDIA/Megatron-LM@d98e8a64 megatron/training/arguments.py, validate_args"
    if expert_ffn is not None and plan.ep == 1 and expert_ffn % plan.tp == 0:
        why = "without expert parallelism, Megatron core and torchtitan split experts over parallel.tp"
        return PlanDefault(plan.tp, why, source)
    why = "whole experts, as torchtitan and Megatron's recipes; Megatron core itself takes parallel.tp"
    return PlanDefault(1, why, source)
