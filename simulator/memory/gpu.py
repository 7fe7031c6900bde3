"""Computes the bytes on a GPU by kind, for every pipeline rank, and finds the fullest rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import fsum
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
from msgspec import Struct

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.provenance import Sourced, SourcedBytes, SourcedFraction, SourcedSeconds
from moesim.simulator.common.bounded_cache import BoundedCache, Same
from moesim.simulator.dispatchers.protocol import Call
from moesim.simulator.dispatchers.registry import dispatcher
from moesim.simulator.frameworks.software import PLAIN, Software
from moesim.simulator.layout.parallel import Layout, tokens_per_gpu
from moesim.simulator.layout.stages import Block, StageAssignment, blocks_with_parameters
from moesim.simulator.memory.activations import activation_bytes
from moesim.simulator.memory.allocator import LARGE_SEGMENT_BYTES, AllocatorBytes
from moesim.simulator.memory.rank_bytes import (
    Amount,
    HeldStage,
    PlanNumbers,
    RankTerms,
    StateFormats,
    bytes_freed_by_head,
    moments_of,
    placeholder_bytes,
    rank_bytes,
    rank_terms,
    total_of,
    workspace_bytes,
)
from moesim.simulator.model.block import EMBEDDING, HEAD, MTP
from moesim.simulator.model.counts import block_parameters
from moesim.simulator.model.operator import BlockKind
from moesim.simulator.model.precision import Precision, row_bytes
from moesim.simulator.model.recompute import Recompute
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.scenario.parallel import ParallelPlan
from moesim.simulator.schedules.action import Schedule, Step, actions_of


class LocalParameters(Struct, frozen=True):
    """Parameters on one GPU, split into those of routed experts and all others."""

    experts: float
    other: float


def local_parameters(
    shape: ModelShape, layout: Layout, blocks: Sequence[Block], redundant_experts: int = 0
) -> LocalParameters:
    """Count the parameters of these blocks on one GPU; a table that several blocks share counts once.

    An MTP module and a tied head need the embedding table, so a rank that holds one of them without the
    embedding block holds a copy of the table.
    """
    plan, kinds = layout.plan, {block.kind for block in blocks}
    held = 1.0 if shape.moe is None else (shape.moe.experts + redundant_experts) / shape.moe.experts
    of_kind: dict[BlockKind, tuple[float, float]] = {}
    for kind in kinds:
        p, moe = block_parameters(shape, kind), shape.moe if shape.block(kind).routed else None
        # Every tensor-parallel rank has a copy of the projections of latent rows.
        latent = 0 if moe is None else moe.latent_parameters(shape.hidden)
        cut = p.attention + p.dense_ffn + p.shared_experts - latent + p.mtp_projection
        experts = p.routed_experts * held / (plan.ep * plan.expert_tp)
        of_kind[kind] = experts, cut / plan.tp + (p.norms + p.router + latent)
    experts = other = 0.0
    for block in blocks:
        experts, other = experts + of_kind[block.kind][0], other + of_kind[block.kind][1]
    embedding = EMBEDDING in kinds or MTP in kinds or (shape.tied_embeddings and HEAD in kinds)
    head = HEAD in kinds and not shape.tied_embeddings
    table = shape.vocab * shape.hidden / plan.tp
    positions = shape.learned_positions * shape.hidden * (EMBEDDING in kinds)
    return LocalParameters(experts, other + table * (embedding + head) + positions)


FRAMEWORK_BYTES = SourcedBytes(
    value=3.0e9,
    kind="assumed",
    source="CUDA context, channels and buffers of NCCL and NVSHMEM, workspaces of cuBLAS and cuDNN: what one "
    "process holds outside the allocator of its tensors; round figures, not measured",
    date="2026-11-20",
    between=(1.0e9, 6.0e9),
    note="from a context and one communicator to a dozen communicators with their buffers",
)
"""Bytes that a process holds outside the allocator of its tensors."""
FSDP_SLACK = Sourced(
    value=1.01,
    kind="measured",
    source="simulator/data/published/h200-runs.csv: bytes reserved beyond the active ones over those of the "
    "optimizer states at the peak of five torchtitan runs on 8x NVIDIA H200 (driver 580.159.04, torch "
    "2.11.0), median; least and most of the five",
    date="2026-11-20",
    between=(0.74, 1.32),
    note="0.88 to 1.13 in two FSDP2 runs on 2x H100 and three on 2x H200, which were not used; none of the "
    "runs was short of memory: an allocator gives cached blocks back before it fails",
)
"""Bytes that the allocator reserves beyond those in use, over those of the optimizer states, where parameters
or gradients come and go within a step: ZeRO-3, FSDP1 and FSDP2. Shards of gradients and copies for
collectives lie in pools of their own streams; both have the size of the parameters that a GPU keeps, however
many activations lie beside them."""
BUFFERS_SLACK = SourcedFraction(
    value=0.13,
    kind="published",
    source="simulator/data/published/allocator-peaks.csv: reserved over allocated bytes less 1 at the peaks "
    "that Megatron-LM logged on six ranks of three runs, median; least and most of the six",
    date="2026-11-25",
    between=(0.05, 0.17),
    note="without offloaded activations, which take up to 0.26; Megatron-LM before it had buffers of "
    "gradients (issue 60, 2020) took 0.39",
)
"""The same where parameters, gradients and states stay in buffers that are allocated once (Megatron-LM)."""
REPLAY_ERRORS = {
    "segments": SourcedFraction(
        value=0.021,
        kind="measured",
        source="simulator/data/published/own-runs-measured.csv: reserved bytes of three torchtitan runs on "
        "2x NVIDIA H200 (driver 580.159.04, torch 2.11.0) over the replayed ones less 1, median; least, most",
        date="2026-11-22",
        between=(0.001, 0.09),
    ),
    "expandable": SourcedFraction(
        value=0.003,
        kind="measured",
        source="simulator/data/published/h200-runs.csv: reserved bytes of five torchtitan runs on 8x NVIDIA "
        "H200 (driver 580.159.04, torch 2.11.0) over the replayed ones less 1, median; least and most",
        date="2026-11-20",
        between=(0.001, 0.03),
    ),
}
"""Bytes reserved beyond those of a replay (eq. M43), over those of the replay, by `software.allocator`."""
Verdict: TypeAlias = Literal["fits", "at risk", "does not fit"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
"""The verdicts, best first. `at risk`: the bytes in use fit, but not all that framework and allocator may
reserve."""


def allocator_slack(software: Software, zero_stage: int) -> Sourced:
    """The slack of the allocator under a framework's way of holding parameters and gradients (eq. M10).

    Under ZeRO-0 and 1 no FSDP gathers or scatters, whatever the trainer does in other plans.
    """
    come_and_go = zero_stage == 3 or (software.fsdp and zero_stage > 1)
    return FSDP_SLACK if come_and_go else BUFFERS_SLACK


def most_reserved(by_kind: Mapping[str, Amount], slack: Amount, of_states: Amount) -> Amount:
    """Most bytes that a process may take on a GPU (docs/model.md, eq. M10); numbers or arrays.

    `slack`: most of what the allocator reserves beyond the tensors, over these, or where `of_states` is 1
    (else 0) over optimizer states or gradients, whichever are more. Communication buffers have none: they
    are allocated once, outside the allocator of tensors.
    """
    tensors = total_of(n for kind, n in by_kind.items() if kind not in ("framework", "communication_buffers"))
    states = np.maximum(by_kind["optimizer"], by_kind["gradients"])
    beyond = slack * (tensors + of_states * (states - tensors))
    return tensors + beyond + by_kind["communication_buffers"] + highest(FRAMEWORK_BYTES)


RETRY_CALLS = SourcedSeconds(
    value=60e-6,
    kind="assumed",
    source="cudaFree and cudaMalloc of a segment: jvoltci.github.io/mosaic (custom allocators), about 10 "
    "and 50 us; jiahuanglin.xyz (system_ml, lesson 15), 30 to 200 us for cudaMalloc",
    date="2026-11-26",
    between=(40e-6, 300e-6),
    note="without the work that the device has queued when cudaFree waits for it",
)
"""Time to give a segment back to the driver and to take another."""


def retries_s(excess_bytes: float, microbatches: int) -> float:
    """Seconds that an allocator at its limit adds to a step (docs/model.md, eq. M48).

    When the driver refuses a segment, PyTorch frees cached ones until it fits, and asks again
    (`num_alloc_retries`; pytorch/pytorch@v2.11.0 `c10/cuda/CUDACachingAllocator.cpp`, `malloc`,
    `release_available_cached_blocks`). `excess_bytes`: what it would reserve beyond the capacity, in segments
    of 20 MiB. Assumed: every micro-batch meets the limit once.
    """
    segments = max(excess_bytes, 0.0) / LARGE_SEGMENT_BYTES
    return microbatches * segments * highest(RETRY_CALLS)


def lowest(number: Sourced) -> float:
    """The low end of a number's range; the number where it has none."""
    return number.range[0] if number.range else number.value


