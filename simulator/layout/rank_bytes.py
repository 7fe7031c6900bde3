"""Bytes of one pipeline rank by kind (docs/model.md, eqs. M1 to M5), of one plan or of many plans at once.

The formulas take numbers, or arrays of plans that broadcast: `layout.memory` counts one plan with them, the
planner all plans of a space.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from typing import Protocol, TypeAlias

import numpy as np

from moesim.hwmodels.arrays import BoolArray, FloatArray, IntArray
from moesim.simulator.layout.activations import activation_bytes, working_bytes
from moesim.simulator.model.block import HEAD
from moesim.simulator.model.operator import BlockKind
from moesim.simulator.model.precision import BYTES_PER_ELEMENT, Precision
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.model.software import Software
from moesim.simulator.scenario.parallel import ParallelPlan

Amount: TypeAlias = float | FloatArray
"""A number, or one for each of many plans."""


@dataclass(frozen=True, slots=True)
class StateFormats:
    """Bytes of one parameter: stored, gathered by ZeRO-3, of its gradient, and of its optimizer states."""

    weight: Amount
    gathered: Amount
    gradient: Amount
    optimizer: Amount

    @classmethod
    def of(cls, precision: Precision) -> StateFormats:
        """Of a precision recipe; a master copy in the format of the parameters is not kept."""
        weight, moment = BYTES_PER_ELEMENT[precision.parameters], BYTES_PER_ELEMENT[precision.moments]
        gathered = min(weight, BYTES_PER_ELEMENT[precision.parameter_gather])
        has_master = precision.master_weights != precision.parameters
        master = BYTES_PER_ELEMENT[precision.master_weights] if has_master else 0.0
        return cls(weight, gathered, precision.gradient_bytes, master + 2 * moment)


class ParameterNumbers(Protocol):
    """Parameters of some blocks on one GPU: routed experts, and everything else."""

    @property
    def experts(self) -> Amount:
        """Of routed experts."""

    @property
    def other(self) -> Amount:
        """Of everything else."""


class PlanNumbers(Protocol):
    """What the formulas ask about a plan, or about many plans at once."""

    @property
    def shape(self) -> ModelShape:
        """The model."""

    @property
    def formats(self) -> StateFormats:
        """Bytes of a parameter in its states."""

    @property
    def zero_stage(self) -> int | IntArray:
        """What is sharded over the replicas."""

    @property
    def replicas(self) -> tuple[Amount, Amount]:
        """GPUs that hold the same routed experts, and the same other parameters, in one copy of a stage."""

    @property
    def expert_buffers(self) -> Amount:
        """Communication buffers of a rank with routed experts (bytes)."""

    @property
    def pipeline_buffers(self) -> Amount:
        """Send and receive buffers between pipeline ranks (bytes)."""

    @property
    def framework(self) -> float:
        """What the process holds outside its tensors (bytes)."""

    @property
    def single_pass(self) -> bool | BoolArray:
        """Whether gradients come while activations go (one micro-batch, no pipeline)."""

    def kept(self, kind: BlockKind) -> Amount:
        """Activations that a micro-batch leaves in a block."""

    def working(self, kind: BlockKind) -> Amount:
        """`working_of` a block."""

    def freed(self) -> Amount:
        """`freed_by_head`."""

    def parameters(self, kinds: Sequence[BlockKind]) -> ParameterNumbers:
        """Parameters of blocks of these kinds on one GPU; shared tables count once."""


@dataclass(frozen=True, slots=True)
class HeldStage:
    """A stage of a rank: its blocks in forward order, and how many pipeline ranks hold a copy of it."""

    kinds: tuple[BlockKind, ...]
    copies: int


@dataclass(frozen=True, slots=True)
class RankTerms:
    """Bytes of a rank before its micro-batches are counted; `kept`: what one leaves on each of its stages."""

    weights: Amount
    gradients: Amount
    optimizer: Amount
    kept: tuple[Amount, ...]
    workspace: Amount
    expert_buffers: Amount


Moment: TypeAlias = Sequence[tuple[int, Amount]]
"""Micro-batches in flight at one moment: (position of the stage on its rank, how many)."""


def rank_terms(plan: PlanNumbers, stages: Sequence[HeldStage]) -> RankTerms:
    """What a rank with these stages holds, and what each micro-batch adds."""
    kinds = tuple(kind for stage in stages for kind in stage.kinds)
    different = tuple(dict.fromkeys(kinds))
    weights, gradients, optimizer = _state_bytes(plan, stages, kinds)
    workspace: Amount = 0.0
    for kind in different:
        workspace = np.maximum(workspace, plan.working(kind))
    if HEAD in different:  # no layer runs backward before the loss has: what it frees is there for them
        workspace = np.maximum(0.0, workspace - plan.freed())
    kept = tuple(total_of(plan.kept(kind) for kind in stage.kinds) for stage in stages)
    buffers = plan.expert_buffers * has_experts(plan.shape, different)
    return RankTerms(weights, gradients, optimizer, kept, workspace, buffers)


def rank_bytes(plan: PlanNumbers, terms: RankTerms, moments: Iterable[Moment]) -> dict[str, Amount]:
    """Bytes on one GPU of a rank by kind, at the fullest of some moments (eq. M5)."""
    activations: Amount = 0.0
    for moment in moments:
        activations = np.maximum(activations, total_of(terms.kept[place] * n for place, n in moment))
    gradients = terms.gradients
    if np.any(plan.single_pass):  # the larger of what grows and what shrinks counts
        left = np.maximum(0.0, gradients - activations)
        gradients = np.where(plan.single_pass, left, gradients)
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
    """Moments of a rank from micro-batches in flight by stage number."""
    place = {stage: n for n, stage in enumerate(stages)}
    return [[(place[stage], count) for stage, count in moment.items()] for moment in in_flight]


def _state_bytes(
    plan: PlanNumbers, stages: Sequence[HeldStage], kinds: Sequence[BlockKind]
) -> tuple[Amount, Amount, Amount]:
    """(weights, gradients, optimizer states) of one rank, each sharded as the ZeRO stage says (eq. M1)."""
    # Shares are per stage because the number of copies is; shared tables follow the rank's own blocks.
    parts = [plan.parameters(stage.kinds) for stage in stages]
    all_other = total_of(part.other for part in parts)
    twice = all_other - plan.parameters(kinds).other
    elements: dict[int, Amount] = dict.fromkeys((1, 2, 3), 0.0)
    for stage, part in zip(stages, parts, strict=True):
        other = part.other - twice * part.other / all_other
        replicas_expert, replicas_other = (n * stage.copies for n in plan.replicas)
        cut, whole = part.experts / replicas_expert + other / replicas_other, part.experts + other
        for level in elements:
            elements[level] = elements[level] + np.where(plan.zero_stage >= level, cut, whole)
    largest: Amount = 0.0
    for kind in dict.fromkeys(kinds):
        block = plan.parameters((kind,))
        largest = np.maximum(largest, block.experts + block.other)
    formats = plan.formats
    # ZeRO-3 gathers the block under way and the next one in full; from ZeRO-2 on the block under way has its
    # gradient in full until it is scattered.
    gathered = np.where(plan.zero_stage >= 3, 2 * largest * formats.gathered, 0.0)
    unscattered = np.where(plan.zero_stage >= 2, largest * formats.gradient, 0.0)
    return (
        elements[3] * formats.weight + gathered,
        elements[2] * formats.gradient + unscattered,
        elements[1] * formats.optimizer,
    )


def working_of(
    shape: ModelShape,
    kind: BlockKind,
    plan: ParallelPlan,
    precision: Precision,
    sequence: int,
    software: Software,
) -> float:
    """Workspace of a block (eq. M3); 0 for a head whose FP32 tensors are counted as kept."""
    if kind == HEAD and precision.loss == "fp32":
        return 0.0
    return working_bytes(shape, kind, plan, precision, sequence, software)


def freed_by_head(
    shape: ModelShape, plan: ParallelPlan, precision: Precision, sequence: int, software: Software
) -> float:
    """What the head gives back before any layer runs backward, where its loss is in FP32."""
    if precision.loss != "fp32":
        return 0.0
    return activation_bytes(shape, HEAD, precision, "none", plan, sequence, software)


def has_experts(shape: ModelShape, kinds: Iterable[BlockKind]) -> bool:
    """Whether blocks of these kinds have routed experts."""
    return any(shape.block(kind).routed for kind in kinds)


def total_of(terms: Iterable[Amount]) -> Amount:
    """Sum of some terms: numbers rounded once at the end, arrays elementwise in the order given."""
    listed = list(terms)
    if all(np.ndim(term) == 0 for term in listed):
        return fsum(listed)
    total: Amount = 0.0
    for term in listed:
        total = total + term
    return total
