"""Counts the bytes per GPU of many plans at once, with the formulas for one plan (`layout.rank_bytes`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from msgspec import Struct, field

from moesim.hwmodels.arrays import FloatArray
from moesim.simulator.dispatchers.registry import dispatcher
from moesim.simulator.layout.stages import Block, StageAssignment
from moesim.simulator.memory.activations import activation_bytes
from moesim.simulator.memory.gpu import (
    FRAMEWORK_BYTES,
    FSDP_SLACK,
    RankStages,
    allocator_slack,
    expert_group,
    highest,
    local_parameters,
    most_reserved,
    pipeline_buffer_bytes,
)
from moesim.simulator.memory.rank_bytes import (
    HeldStage,
    Moment,
    PlanNumbers,
    StateFormats,
    bytes_freed_by_head,
    moments_of,
    placeholder_bytes,
    rank_bytes,
    rank_terms,
    total_of,
    workspace_bytes,
)
from moesim.simulator.model.block import HEAD
from moesim.simulator.model.operator import BlockKind
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.planner.frames import Frame
from moesim.simulator.planner.plan_arrays import inner_axes
from moesim.simulator.planner.replay import Pattern
from moesim.simulator.planner.space import Space
from moesim.simulator.scenario import Scenario

Kinds = tuple[BlockKind, ...]
Size = Literal["kept", "working", "placeholders", "freed"]


class FullestRank(NamedTuple):
    """Bytes in use on the fullest rank of many plans, and those that it may reserve at most (eq. M10)."""

    used: FloatArray
    reserved: FloatArray


class MemoryBook(Struct):
    """Memory of the plans of a space; terms that plans share are counted once.

    It equals `layout.memory.memory_by_kind` of every single plan up to rounding; a test compares them.
    """

    scenario: Scenario
    shape: ModelShape
    space: Space
    _numbers: dict[object, FloatArray] = field(default_factory=dict)
    _plans: dict[int, _ManyPlans] = field(default_factory=dict)
    """Inputs of the frames that were counted last, by number of replicas; their layouts share them."""
    _of: tuple[Sequence[Frame], Pattern] | None = None
    """These frames and their pattern."""

    def fullest(
        self, frames: Sequence[Frame], pattern: Pattern, assignment: StageAssignment, replicas: int = 0
    ) -> FullestRank:
        """The fullest rank [frames, precisions, policies, sms, ZeRO stages] (eqs. M5 and M10).

        `replicas`: number of redundant experts of the placement (eq. M6).
        """
        if self._of is None or self._of[0] is not frames or self._of[1] is not pattern:
            self._of, self._plans = (frames, pattern), {}
        if replicas not in self._plans:
            self._plans[replicas] = _ManyPlans(self, frames, pattern, replicas)
        plans = self._plans[replicas]
        whole = (len(frames), *inner_axes(self.space))
        software, stages = self.scenario.software, self.space.zero_stage
        slacks = [allocator_slack(software, stage) for stage in stages]
        slack, of_states = np.array([(highest(s), s is FSDP_SLACK) for s in slacks], float).T
        used, reserved = np.zeros(whole), np.zeros(whole)
        for stages_of_rank, moments in _different_ranks(frames, pattern, assignment):
            by_kind = rank_bytes(plans, rank_terms(plans, stages_of_rank), moments)
            total, most = total_of(by_kind.values()), most_reserved(by_kind, slack, of_states)
            fuller = total > used
            used, reserved = np.where(fuller, total, used), np.where(fuller, most, reserved)
        return FullestRank(used, reserved)

    def size(self, what: Size, frame: Frame, kind: BlockKind) -> FloatArray:
        """Bytes of a block [precisions, policies, sms, ZeRO stages]; an axis of no influence has length 1.

        `kept`: activations of a micro-batch. `working`: workspace. `placeholders`: those of weight gradients.
        `freed`: bytes that the head frees before the layers run backward.
        """
        key = (what, *_split(frame), kind)
        if key not in self._numbers:
            shape, plan, software = self.shape, frame.plan, self.scenario.software
            sequence, policies = self.scenario.batch.sequence_length, self.space.recompute
            rows: list[list[float]]
            match what:
                case "kept":
                    rows = [
                        [activation_bytes(shape, kind, r, p, plan, sequence, software) for p in policies]
                        for r in self.space.recipes
                    ]
                case "working":
                    rows = [
                        [workspace_bytes(shape, kind, plan, r, sequence, software)]
                        for r in self.space.recipes
                    ]
                case "freed":
                    rows = [
                        [bytes_freed_by_head(shape, plan, r, sequence, software)] for r in self.space.recipes
                    ]
                case "placeholders":
                    rows = [[placeholder_bytes(shape, kind, plan, software)]]
            self._numbers[key] = np.array(rows)[:, :, None, None]
        return self._numbers[key]

    def expert_buffers(self, frame: Frame) -> FloatArray:
        """Bytes of the buffers of expert-parallel communication [1, 1, sms, 1]."""
        plan = frame.plan
        key = ("buffers", plan.ep, plan.expert_tp, plan.microbatch, plan.tp, plan.cp)
        if key not in self._numbers:
            kind = dispatcher(self.scenario.communication.kernels)
            sequence = self.scenario.batch.sequence_length
            groups = (expert_group(frame.layout, self.shape, sequence, sms) for sms in self.space.sms)
            sizes = [kind.buffers(group).total_bytes for group in groups]
            self._numbers[key] = np.array(sizes, dtype=np.float64)[None, None, :, None]
        return self._numbers[key]

    def parameters(self, frame: Frame, kinds: Kinds, replicas: int) -> FloatArray:
        """Parameters of some blocks on one GPU, as (routed experts, all others)."""
        key = ("parameters", *_parameter_split(frame), kinds, replicas)
        if key not in self._numbers:
            blocks = [Block(kind) for kind in kinds]
            local = local_parameters(self.shape, frame.layout, blocks, replicas)
            self._numbers[key] = np.array([local.experts, local.other])
        return self._numbers[key]


class _Parameters(Struct, frozen=True):
    experts: FloatArray
    other: FloatArray


class _ManyPlans(PlanNumbers):
    """The inputs of `layout.rank_bytes` for many plans, as arrays that broadcast.

    Their axes are [frames, precisions, policies, sms, ZeRO stages]. Frames that split a layer alike share
    their tensor sizes, so these are looked up once for each split.
    """

    def __init__(self, book: MemoryBook, frames: Sequence[Frame], pattern: Pattern, replicas: int) -> None:
        self._book, self._frames, self._more = book, frames, replicas
        self._first, self._split_of = _distinct([_split(frame) for frame in frames])
        self._own, self._parameters_of = _distinct([_parameter_split(frame) for frame in frames])
        self._parameters: dict[Kinds, _Parameters] = {}
        self._sizes: dict[object, FloatArray] = {}
        self.shape = book.shape
        formats = [StateFormats.of(recipe) for recipe in book.space.recipes]
        names = ("weight", "gathered", "gradient", "optimizer")
        columns = [np.array([getattr(f, n) for f in formats], dtype=np.float64) for n in names]
        self.formats = StateFormats(*(column[:, None, None, None] for column in columns))
        self.zero_stage = np.array(book.space.zero_stage)
        self.shards, self.optimizer_shards = (
            (_by_frame([float(e) for e, _ in counts]), _by_frame([float(other) for _, other in counts]))
            for counts in ([f.layout.shards for f in frames], [f.layout.optimizer_shards for f in frames])
        )
        self.expert_buffers = np.array([book.expert_buffers(frame) for frame in frames])
        sequence = book.scenario.batch.sequence_length
        self.pipeline_buffers = _by_frame(
            [pipeline_buffer_bytes(book.shape, f.plan, sequence) for f in frames]
        )
        self.framework = FRAMEWORK_BYTES.value
        made = book.scenario.software.makes_gradients_in_backward
        once = [float(made and pattern.pp == 1 and f.microbatches == 1) for f in frames]
        self.single_pass = _by_frame(once) > 0.0
        self.whole_gradients = book.scenario.software.keeps_whole_gradients(pattern.pp)

    def kept(self, kind: BlockKind) -> FloatArray:
        return self._by_split("kept", kind)

    def working(self, kind: BlockKind) -> FloatArray:
        return self._by_split("working", kind)

    def placeholders(self, kind: BlockKind) -> FloatArray:
        return self._by_split("placeholders", kind)

    def freed(self) -> FloatArray:
        return self._by_split("freed", HEAD)

    def parameters(self, kinds: Sequence[BlockKind]) -> _Parameters:
        key = tuple(sorted(kinds))
        if key not in self._parameters:
            own = [self._book.parameters(self._frames[n], key, self._more) for n in self._own]
            each = np.array(own)[self._parameters_of]
            self._parameters[key] = _Parameters(_by_frame(each[:, 0]), _by_frame(each[:, 1]))
        return self._parameters[key]

    def _by_split(self, what: Size, kind: BlockKind) -> FloatArray:
        key = (what, kind)
        if key not in self._sizes:
            each = [self._book.size(what, self._frames[n], kind) for n in self._first]
            self._sizes[key] = np.array(each)[self._split_of]
        return self._sizes[key]


def _distinct(keys: Sequence[object]) -> tuple[list[int], list[int]]:
    """Positions of the first of each of the keys, and for every key the position of its value among them."""
    first: dict[object, int] = {}
    for n, key in enumerate(keys):
        first.setdefault(key, n)
    places = {key: place for place, key in enumerate(first)}
    return list(first.values()), [places[key] for key in keys]


def _by_frame(values: Sequence[float] | FloatArray) -> FloatArray:
    return np.asarray(values, dtype=np.float64)[:, None, None, None, None]


def _split(frame: Frame) -> tuple[int, int, int, bool]:
    """What decides the tensor sizes of a block on one GPU; the last says whether there is a pipeline."""
    return frame.plan.tp, frame.plan.cp, frame.plan.microbatch, frame.plan.pp > 1


def _parameter_split(frame: Frame) -> tuple[int, int, int]:
    """What decides the parameters of a block on one GPU."""
    return frame.plan.tp, frame.plan.ep, frame.plan.expert_tp


def _different_ranks(
    frames: Sequence[Frame], pattern: Pattern, assignment: StageAssignment
) -> list[tuple[list[HeldStage], list[Moment]]]:
    """Stages and fullest moments [frames, 1, 1, 1, 1] of the ranks, once for ranks that hold the same."""
    count = np.array([f.microbatches for f in frames], dtype=np.float64)
    copies = Counter(stage for rank in pattern.in_flight[-1] for stage in rank.stages)
    kinds = [tuple(block.kind for block in stage) for stage in assignment.stages]
    ranks: dict[object, tuple[list[HeldStage], list[Moment]]] = {}
    for early, late in zip(pattern.in_flight[0], pattern.in_flight[-1], strict=True):
        stages = [HeldStage(kinds[stage], copies[stage]) for stage in late.stages]
        pairs = _paired_moments(early, late)
        signature = sorted((tuple(one), tuple(two)) for one, two in pairs)
        key = (tuple((stage.kinds, stage.copies) for stage in stages), tuple(signature))
        if key not in ranks:
            ranks[key] = stages, [_continued(pattern, one, two, count) for one, two in pairs]
    return list(ranks.values())


def _paired_moments(early: RankStages, late: RankStages) -> list[tuple[Moment, Moment]]:
    """Pairs of corresponding moments of a rank in the shorter and the longer sample of a pattern."""
    after = moments_of(late.stages, late.in_flight)
    if len(early.in_flight) != len(late.in_flight):
        return [(moment, moment) for moment in after]
    return list(zip(moments_of(early.stages, early.in_flight), after, strict=True))


def _continued(pattern: Pattern, early: Moment, late: Moment, count: FloatArray) -> Moment:
    """A moment of both samples, extrapolated to each frame's micro-batches [frames, 1, 1, 1, 1]."""
    before, after = dict(early), dict(late)
    return [
        (place, _by_frame(pattern.along(before.get(place, 0.0), after.get(place, 0.0), count)))
        for place in sorted({*before, *after})
    ]