def highest(number: Sourced) -> float:
    """The high end of a number's range; the number where it has none."""
    return number.range[1] if number.range else number.value


def verdict_of(total: float, most: float, capacity: float) -> Verdict:
    """Whether a plan fits: `total` are the bytes in use and `most` those reserved at most (eq. M10)."""
    if total > capacity:
        return "does not fit"
    return "fits" if most <= capacity else "at risk"


def is_admitted(total: Amount, most: Amount, capacity: float, headroom: float | None) -> Any:
    """Whether a plan leaves the head-room that a search keeps; numbers or arrays.

    `headroom` None: the bytes reserved at most fit, so that the verdict is `fits`. Else it is the share of
    the capacity that the bytes in use leave free; 0 admits plans at risk.
    """
    return most <= capacity if headroom is None else total <= capacity * (1.0 - headroom)


class RankStages(Struct, frozen=True):
    """Stages of one pipeline rank, and the micro-batches that it has in flight.

    `in_flight` lists moments of the schedule, each as micro-batches in flight by stage; the moment that takes
    the most memory counts.
    """

    stages: tuple[int, ...]
    in_flight: tuple[Mapping[int, int], ...]


class RankMemory(Struct, frozen=True):
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
        return {name: getattr(self, name) for name in self.__struct_fields__}

    @property
    def total(self) -> float:
        """Bytes of all kinds together."""
        return fsum(self.by_kind().values())

    def range(self, slack: Sourced, replay: AllocatorBytes | None = None) -> tuple[float, float]:
        """Lowest and highest bytes that the process may take on the device (docs/model.md, eq. M10).

        The lowest takes the low end of the framework's range and an allocator without slack; the highest is
        `most_reserved`. With the peaks of a `replay`, `slack` is the error of its reserved bytes.
        """
        if replay is None:
            used = self.total - self.framework
            return used + lowest(FRAMEWORK_BYTES), float(
                most_reserved(self.by_kind(), highest(slack), float(slack is FSDP_SLACK))
            )
        reserved = replay.reserved * (1.0 + highest(slack)) + highest(FRAMEWORK_BYTES)
        return replay.active + lowest(FRAMEWORK_BYTES), reserved


