"""The `parallel` section of a scenario: degrees of parallelism."""

from __future__ import annotations

from pydantic import Field, PositiveInt

from moesim.hwmodels.frozen import Section


class ParallelPlan(Section, strict=True):
    """Degrees of parallelism; the data-parallel degree follows from the number of GPUs.

    `ep` and `expert_tp` divide the GPUs of one pipeline rank (tp x cp x dp) a second time, for the
    experts only (folding, as in Megatron-Core). Every degree is 1, and every option off, unless given.
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
    """Needed for tp > 1 with experts."""
    expert_tp: PositiveInt = 1
    """Tensor parallel inside an expert."""
