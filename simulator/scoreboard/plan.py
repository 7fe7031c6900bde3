"""From a published row to the scenario that was run: plan, precision, behaviour of the framework."""

from __future__ import annotations

from typing import Literal

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.provenance import SourcedFraction
from moesim.simulator.layout.activations import RecomputePolicy
from moesim.simulator.layout.parallel import ParallelPlan
from moesim.simulator.model.precision import Precision
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.run.plan import RunPlan
from moesim.simulator.scenario import Batch, Communication, Routing, Scenario, Stages, Variation
from moesim.simulator.scoreboard.launching import launching_of
from moesim.simulator.scoreboard.machines import machine_of
from moesim.simulator.scoreboard.rows import OpenRow
from moesim.simulator.scoreboard.shapes import shape_of
from moesim.simulator.software import Software

OLD_MEGATRON = ("sc21-gpt-a100", "kort-gpt-a100", "bloom-a100", "mtnlg-a100")
"""Megatron-LM before FlashAttention; its all-reduces of data parallelism come after the last backward."""
BALANCED = SourcedFraction(
    value=0.0,
    kind="assumed",
    source="benchmarks force balanced routing, or the row says nothing of its load",
    date="2026-11-20",
)
EVEN = SourcedFraction(
    value=0.0, kind="assumed", source="spread of GPUs not published with the rows", date="2026-11-20"
)
LEAST_RECOMPUTE: tuple[RecomputePolicy, ...] = ("none", "selective", "full")
"""Where a row does not say: the policy that computes least again and fits into memory."""


def policies_of(row: OpenRow) -> tuple[RecomputePolicy, ...]:
    """Recompute policies to try in order, the first that fits; one where the row states it."""
    text = row.recompute
    if text == "":
        return LEAST_RECOMPUTE
    if text.startswith("selective"):
        # Selective recompute of the old stack is that of core attention (arXiv 2205.05198, section 5).
        return ("attention",) if row.group in OLD_MEGATRON else ("selective",)
    return ("full",) if text == "full" else ("none",)


def scenario_of(row: OpenRow, recompute: RecomputePolicy) -> Scenario:
    """The scenario of a row under one recompute policy; raises InputError for what cannot be expressed."""
    if row.arch == "moe" and not row.ep_stated:
        raise InputError(f"{row.id}: the degree of expert parallelism is not stated")
    shape = shape_of(row)
    cluster, profile = machine_of(row)
    return Scenario(
        name=row.id,
        description=row.source,
        model=shape,
        cluster=cluster,
        profile=profile,
        precision=precision_of(row),
        parallel=plan_of(row),
        schedule="interleaved-1f1b" if row.vpp > 1 else "1f1b",
        batch=Batch(sequences=row.gbs_seqs, sequence_length=row.seq),
        stages=stages_of(row, shape),
        communication=Communication(kernels=dispatcher_of(row)),
        recompute=recompute,
        routing=Routing(expert_load_cv=BALANCED),
        variation=Variation(clock_cv=EVEN, jitter_cv=EVEN),
        run=RunPlan(tokens=float(row.gbs_seqs * row.seq)),
        software=software_of(row),
    )


def plan_of(row: OpenRow) -> ParallelPlan:
    """Degrees of parallelism and sharding as published."""
    return ParallelPlan(
        tp=row.tp,
        pp=row.pp,
        ep=max(1, row.ep),
        cp=row.cp,
        vpp=row.vpp,
        microbatch=row.mbs,
        zero_stage=_zero(row.zero_or_fsdp),
        sequence_parallel=row.tp > 1 and not _without_sequence_parallel(row),
        expert_tp=4 if "ETP=4" in row.notes else 1,
    )


def _zero(text: str) -> int:
    """ZeRO stage: Megatron's distributed optimizer is 1, FSDP with resharding 3."""
    if "zero2" in text:
        return 2
    if "fsdp" in text or "zero3" in text:
        return 3
    return 0 if text in ("", "none") else 1


def _without_sequence_parallel(row: OpenRow) -> bool:
    """Megatron-LM had no sequence parallelism before arXiv 2205.05198, and there only where it says so."""
    if row.group == "kort-gpt-a100":
        return "no sequence parallel" in row.notes
    return row.group in OLD_MEGATRON


def precision_of(row: OpenRow) -> Precision:
    """Formats: FP16 counts as BF16; FP8 by tiles or by tensors, with activations kept in BF16."""
    text = row.precision
    if text == "nvfp4":
        raise InputError(f"{row.id}: FP4 products are not modelled")
    pure = "PURE" in row.notes  # llm-foundry: gradients are reduced in BF16
    reduce: Literal["bf16", "fp32"] = "bf16" if pure or row.group in OLD_MEGATRON else "fp32"
    if "fp8" in text:
        scaling: Literal["tile", "tensor"] = "tile" if "block" in text or "mx" in text else "tensor"
        return Precision(linear="fp8", scaling=scaling, gradient_reduce=reduce)
    if text in ("bf16", "fp16"):
        return Precision(linear="bf16", gradient_reduce=reduce)
    raise InputError(f"{row.id}: precision {text!r} is not known")


def stages_of(row: OpenRow, shape: ModelShape) -> Stages:
    """Layers evenly over the stages, as Megatron-LM places them; balanced where they do not divide."""
    n = row.pp * row.vpp
    if n == 1 or shape.n_layers % n:
        return Stages()
    return Stages(layers=(shape.n_layers // n,) * n)


def dispatcher_of(row: OpenRow) -> str:
    """DeepEP where the row names it, NCCL's all-to-all otherwise."""
    return "deepep-2025-04" if "DeepEP" in row.notes else "nccl"


def software_of(row: OpenRow) -> Software:
    """Behaviour of the framework behind a source (docs/validation.md lists the assumptions)."""
    launching = launching_of(row)
    if row.group in OLD_MEGATRON:
        return Software(attention="unfused", **launching)
    if row.group == "simumax-b200":
        return Software(overlap_tensor_parallel="weight-gradient", **launching)
    return Software(
        parameters_copied=row.zero_or_fsdp.startswith("fsdp2"),
        overlap_tensor_parallel="full",
        overlap_context_parallel=True,
        overlap_data_parallel=True,
        **launching,
    )
