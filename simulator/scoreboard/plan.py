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
from moesim.simulator.scoreboard.recipes import recipe_of
from moesim.simulator.scoreboard.rows import OpenRow
from moesim.simulator.scoreboard.shapes import shape_of
from moesim.simulator.software import Software

OLD_MEGATRON = ("sc21-gpt-a100", "kort-gpt-a100", "bloom-a100", "mtnlg-a100")
"""Megatron-LM before FlashAttention; its all-reduces of data parallelism come after the last backward."""
NEMO = ("NVIDIA/dgxc-benchmarking", "NVIDIA/NeMo", "mlcommons/training_results")
"""Sources that ran NeMo, whose performance recipes leave `cross_entropy_loss_fusion` off
(NVIDIA/NeMo@v2.1.0 nemo/collections/llm/recipes/llama31_70b.py; before, the default of Megatron core)."""
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
    text, published = row.recompute, recipe_of(row).recompute
    if text == "":
        return LEAST_RECOMPUTE if published is None else (published,)
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
    recipe = recipe_of(row)
    return ParallelPlan(
        tp=row.tp,
        pp=row.pp,
        ep=max(1, row.ep),
        cp=row.cp,
        vpp=row.vpp,
        microbatch=row.mbs,
        zero_stage=_zero(row.zero_or_fsdp) if recipe.zero_stage is None else recipe.zero_stage,
        sequence_parallel=row.tp > 1 and not _without_sequence_parallel(row),
        expert_tp=recipe.expert_tp or (4 if "ETP=4" in row.notes else 1),
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
    loss: Literal["bf16", "fp32"] = "fp32" if _chained_loss(row) else "bf16"
    if text == "nvfp4":
        raise InputError(f"{row.id}: FP4 products are not modelled")
    pure = "PURE" in row.notes  # llm-foundry: gradients are reduced in BF16
    unstated: Literal["bf16", "fp32"] = "bf16" if pure or row.group in OLD_MEGATRON else "fp32"
    reduce = recipe_of(row).gradient_reduce or ("fp32" if _bf16_optimizer(row) else unstated)
    kept: Literal["bf16", "fp32"] = "bf16" if row.group in OLD_MEGATRON and reduce == "bf16" else "fp32"
    if "fp8" in text:
        scaling: Literal["tile", "tensor"] = "tile" if "block" in text or "mx" in text else "tensor"
        return Precision(linear="fp8", scaling=scaling, gradient_reduce=reduce, loss=loss)
    if text in ("bf16", "fp16"):
        twice = _bf16_optimizer(row)
        return Precision(
            linear="bf16", gradient_reduce=reduce, loss=loss, gradients=kept, gradients_twice=twice
        )
    raise InputError(f"{row.id}: precision {text!r} is not known")


def stages_of(row: OpenRow, shape: ModelShape) -> Stages:
    """Layers evenly over the stages, as Megatron-LM places them; balanced where they do not divide."""
    n = row.pp * row.vpp
    if _bf16_optimizer(row) and row.layers % n and not (row.layers + 2) % n:
        each = (row.layers + 2) // n  # --pp-partition-method 'type:transformer|embedding'
        return Stages(layers=(each - 1, *(each,) * (n - 2), each - 1))
    if n == 1 or shape.n_layers % n:
        return Stages()
    return Stages(layers=(shape.n_layers // n,) * n)


def dispatcher_of(row: OpenRow) -> str:
    """DeepEP where the row or its source's code names it, NCCL's all-to-all otherwise."""
    return recipe_of(row).dispatcher or ("deepep-2025-04" if "DeepEP" in row.notes else "nccl")


def software_of(row: OpenRow) -> Software:
    """Behaviour of the framework behind a source (docs/validation.md lists the assumptions)."""
    launching = launching_of(row)
    if row.group in OLD_MEGATRON:
        added = "added-fp32" if _bf16_optimizer(row) else "added"
        # Dropout 0.1 is Megatron-LM's default, which none of these runs' published arguments changes.
        return Software(attention="unfused", dropout=True, loss="chain", weight_gradients=added, **launching)
    if row.group == "simumax-b200":
        return Software(overlap_tensor_parallel="weight-gradient", **launching)
    return Software(
        parameters_copied=row.zero_or_fsdp.startswith("fsdp2"),
        flat_parameters=row.group.startswith("mpt-"),
        loss="chain" if _chained_loss(row) else "fused",
        weight_gradients="written" if _autograd(row) else "accumulated",
        overlap_tensor_parallel="full",
        overlap_context_parallel=True,
        overlap_data_parallel=True,
        **launching,
    )


def _autograd(row: OpenRow) -> bool:
    """FSDP of PyTorch or JAX: weight gradients are outputs. Megatron's own FSDP adds into its buffers."""
    return row.zero_or_fsdp.startswith("fsdp") and "Megatron-Bridge" not in row.source


def _chained_loss(row: OpenRow) -> bool:
    """Megatron-LM and NeMo: FP32 logits, one kernel a pass. Megatron-Bridge fuses the loss
    (NVIDIA-NeMo/Megatron-Bridge@0aec3a7f8 scripts/performance/configs: cross_entropy_fusion_impl "te")."""
    if "(JAX)" in row.zero_or_fsdp:
        return False
    return row.group in OLD_MEGATRON or row.source.startswith(NEMO)


def _bf16_optimizer(row: OpenRow) -> bool:
    """BLOOM's last table and its run: BF16 with gradients accumulated in FP32; the tables before are FP16
    (bigscience-workshop/bigscience@9e64edec train/tr11-176B-ml/chronicles-prequel.md, line 899)."""
    return row.model == "bloom-176b" or (row.group == "bloom-a100" and "'Rebalancing layers'" in row.notes)