class MemoryReport(Struct, frozen=True):
    """Memory of the fullest pipeline rank in detail, and of every rank."""

    by_kind_bytes: dict[str, float]
    total_bytes: float
    capacity_bytes: float
    fits: bool
    fullest_rank: int
    by_rank: tuple[RankMemory, ...]
    notes: tuple[str, ...]
    """Sentences about extrapolated inputs."""
    allocator: AllocatorBytes | None = None
    """Peaks of PyTorch's allocator on the fullest rank, where its steps were replayed (eq. M43)."""
    slack: Sourced = BUFFERS_SLACK
    """Slack of the allocator under the plan's framework (eq. M10)."""
    replay_error: SourcedFraction | None = None
    """Error of the reserved bytes in `allocator`."""


class MemoryInputs(Struct, frozen=True):
    """Everything that a plan's memory depends on, apart from its stages (docs/model.md, eq. M5)."""

    shape: ModelShape
    layout: Layout
    precision: Precision
    recompute: Recompute
    sequence: int
    """Tokens of a sequence."""
    sms: int
    """SMs of the communication kernels (`communication.sms`)."""
    kernels: str
    """The scenario's `communication.kernels`: generation of the expert-parallel kernels."""
    redundant_experts: int = 0
    """Replicas beyond one per expert; each takes the memory of an expert, states included (eq. M6)."""
    software: Software = PLAIN
    single_pass: bool = False
    """Whether there is one micro-batch and no pipeline."""


