"""Formulas for the bytes on a GPU of one pipeline rank, by kind (docs/model.md, eqs. M1 to M5).

They take numbers for one plan (`layout.memory`), or arrays that broadcast, with one entry per plan (the
planner evaluates all plans of a space at once)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from math import fsum
from typing import Protocol, TypeAlias

import numpy as np
from msgspec import Struct

from moesim.hwmodels.arrays import BoolArray, FloatArray, IntArray
from moesim.simulator.frameworks.software import Software
from moesim.simulator.memory.activations import activation_bytes, working_bytes
from moesim.simulator.model.block import HEAD
from moesim.simulator.model.counts import block_parameters, expert_parameters
from moesim.simulator.model.operator import BlockKind
from moesim.simulator.model.precision import BYTES_PER_ELEMENT, Precision, row_bytes
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.scenario.parallel import ParallelPlan

Amount: TypeAlias = float | FloatArray
"""A number for one plan, or an array with one entry per plan."""


class StateFormats(Struct, frozen=True):
    """Bytes per parameter of the stored weight, its copy gathered by ZeRO-3, its gradient and its states."""

    weight: Amount
    gathered: Amount
    gradient: Amount
    optimizer: Amount

    @classmethod
    def of(cls, precision: Precision) -> StateFormats:
        """Return the formats of a precision recipe; masters in the parameters' format take no bytes."""
        weight, moment = BYTES_PER_ELEMENT[precision.parameters], BYTES_PER_ELEMENT[precision.moments]
        gathered = min(weight, BYTES_PER_ELEMENT[precision.parameter_gather])
        has_master = precision.master_weights != precision.parameters
        master = BYTES_PER_ELEMENT[precision.master_weights] if has_master else 0.0
        return cls(weight, gathered, precision.gradient_bytes, master + 2 * moment)


class ParameterNumbers(Protocol):
    """Parameters of some blocks on one GPU, split into those of routed experts and all others."""

    @property
    def experts(self) -> Amount:
        """Parameters of routed experts."""

    @property
    def other(self) -> Amount:
        """All other parameters."""


class PlanNumbers:
    """Inputs of the formulas for one plan, or for many plans at once."""

    shape: ModelShape
    formats: StateFormats
    zero_stage: int | IntArray
    """ZeRO stage: 1 shards optimizer states over the replicas, 2 also gradients, 3 also parameters."""
    shards: tuple[Amount, Amount]
    """Shards of weights and gradients of the experts, and of all others, within one copy of a stage."""
    optimizer_shards: tuple[Amount, Amount]
    """The same of the optimizer states."""
    expert_buffers: Amount
    """Communication buffers of a rank with routed experts (bytes)."""
    pipeline_buffers: Amount
    """Send and receive buffers between pipeline ranks (bytes)."""
    framework: float
    """Bytes that the process holds outside its tensors."""
    single_pass: bool | BoolArray
    """Whether gradients come into being in the only backward, while it frees activations.

    There is one micro-batch and no pipeline, and no buffer of gradients is allocated beforehand.
    """
    whole_gradients: bool
    """Whether gradients stay whole until the last micro-batch (`Software.keeps_whole_gradients`)."""

    def kept(self, kind: BlockKind) -> Amount:
        """Activation bytes that a block keeps for one micro-batch."""
        raise NotImplementedError

    def working(self, kind: BlockKind) -> Amount:
        """Workspace bytes of a block (`workspace_bytes`)."""
        raise NotImplementedError

    def freed(self) -> Amount:
        """Bytes that the head frees before any layer runs backward (`bytes_freed_by_head`)."""
        raise NotImplementedError

    def placeholders(self, kind: BlockKind) -> Amount:
        """Bytes of the placeholders of a block's weight gradients (`placeholder_bytes`)."""
        raise NotImplementedError

    def parameters(self, kinds: Sequence[BlockKind]) -> ParameterNumbers:
        """Parameters of blocks of these kinds on one GPU; shared tables count once."""
        raise NotImplementedError


class HeldStage(Struct, frozen=True):
    """A stage on a rank, as its blocks in forward order and the number of pipeline ranks that hold it."""

    kinds: tuple[BlockKind, ...]
    copies: int


class RankTerms(Struct, frozen=True):
    """Bytes of a rank without micro-batches; `kept` are the bytes that one adds on each of its stages."""

    weights: Amount
    gradients: Amount
    grown: Amount
    """Bytes of gradients beyond activations and workspace at the peak of a backward that makes them (M47)."""
    optimizer: Amount
    kept: tuple[Amount, ...]
    workspace: Amount
    expert_buffers: Amount


UNSHARDED = 4
"""Above every ZeRO stage: what no stage shards."""

