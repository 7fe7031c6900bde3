"""Bytes per GPU of many plans at once: the formulas of layout.memory over arrays of plans."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from moesim.simulator.layout.activations import activation_bytes, working_bytes
from moesim.simulator.layout.buffers import expert_buffers, pipeline_buffer_bytes
from moesim.simulator.layout.memory import FRAMEWORK_BYTES, local_parameters
from moesim.simulator.layout.stages import Block, StageAssignment
from moesim.simulator.model.block import HEAD, may_route
from moesim.simulator.model.operator import BlockKind
from moesim.simulator.model.precision import BYTES_PER_ELEMENT, Precision
from moesim.simulator.model.recompute import RecomputePolicy
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.model.software import PLAIN, Software
from moesim.simulator.planner.frames import Frame
from moesim.simulator.planner.pattern import Pattern

Array = npt.NDArray[np.float64]

Held = tuple[tuple[BlockKind, int], ...]
"""Blocks by kind, in the order of the kinds' names."""


def held(assignment: StageAssignment, stages: Sequence[int]) -> Held:
    """Blocks of some stages together."""
    return tuple(sorted(Counter(b.kind for stage in stages for b in assignment.stages[stage]).items()))


@dataclass(slots=True)
class MemoryBook:
    """Memory of plans with the axes of a space: precision, recompute policy, communication SMs, ZeRO stage.

    Equal to `layout.memory.memory_by_kind` of every single plan (docs/model.md, eq. M1 to M5); a test
    compares them.
    """

    shape: ModelShape
    sequence: int
    recipes: Sequence[Precision]
    policies: Sequence[RecomputePolicy]
    sms: Sequence[int]
    zero_stages: Sequence[int]
    software: Software = PLAIN
    kernels: str = "deepep-2025-02"
    _activations: dict[object, Array] = field(default_factory=dict)
    _workspace: dict[object, Array] = field(default_factory=dict)
    _parameters: dict[object, tuple[float, float, float]] = field(default_factory=dict)
    _buffers: dict[int, Array] = field(default_factory=dict)

    def total(
        self, frames: Sequence[Frame], pattern: Pattern, assignment: StageAssignment, replicas: int = 0
    ) -> Array:
        """Bytes of the fullest rank [frames, precisions, policies, sms, ZeRO stages] (eq. M5).

        `replicas`: redundant experts of the placement (eq. M6).
        """
        count = np.array([f.microbatches for f in frames], dtype=np.float64)
        kept = {
            kind: self._of_frames(frames, "activations", kind)
            for kind in sorted({b.kind for stage in assignment.stages for b in stage})
        }
        used = {kind: self._of_frames(frames, "workspace", kind) for kind in kept}
        buffers = np.array([self._expert_buffers(f) for f in frames]) if self.shape.moe else None
        once = (count == 1.0) & (pattern.pp == 1)
        most: Array | None = None
        for stages, moments in self._ranks(pattern, assignment, count):
            blocks = held(assignment, stages)
            states, gradients = self._states(frames, pattern, blocks, replicas)
            kinds = [kind for kind, _ in blocks]
            activations = np.zeros((len(frames), len(self.recipes), len(self.policies)))
            for moment in moments:
                one = sum(weight[:, None, None] * kept[kind] for kind, weight in moment.items())
                activations = np.maximum(activations, one)
            workspace = np.max([used[kind] for kind in kinds], axis=0)
            if HEAD in kinds:
                workspace = np.maximum(0.0, workspace - self._of_frames(frames, "freed", HEAD))
            total = states[:, :, None, None, :] + activations[:, :, :, None, None]
            if once.any():  # gradients come while activations go: the larger counts
                less = np.minimum(gradients[:, :, None, None, :], activations[:, :, :, None, None])
                total = total - once[:, None, None, None, None] * less
            total = total + workspace[:, :, None, None, None]
            if buffers is not None and any(map(may_route, kinds)):
                total = total + buffers[:, None, None, :, None]
            most = total if most is None else np.maximum(most, total)
        assert most is not None
        pipeline = [pipeline_buffer_bytes(self.shape, f.plan, self.sequence) for f in frames]
        return np.asarray(most + np.array(pipeline)[:, None, None, None, None] + FRAMEWORK_BYTES.value)

    def _ranks(
        self, pattern: Pattern, assignment: StageAssignment, count: Array
    ) -> list[tuple[tuple[int, ...], list[dict[BlockKind, Array]]]]:
        """Ranks that differ in what they hold: stages, and blocks in flight by kind at every full moment."""
        found: dict[object, tuple[tuple[int, ...], list[dict[BlockKind, Array]]]] = {}
        first, last = pattern.in_flight[0], pattern.in_flight[-1]
        for early, late in zip(first, last, strict=True):
            same = len(early.in_flight) != len(late.in_flight)
            before = late.in_flight if same else early.in_flight
            moments, signature = [], []
            for a, b in zip(before, late.in_flight, strict=True):
                one, two = _in_flight(assignment, a), _in_flight(assignment, b)
                signature.append((tuple(sorted(one.items())), tuple(sorted(two.items()))))
                moments.append(
                    {k: pattern.along(one.get(k, 0), two.get(k, 0), count) for k in sorted({*one, *two})}
                )
            key = (held(assignment, late.stages), tuple(sorted(signature)))
            found.setdefault(key, (late.stages, moments))
        return list(found.values())

    def _of_frames(self, frames: Sequence[Frame], what: str, kind: BlockKind) -> Array:
        return np.array([getattr(self, f"_{what}_of")(f, kind) for f in frames])

    def _activations_of(self, frame: Frame, kind: BlockKind) -> Array:
        plan = frame.plan
        key = (plan.tp, plan.cp, plan.microbatch, kind)
        if key not in self._activations:
            self._activations[key] = np.array(
                [
                    [
                        activation_bytes(self.shape, kind, r, p, plan, self.sequence, self.software)
                        for p in self.policies
                    ]
                    for r in self.recipes
                ]
            )
        return self._activations[key]

    def _workspace_of(self, frame: Frame, kind: BlockKind) -> Array:
        plan = frame.plan
        key = (plan.tp, plan.cp, plan.microbatch, kind)
        if key not in self._workspace:
            self._workspace[key] = np.array(
                [
                    # FP32 tensors of the loss are counted as kept.
                    0.0
                    if kind == HEAD and recipe.loss == "fp32"
                    else working_bytes(self.shape, kind, plan, recipe, self.sequence, self.software)
                    for recipe in self.recipes
                ]
            )
        return self._workspace[key]

    def _freed_of(self, frame: Frame, kind: BlockKind) -> Array:
        """What the head gives back before any layer runs backward, where its loss is in FP32."""
        plan = frame.plan
        key = ("freed", plan.tp, plan.cp, plan.microbatch)
        if key not in self._workspace:
            self._workspace[key] = np.array(
                [
                    activation_bytes(self.shape, kind, recipe, "none", plan, self.sequence, self.software)
                    if recipe.loss == "fp32"
                    else 0.0
                    for recipe in self.recipes
                ]
            )
        return self._workspace[key]

    def _expert_buffers(self, frame: Frame) -> Array:
        ep = frame.plan.ep
        if ep not in self._buffers:
            sizes = [expert_buffers(ep, self.shape.hidden, sms, self.kernels).total_bytes for sms in self.sms]
            self._buffers[ep] = np.array(sizes, dtype=np.float64)
        return self._buffers[ep]

    def _states(
        self, frames: Sequence[Frame], pattern: Pattern, blocks: Held, replicas: int
    ) -> tuple[Array, Array]:
        """(weights, gradients and optimizer; gradients) [frames, precisions, ZeRO stages] (eq. M1)."""
        local = np.array([self._local(f, blocks, replicas) for f in frames])
        experts, other, largest = local[:, 0], local[:, 1], local[:, 2]
        copies = pattern.copies
        shards_expert = np.array([f.layout.expert_dp * copies for f in frames])
        shards_other = np.array([f.layout.dp * f.plan.cp * copies for f in frames])
        whole, cut = experts + other, experts / shards_expert + other / shards_other
        out = np.empty((len(frames), len(self.recipes), len(self.zero_stages)))
        gradients = np.empty(out.shape)
        for r, recipe in enumerate(self.recipes):
            weight, gradient = BYTES_PER_ELEMENT[recipe.parameters], recipe.gradient_bytes
            gathered = min(weight, BYTES_PER_ELEMENT[recipe.parameter_gather])
            master = recipe.master_weights != recipe.parameters
            state = master * BYTES_PER_ELEMENT[recipe.master_weights] + 2 * BYTES_PER_ELEMENT[recipe.moments]
            for z, zero in enumerate(self.zero_stages):
                total = (cut if zero >= 1 else whole) * state
                gradients[:, r, z] = cut * gradient + largest * gradient if zero >= 2 else whole * gradient
                total = total + gradients[:, r, z]
                total = total + (cut * weight + 2 * largest * gathered if zero >= 3 else whole * weight)
                out[:, r, z] = total
        return out, gradients

    def _local(self, frame: Frame, blocks: Held, more: int) -> tuple[float, float, float]:
        """(expert parameters, others, parameters of the largest block) on one GPU."""
        plan = frame.plan
        key = (plan.tp, plan.ep, plan.expert_tp, blocks, more)
        if key not in self._parameters:
            listed = [Block(kind) for kind, count in blocks for _ in range(count)]
            whole = local_parameters(self.shape, frame.layout, listed, more)
            each = [local_parameters(self.shape, frame.layout, [Block(kind)], more) for kind, _ in blocks]
            self._parameters[key] = (whole.experts, whole.other, max(e.experts + e.other for e in each))
        return self._parameters[key]


def _in_flight(assignment: StageAssignment, moment: object) -> dict[BlockKind, float]:
    """Blocks in flight by kind, of micro-batches in flight by stage."""
    total: Counter[BlockKind] = Counter()
    for stage, count in moment.items():  # type: ignore[attr-defined]
        for block in assignment.stages[stage]:
            total[block.kind] += count
    return {kind: float(count) for kind, count in total.items()}