def memory_by_kind(
    inputs: MemoryInputs, assignment: StageAssignment, ranks: Sequence[RankStages], capacity_bytes: float
) -> MemoryReport:
    """Compute the bytes per GPU for every pipeline rank of a plan (docs/model.md, eq. M5).

    `ranks[r]` names the stages of pipeline rank r; a stage that several ranks hold (DualPipe) has its
    states sharded over all of its copies. Tokens are spread evenly over experts; imbalance is not included.
    The formulas are those of `layout.rank_bytes`. Raises InputError where the ranks do not cover the stages.
    """
    copies = Counter(stage for rank in ranks for stage in rank.stages)
    if sorted(copies) != list(range(len(assignment.stages))):
        raise InputError(
            f"the pipeline ranks hold stages {sorted(copies)}, but the model is cut into "
            f"{len(assignment.stages)} stages, 0 to {len(assignment.stages) - 1}"
        )
    plan = _OnePlan(inputs)
    kinds = [tuple(block.kind for block in stage) for stage in assignment.stages]
    by_rank = []
    terms_of: dict[object, RankTerms] = {}
    for rank in ranks:
        content = tuple((copies[stage], kinds[stage]) for stage in rank.stages)
        if content not in terms_of:  # most ranks hold the same blocks as their neighbours
            terms_of[content] = rank_terms(plan, [HeldStage(k, n) for n, k in content])
        by_kind = rank_bytes(plan, terms_of[content], moments_of(rank.stages, rank.in_flight))
        by_rank.append(RankMemory(**{kind: float(value) for kind, value in by_kind.items()}))
    fullest = max(range(len(by_rank)), key=lambda r: (by_rank[r].total, -r))
    total = by_rank[fullest].total
    return MemoryReport(
        by_kind_bytes=by_rank[fullest].by_kind(),
        total_bytes=total,
        capacity_bytes=capacity_bytes,
        fits=total <= capacity_bytes,
        fullest_rank=fullest,
        by_rank=tuple(by_rank),
        notes=(plan.note,) if plan.note and assignment.stages_with_routed_layers else (),
        slack=allocator_slack(inputs.software, inputs.layout.plan.zero_stage),
    )