Moment: TypeAlias = Sequence[tuple[int, Amount]]
"""Micro-batches in flight at one moment, as pairs (position of the stage on its rank, number)."""


def rank_terms(plan: PlanNumbers, stages: Sequence[HeldStage]) -> RankTerms:
    """Compute the bytes that a rank with these stages holds, and those that each micro-batch adds."""
    kinds = tuple(kind for stage in stages for kind in stage.kinds)
    different = tuple(dict.fromkeys(kinds))
    weights, gradients, optimizer = _state_bytes(plan, stages, kinds)
    workspace: Amount = 0.0
    for kind in different:
        if kind != HEAD:
            workspace = np.maximum(workspace, plan.working(kind))
    if HEAD in different:  # the loss runs backward before any layer, so layers reuse the bytes that it frees
        workspace = np.maximum(plan.working(HEAD), workspace - plan.freed())
    placeholders: Amount = plan.placeholders(HEAD) if HEAD in different else 0.0
    layers: Amount = 0.0
    for kind in different:
        if kind != HEAD:  # kinds of layers share most of their shapes, so only the largest counts
            layers = np.maximum(layers, plan.placeholders(kind))
    grown = _grown_gradients(plan, stages, workspace) if np.any(plan.single_pass) else gradients
    workspace = workspace + placeholders + layers
    kept = tuple(total_of(plan.kept(kind) for kind in stage.kinds) for stage in stages)
    buffers = plan.expert_buffers * any(plan.shape.block(kind).routed for kind in different)
    return RankTerms(weights, gradients, grown, optimizer, kept, workspace, buffers)


def rank_bytes(plan: PlanNumbers, terms: RankTerms, moments: Iterable[Moment]) -> dict[str, Amount]:
    """Compute the bytes on one GPU of a rank by kind, at the fullest of the given moments (eq. M5)."""
    activations: Amount = 0.0
    for moment in moments:
        activations = np.maximum(activations, total_of(terms.kept[place] * n for place, n in moment))
    gradients: Amount = terms.gradients
    if np.any(plan.single_pass):
        gradients = np.where(plan.single_pass, terms.grown, gradients)
    return {
        "weights": terms.weights,
        "gradients": gradients,
        "optimizer": terms.optimizer,
        "activations": activations,
        "workspace": terms.workspace,
        "communication_buffers": terms.expert_buffers + plan.pipeline_buffers,
        "framework": plan.framework,
    }


def moments_of(stages: Sequence[int], in_flight: Iterable[Mapping[int, Amount]]) -> list[Moment]:
    """Convert micro-batches in flight by stage number to moments of a rank."""
    place = {stage: n for n, stage in enumerate(stages)}
    return [[(place[stage], count) for stage, count in moment.items()] for moment in in_flight]


def _state_bytes(
    plan: PlanNumbers, stages: Sequence[HeldStage], kinds: Sequence[BlockKind]
) -> tuple[Amount, Amount, Amount]:
    """Bytes of (weights, gradients, optimizer states) on one rank, sharded by the ZeRO stage (eq. M1)."""
    # Each stage is sharded over its own number of copies. A table that two stages of the rank share counts
    # once, so every stage gives up its part of the duplicates.
    parts = [plan.parameters(stage.kinds) for stage in stages]
    all_other = total_of(part.other for part in parts)
    duplicates = all_other - plan.parameters(kinds).other
    # Level 2 cuts gradients; where they stay whole until the last micro-batch no ZeRO stage does.
    levels = (1, UNSHARDED, 3) if plan.whole_gradients else (1, 2, 3)
    elements: dict[int, Amount] = dict.fromkeys(levels, 0.0)
    (expert_shards, other_shards), (expert_states, other_states) = plan.shards, plan.optimizer_shards
    for stage, part in zip(stages, parts, strict=True):
        if not stage.kinds:
            continue  # a stage that only passes activations on holds nothing
        other = part.other - duplicates * part.other / all_other
        whole = part.experts + other
        cuts = {
            1: part.experts / (expert_states * stage.copies) + other / (other_states * stage.copies),
            # Ranks that hold the same stage scatter their own micro-batches, each over its own replicas.
            2: part.experts / expert_shards + other / other_shards,
            3: part.experts / (expert_shards * stage.copies) + other / (other_shards * stage.copies),
            UNSHARDED: whole,
        }
        for level in levels:
            cut = cuts[level]
            elements[level] = elements[level] + np.where(plan.zero_stage >= level, cut, whole)
    largest: Amount = 0.0
    for kind in dict.fromkeys(kinds):
        block = plan.parameters((kind,))
        largest = np.maximum(largest, block.experts + block.other)
    formats = plan.formats
    # ZeRO-3 gathers the current block and the next one in full; from ZeRO-2 on the current block has its
    # whole gradient until that is reduced and scattered.
    gathered = np.where(plan.zero_stage >= 3, 2 * largest * formats.gathered, 0.0)
    unscattered = np.where(plan.zero_stage >= 2, largest * formats.gradient, 0.0)
    if plan.whole_gradients:
        gradients: Amount = elements[UNSHARDED] * formats.gradient
    else:
        gradients = elements[2] * formats.gradient + unscattered
    return (
        elements[3] * formats.weight + gathered,
        gradients,
        elements[1] * formats.optimizer,
    )


