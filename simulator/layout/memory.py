"""Bytes on each GPU by kind, for every pipeline rank and the fullest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from math import fsum

from moesim.hwmodels.errors import InfeasibleError, InputError
from moesim.hwmodels.provenance import SourcedBytes, SourcedFraction
from moesim.simulator.layout.activations import activation_bytes, working_bytes
from moesim.simulator.layout.buffers import expert_buffers, pipeline_buffer_bytes
from moesim.simulator.layout.parallel import Layout
from moesim.simulator.layout.stages import Block, StageAssignment
from moesim.simulator.model.block import EMBEDDING, HEAD, MTP
from moesim.simulator.model.counts import block_parameters
from moesim.simulator.model.precision import BYTES_PER_ELEMENT, Precision
from moesim.simulator.model.recompute import RecomputePolicy
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.model.software import PLAIN, Software

FRAMEWORK_BYTES = SourcedBytes(
    value=3.0e9,
    kind="assumed",
    source="CUDA context, channels and buffers of NCCL and NVSHMEM, workspaces of cuBLAS and cuDNN: what one "
    "process holds outside the allocator of its tensors; round figures, not measured",
    date="2026-11-20",
    between=(1.0e9, 6.0e9),
    note="from a context and one communicator to a dozen communicators with their buffers",
)
ALLOCATOR_SLACK = SourcedFraction(
    value=0.19,
    kind="measured",
    source="simulator/data/published/h200-runs.csv: reserved over active bytes less 1 at the peak of five "
    "torchtitan runs on 8x NVIDIA H200 (driver 580.159.04, torch 2.11.0), median; least and most of the five",
    date="2026-11-20",
    between=(0.13, 0.37),
    note="none of the runs was short of memory: an allocator gives cached blocks back before it fails",
)
"""Bytes that the allocator of the framework holds beyond those in use, over those in use."""


@dataclass(frozen=True, slots=True)
class RankStages:
    """What one pipeline rank holds.

    `in_flight` lists states that occur at one moment: micro-batches in flight by stage. The schedule
    gives them; the largest counts.
    """

    stages: tuple[int, ...]
    in_flight: tuple[Mapping[int, int], ...]


@dataclass(frozen=True, slots=True)
class LocalParameters:
    """Parameters on one GPU: routed experts, and everything else."""

    experts: float
    other: float


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes on one GPU of a pipeline rank, by kind."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    workspace: float
    communication_buffers: float
    framework: float

    def by_kind(self) -> dict[str, float]:
        """Bytes by kind, in a fixed order."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @property
    def total(self) -> float:
        """All kinds together."""
        return fsum(self.by_kind().values())

    @property
    def range(self) -> tuple[float, float]:
        """Least and most that they take (docs/model.md, eq. M10).

        Least: the framework at the low end of its range, and an allocator without gaps. Most: the framework
        at the high end, and the allocator with the most slack that was measured.
        """
        low, high = FRAMEWORK_BYTES.between or (self.framework, self.framework)
        slack = (ALLOCATOR_SLACK.between or (0.0, 0.0))[1]
        tensors = self.total - self.framework - self.communication_buffers
        other = self.total - self.framework
        return other + low, other + high + slack * tensors


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Memory of the fullest pipeline rank, and of each."""

    by_kind_bytes: dict[str, float]
    total_bytes: float
    capacity_bytes: float
    fits: bool
    fullest_rank: int
    by_rank: tuple[RankMemory, ...]
    notes: tuple[str, ...]
    """What was extrapolated."""


def memory_by_kind(
    shape: ModelShape,
    layout: Layout,
    precision: Precision,
    assignment: StageAssignment,
    ranks: Sequence[RankStages],
    *,
    sequence: int,
    recompute: RecomputePolicy,
    communication_sms: int,
    kernels: str,
    capacity_bytes: float,
    redundant_experts: int = 0,
    software: Software = PLAIN,
    single_pass: bool = False,
) -> MemoryReport:
    """Bytes per GPU for every pipeline rank of a plan (docs/model.md, eq. M5).

    `ranks[r]` names the stages of pipeline rank r; a stage that several ranks hold (DualPipe) has its
    states sharded over all of its copies. Tokens are spread evenly; skew of the routing is not included.
    `kernels`: of the expert-parallel communication, as in the scenario.
    `redundant_experts` replicas beyond one an expert count as experts, states included (eq. M6).
    With `single_pass` (one micro-batch, no pipeline) gradients come while activations go: the larger counts.
    Raises InputError where the ranks do not cover the stages.
    """
    copies = Counter(stage for rank in ranks for stage in rank.stages)
    if sorted(copies) != list(range(len(assignment.stages))):
        raise InputError(
            f"the pipeline ranks hold stages {sorted(copies)}, but the model is cut into "
            f"{len(assignment.stages)} stages, 0 to {len(assignment.stages) - 1}"
        )
    expert = expert_buffers(layout.plan.ep, shape.hidden, communication_sms, kernels)
    notes = (expert.note,) if expert.note and any(assignment.stages_with_routed_layers) else ()
    by_rank = []
    seen: dict[object, tuple[tuple[float, float, float], list[float], float]] = {}
    for rank in ranks:
        blocks = [block for stage in rank.stages for block in assignment.stages[stage]]
        has_experts = any(shape.block(block.kind).routed for block in blocks)
        alike = tuple((copies[s], tuple(b.kind for b in assignment.stages[s])) for s in rank.stages)
        if alike not in seen:  # most ranks hold the same blocks as their neighbours
            seen[alike] = (
                _states(shape, layout, precision, assignment, rank, copies, redundant_experts),
                _kept(shape, layout, precision, assignment, rank, sequence, recompute, software),
                _workspace(shape, layout, precision, blocks, sequence, software),
            )
        states, kept, workspace = seen[alike]
        of_stage = dict(zip(rank.stages, kept, strict=True))
        moments = (fsum(of_stage[stage] * n for stage, n in state.items()) for state in rank.in_flight)
        activations = max(moments, default=0.0)
        by_rank.append(
            RankMemory(
                weights=states[0],
                gradients=max(0.0, states[1] - activations) if single_pass else states[1],
                optimizer=states[2],
                activations=activations,
                workspace=workspace,
                communication_buffers=expert.total_bytes * has_experts
                + pipeline_buffer_bytes(shape, layout.plan, sequence),
                framework=FRAMEWORK_BYTES.value,
            )
        )
    fullest = max(range(len(by_rank)), key=lambda r: (by_rank[r].total, -r))
    total = by_rank[fullest].total
    return MemoryReport(
        by_kind_bytes=by_rank[fullest].by_kind(),
        total_bytes=total,
        capacity_bytes=capacity_bytes,
        fits=total <= capacity_bytes,
        fullest_rank=fullest,
        by_rank=tuple(by_rank),
        notes=notes,
    )


def require_fit(report: MemoryReport) -> None:
    """Raise InfeasibleError, with the largest kinds and the remedies, where a plan does not fit."""
    if report.fits:
        return
    largest = sorted(report.by_kind_bytes.items(), key=lambda item: -item[1])[:3]
    parts = ", ".join(f"{kind} {value / 1e9:.1f} GB" for kind, value in largest)
    raise InfeasibleError(
        f"out of memory: pipeline rank {report.fullest_rank} needs {report.total_bytes / 1e9:.1f} GB a GPU, "
        f"{(report.total_bytes - report.capacity_bytes) / 1e9:.1f} GB above the limit of "
        f"{report.capacity_bytes / 1e9:.1f} GB ({parts}); raise parallel.pp, ep, tp or zero_stage, or use a "
        "recompute policy that keeps less"
    )


def local_parameters(
    shape: ModelShape, layout: Layout, blocks: Sequence[Block], redundant_experts: int = 0
) -> LocalParameters:
    """Parameters of these blocks on one GPU; tables that several blocks use are held once.

    An MTP module needs the embedding table, and a tied head is that table: a rank without the embedding
    block then holds a copy of it.
    """
    plan, total = layout.plan, [0.0, 0.0]
    held = 1.0 if shape.moe is None else (shape.moe.experts + redundant_experts) / shape.moe.experts
    for block in blocks:
        p = block_parameters(shape, block.kind)
        total[0] += p.routed_experts * held / (plan.ep * plan.expert_tp)
        cut = p.attention + p.dense_ffn + p.shared_experts + p.mtp_projection
        total[1] += cut / plan.tp + p.norms + p.router
    kinds = {block.kind for block in blocks}
    embedding = EMBEDDING in kinds or MTP in kinds or (shape.tied_embeddings and HEAD in kinds)
    head = HEAD in kinds and not shape.tied_embeddings
    table = shape.vocab * shape.hidden / plan.tp
    return LocalParameters(total[0], total[1] + table * (embedding + head))


def _states(
    shape: ModelShape,
    layout: Layout,
    precision: Precision,
    assignment: StageAssignment,
    rank: RankStages,
    copies: Mapping[int, int],
    redundant: int,
) -> tuple[float, float, float]:
    """(weights, gradients, optimizer states) of one rank, each sharded as the ZeRO stage says (eq. M1)."""
    zero = layout.plan.zero_stage
    elements = dict.fromkeys((1, 2, 3), 0.0)
    blocks = [block for stage in rank.stages for block in assignment.stages[stage]]
    whole = local_parameters(shape, layout, blocks, redundant)
    # Shares are per stage because the number of copies is; shared tables follow the rank's own blocks.
    parts = [local_parameters(shape, layout, assignment.stages[stage], redundant) for stage in rank.stages]
    twice = fsum(part.other for part in parts) - whole.other
    for stage, part in zip(rank.stages, parts, strict=True):
        other = part.other - twice * part.other / fsum(p.other for p in parts)
        replicas_expert = layout.expert_dp * copies[stage]
        replicas_other = layout.dp * layout.plan.cp * copies[stage]
        for level in elements:
            if zero >= level:
                elements[level] += part.experts / replicas_expert + other / replicas_other
            else:
                elements[level] += part.experts + other
    master = precision.master_weights if precision.master_weights != precision.parameters else None
    per_parameter = (BYTES_PER_ELEMENT[master] if master else 0.0) + 2 * BYTES_PER_ELEMENT[precision.moments]
    weights = elements[3] * BYTES_PER_ELEMENT[precision.parameters]
    gathered = min(precision.parameters, precision.parameter_gather, key=lambda f: BYTES_PER_ELEMENT[f])
    if zero >= 3:  # the block under way and the next one are gathered in full
        weights += 2 * _largest_block(shape, layout, blocks, redundant) * BYTES_PER_ELEMENT[gathered]
    gradients = elements[2] * precision.gradient_bytes
    if zero >= 2:  # the block under way has its gradient in full until it is scattered
        gradients += _largest_block(shape, layout, blocks, redundant) * precision.gradient_bytes
    return weights, gradients, elements[1] * per_parameter


def _largest_block(shape: ModelShape, layout: Layout, blocks: Sequence[Block], redundant: int) -> float:
    sizes = (local_parameters(shape, layout, [block], redundant) for block in blocks)
    return max((size.experts + size.other for size in sizes), default=0.0)


def _kept(
    shape: ModelShape,
    layout: Layout,
    precision: Precision,
    assignment: StageAssignment,
    rank: RankStages,
    sequence: int,
    recompute: RecomputePolicy,
    software: Software,
) -> list[float]:
    """Activations that a micro-batch leaves on each stage of a rank."""
    each = {
        kind: activation_bytes(shape, kind, precision, recompute, layout.plan, sequence, software)
        for kind in {block.kind for stage in rank.stages for block in assignment.stages[stage]}
    }
    return [fsum(each[block.kind] for block in assignment.stages[stage]) for stage in rank.stages]


def _workspace(
    shape: ModelShape,
    layout: Layout,
    precision: Precision,
    blocks: Sequence[Block],
    sequence: int,
    software: Software,
) -> float:
    kinds = {b.kind for b in blocks}
    wide = HEAD in kinds and precision.loss == "fp32"  # its FP32 tensors are counted as kept
    sizes = (
        working_bytes(shape, kind, layout.plan, precision, sequence, software)
        for kind in kinds
        if kind != HEAD or not wide
    )
    # No layer runs backward before the loss has: what the head gives back is there for the layers.
    freed = activation_bytes(shape, HEAD, precision, "none", layout.plan, sequence, software) if wide else 0.0
    return max(0.0, max(sizes, default=0.0) - freed)