def expert_group(layout: Layout, shape: ModelShape, sequence: int, sms: int) -> Call:
    """What decides a dispatcher's buffers under a plan; `sequence`: tokens of one sequence."""
    plan, experts = layout.plan, shape.moe.experts if shape.moe else 0
    nodes = max(1, plan.ep * plan.expert_tp // layout.gpus_per_node)
    tokens = tokens_per_gpu(plan, sequence)
    return Call(plan.ep, nodes, sms, tokens, shape.routed_width, experts=experts)


def pipeline_buffer_bytes(shape: ModelShape, plan: ParallelPlan, sequence: int) -> float:
    """Bytes of the buffers that send and receive activations and gradients between pipeline ranks (eq. M4).

    Rows are in BF16.
    """
    if plan.pp == 1:
        return 0.0
    tokens = plan.microbatch * sequence / plan.cp / (plan.tp if plan.sequence_parallel else 1)
    return 4 * tokens * row_bytes(shape.hidden * shape.residual_streams, "bf16")


class _OnePlan(PlanNumbers):
    """The `PlanNumbers` of one plan, for the formulas in `layout.rank_bytes`."""

    def __init__(self, inputs: MemoryInputs) -> None:
        self._inputs = inputs
        plan, layout = inputs.layout.plan, inputs.layout
        self.shape = inputs.shape
        self.formats = StateFormats.of(inputs.precision)
        self.zero_stage = plan.zero_stage
        self.shards, self.optimizer_shards = layout.shards, layout.optimizer_shards
        group = expert_group(layout, inputs.shape, inputs.sequence, inputs.sms)
        expert = dispatcher(inputs.kernels).buffers(group)
        self.note = expert.note
        self.expert_buffers = expert.total_bytes
        self.pipeline_buffers = pipeline_buffer_bytes(inputs.shape, plan, inputs.sequence)
        self.framework = FRAMEWORK_BYTES.value
        self.single_pass = inputs.single_pass and inputs.software.makes_gradients_in_backward
        self.whole_gradients = inputs.software.keeps_whole_gradients(plan.pp)
        self._kept: dict[BlockKind, float] = {}

    def kept(self, kind: BlockKind) -> float:
        if kind not in self._kept:
            own = self._inputs
            self._kept[kind] = activation_bytes(
                own.shape, kind, own.precision, own.recompute, own.layout.plan, own.sequence, own.software
            )
        return self._kept[kind]

    def working(self, kind: BlockKind) -> float:
        own = self._inputs
        return workspace_bytes(own.shape, kind, own.layout.plan, own.precision, own.sequence, own.software)

    def placeholders(self, kind: BlockKind) -> float:
        own = self._inputs
        return placeholder_bytes(own.shape, kind, own.layout.plan, own.software)

    def freed(self) -> float:
        own = self._inputs
        return bytes_freed_by_head(own.shape, own.layout.plan, own.precision, own.sequence, own.software)

    def parameters(self, kinds: Sequence[BlockKind]) -> LocalParameters:
        own = self._inputs
        blocks = [Block(kind) for kind in kinds]
        return local_parameters(own.shape, own.layout, blocks, own.redundant_experts)


# -- in flight ---------------------------------------------------------------------------------------
# Derives from a schedule which blocks each pipeline rank holds, and how many micro-batches at once.

State = frozenset[tuple[int, int]]
"""Micro-batches in flight at one moment, as (stage, count) pairs."""


def rank_stages(schedule: Schedule) -> list[RankStages]:
    """Return the stages of every pipeline rank and the moments at which its memory may peak.

    A chunk counts from the start of its forward to the end of its last backward part (B or W). A moment is
    dropped if another one has at least as many chunks of every stage. Several moments may remain because
    stages differ in size, so that the one with the most chunks need not take the most memory.
    """

    def stages() -> tuple[RankStages, ...]:
        return tuple(
            RankStages(schedule.stages_on_rank(rank), tuple(dict(state) for state in _largest_states(steps)))
            for rank, steps in enumerate(schedule.ranks)
        )

    return list(_RANK_STAGES.get(Same(schedule), lambda: (schedule, stages()))[1])


_RANK_STAGES: BoundedCache[tuple[Schedule, tuple[RankStages, ...]]] = BoundedCache(
    100_000, lambda kept: sum(map(len, kept[0].ranks))
)
"""Stages of the schedules before, limited by the steps of those schedules."""


def _largest_states(steps: tuple[Step, ...]) -> list[list[tuple[int, int]]]:
    in_flight: dict[int, int] = {}
    states: set[State] = set()
    for step in steps:
        actions = actions_of(step)
        # An overlapped pair allocates the chunk of its forward before it frees that of its backward.
        started = [action.stage for action in actions if action.kind == "F"]
        if started:  # without a forward there are at most as many chunks as before
            for stage in started:
                in_flight[stage] = in_flight.get(stage, 0) + 1
            states.add(frozenset([item for item in in_flight.items() if item[1] > 0]))
        for action in actions:
            if action.kind in ("B", "W"):
                in_flight[action.stage] = in_flight.get(action.stage, 0) - 1
    largest: list[dict[int, int]] = []
    # A state that covers another one has more chunks, so every state is compared with larger ones alone.
    for state in sorted(states or {frozenset()}, key=lambda s: -sum(count for _, count in s)):
        if not any(all(larger.get(stage, 0) >= n for stage, n in state) for larger in largest):
            largest.append(dict(state))
    return sorted(sorted(state.items()) for state in largest)


class RankChunks(NamedTuple):
    """Block kinds of each model chunk of a pipeline rank, and the rank where its place counts.

    Where only the blocks matter, `rank` is 0 and all blocks are one sorted chunk: ranks alike are equal.
    """

    chunks: tuple[tuple[BlockKind, ...], ...]
    rank: int = 0

    @property
    def kinds(self) -> tuple[BlockKind, ...]:
        """Kinds of all blocks of the rank, sorted."""
        return tuple(sorted(kind for chunk in self.chunks for kind in chunk))


def chunks_by_rank(schedule: Schedule, stages: StageAssignment, *, by_place: bool) -> tuple[RankChunks, ...]:
    """Blocks on each pipeline rank, by chunk or only by kind; a head that runs twice counts once."""
    key = Same(schedule), Same(stages), by_place
    return _CHUNKS.get(key, lambda: _chunks_by_rank(schedule, stages, by_place))


_CHUNKS: BoundedCache[tuple[RankChunks, ...]] = BoundedCache(20_000, len)


def _chunks_by_rank(schedule: Schedule, stages: StageAssignment, by_place: bool) -> tuple[RankChunks, ...]:
    ranks: list[RankChunks] = []
    for rank in range(schedule.pp):
        chunks = tuple(
            tuple(block.kind for block in blocks_with_parameters(stages, stage))
            for stage in schedule.stages_on_rank(rank)
        )
        held = RankChunks(chunks, rank)
        ranks.append(held if by_place else RankChunks((held.kinds,)))
    return tuple(ranks)