def _grown_gradients(plan: PlanNumbers, stages: Sequence[HeldStage], workspace: Amount) -> Amount:
    """Bytes of gradients at the peak of the only backward, beyond all activations and `workspace` (eq. M47).

    Before a block runs backward, its activations and those of the blocks before it are left and the gradients
    of the blocks behind it are made; while it runs, its own gradient is whole. The loss frees its tensors
    before the head's gradient is made. After the last block all gradients are there.
    """
    kinds = [kind for stage in stages for kind in stage.kinds]
    held = left = total_of(plan.kept(kind) for kind in kinds)
    made: Amount = 0.0
    peak: Amount = 0.0
    experts, others = plan.shards
    for kind, run in groupby(reversed(kinds)):
        count, own = len(list(run)), plan.parameters((kind,))
        whole = (own.experts + own.other) * plan.formats.gradient
        shard = (own.experts / experts + own.other / others) * plan.formats.gradient
        kept = whole if plan.whole_gradients else np.where(plan.zero_stage >= 2, shard, whole)
        beside = whole - plan.freed() if kind == HEAD else whole + plan.working(kind)
        each = plan.kept(kind)
        for done in (0, count - 1):  # in between it grows or shrinks evenly
            peak = np.maximum(peak, left - done * each + made + done * kept + beside)
        left, made = left - count * each, made + count * kept
    return np.maximum(0.0, np.maximum(peak, made) - held - workspace)


def workspace_bytes(
    shape: ModelShape,
    kind: BlockKind,
    plan: ParallelPlan,
    precision: Precision,
    sequence: int,
    software: Software,
) -> float:
    """Workspace bytes of a block (eq. M3).

    A head whose FP32 tensors count as kept activations needs none; beside what Megatron-LM's losses keep, it
    needs the 16-bit logits and their gradient (eq. M30). PyTorch's own loss needs two gradients in FP32
    beside its log-softmax, compiled a 16-bit one (eq. M44).
    """
    if kind == HEAD and precision.loss == "fp32":
        tokens = plan.microbatch * sequence / plan.cp
        if software.loss_of_torch and software.loss != "compiled":
            return 2 * tokens * row_bytes(shape.vocab, "fp32") / plan.tp
        if software.loss == "fused":
            return 0.0
        return tokens * row_bytes(shape.vocab, precision.head) / plan.tp
    return working_bytes(shape, kind, plan, precision, sequence, software)


def placeholder_bytes(shape: ModelShape, kind: BlockKind, plan: ParallelPlan, software: Software) -> float:
    """Bytes of the 16-bit placeholders that stand for weight gradients added into a buffer (eq. M31).

    Transformer Engine keeps one for every shape of a weight (NVIDIA/TransformerEngine@v2.11
    `pytorch/module/base.py` get_dummy_wgrad, since 2.3), and Megatron core's head takes one of these
    (NVIDIA/Megatron-LM@core_v0.14.0 `tensor_parallel/layers.py`). All experts have the same shape.
    """
    if not software.placeholder_gradients:
        return 0.0
    if kind == HEAD:
        return row_bytes(shape.vocab * shape.hidden / plan.tp, "bf16")
    parameters = block_parameters(shape, kind)
    cut = (parameters.attention + parameters.dense_ffn + parameters.shared_experts) / plan.tp
    expert = expert_parameters(shape) / plan.expert_tp if shape.block(kind).routed else 0.0
    return row_bytes(cut + expert, "bf16")


def bytes_freed_by_head(
    shape: ModelShape, plan: ParallelPlan, precision: Precision, sequence: int, software: Software
) -> float:
    """Bytes that a head with its loss in FP32 frees before any layer runs backward; 0 for other heads."""
    if precision.loss != "fp32":
        return 0.0
    return activation_bytes(shape, HEAD, precision, "none", plan, sequence, software)


def total_of(terms: Iterable[Amount]) -> Amount:
    """Sum terms: numbers with one rounding at the end, arrays elementwise in the order given."""
    listed = list(terms)
    if all(np.ndim(term) == 0 for term in listed):
        return fsum(listed)
    total: Amount = 0.0
    for term in listed:
        total = total + term
    return total
