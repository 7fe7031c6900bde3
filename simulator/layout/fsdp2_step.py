"""Events of PyTorch's allocator in the training steps of a rank under FSDP2 (docs/model.md, eq. M42).

Which buffer lives on which stream, and until when, is read from torch 2.11
(`distributed/fsdp/_fully_shard`, `distributed/pipelining`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from moesim.simulator.layout.allocator import Event
from moesim.simulator.layout.eager_tape import (
    BlockFrame,
    EagerOp,
    Held,
    Saving,
    Tape,
    Tensor,
    run_backward,
    run_forward,
    run_weights,
)
from moesim.simulator.layout.fsdp2_units import NARROW, ShardBuffers, Unit
from moesim.simulator.schedules.action import Action

GEMM_WORKSPACE_BYTES, GEMM_THREADS = 32 << 20, 2
"""Workspace of cuBLAS, which the threads of forward and backward each keep; measured on an H200."""


@dataclass(frozen=True, slots=True)
class EagerStage:
    """Blocks of a stage, as their operators and the number of ranks over which each is sharded.

    `unit_shards` is that of routed experts. `is_first` and `is_last` say whether the stage has the embedding
    and the head.
    """

    blocks: tuple[tuple[EagerOp, ...], ...]
    recomputed: tuple[Saving, ...]
    """What the forward of each block leaves."""
    shards: int
    unit_shards: int
    hidden_bytes: float
    """Hidden states of a micro-batch."""
    is_first: bool
    is_last: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """How the steps of a rank run."""

    microbatches: int
    pipeline: bool
    """Gradients of all micro-batches are added in FP32 without a reduction, which ends the step."""
    reshard: bool
    """Parameters are freed after each forward, except those of the last module."""
    states: int
    """FP32 tensors of the optimizer for each parameter."""


class _Rank:
    """Runs the steps of one rank on a tape."""

    def __init__(self, stages: Sequence[EagerStage], plan: StepPlan) -> None:
        self.tape, self.stages, self.plan = Tape(), stages, plan
        self.units: list[list[dict[str, Unit]]] = [
            [self._units_of(stage, n) for n in range(len(stage.blocks))] for stage in stages
        ]
        self.shards = ShardBuffers(self.tape, plan.pipeline)
        self.frames: dict[tuple[int, int], list[BlockFrame]] = {}
        self.outputs: dict[tuple[int, int], Tensor | None] = {}
        self.losses: dict[tuple[int, int], Tensor | None] = {}
        self.waiting: dict[tuple[int, int], list[Held]] = {}
        self.received: dict[tuple[int, int], Tensor | None] = {}
        self.received_gradients: dict[tuple[int, int], Tensor | None] = {}

    def receive_into(self) -> None:
        """Allocate the buffers into which a pipeline receives: inputs and gradients of every micro-batch."""
        for number, stage in enumerate(self.stages):
            for microbatch in range(self.plan.microbatches):
                if not stage.is_first:
                    self.received[number, microbatch] = self.tape.new(stage.hidden_bytes)
                if not stage.is_last:
                    self.received_gradients[number, microbatch] = self.tape.new(stage.hidden_bytes)

    def _units_of(self, stage: EagerStage, place: int) -> dict[str, Unit]:
        names = dict.fromkeys(op.unit for op in stage.blocks[place])
        last = stage.is_last and place >= len(stage.blocks) - 2  # head and loss
        units = {}
        for name in names:
            sizes = tuple(w / NARROW for op in stage.blocks[place] if op.unit == name for w in op.weights)
            ranks = stage.unit_shards if name else stage.shards
            units[name] = Unit(sizes, ranks, reshard=self.plan.reshard and not last)
        return units

    # -- parameters --------------------------------------------------------------------------------------

    def all_units(self) -> Iterable[Unit]:
        """All units in the order of the model."""
        return (unit for stage in self.units for block in stage for unit in block.values())

    # -- passes ------------------------------------------------------------------------------------------

    def run(self, action: Action) -> None:
        """Run one action; the first stage, whose input has no gradient, leaves all of its backward to W."""
        number, microbatch = action.stage, action.microbatch
        deferred = self.stages[number].is_first
        if action.kind == "F":
            self.forward(number, microbatch)
        elif action.kind == "B" or (action.kind == "W" and deferred):
            self.backward(number, microbatch, weights_later=False)
        elif action.kind == "W":
            self.weights(number, microbatch)
        elif not deferred:
            self.backward(number, microbatch, weights_later=True)

    def forward(self, number: int, microbatch: int) -> None:
        """Run the forward of a micro-batch through the blocks of a stage."""
        stage = self.stages[number]
        x = self.tape.hold(self.received.get((number, microbatch)))
        frames = []
        for place, ops in enumerate(stage.blocks):
            units = self.units[number][place]
            self.shards.unshard(units[""], forward=True)
            y, frame = run_forward(
                self.tape,
                ops,
                x,
                stage.recomputed[place],
                lambda name, _: self.shards.unshard(units[name], forward=True),  # noqa: B023
                lambda name, _: self._after_forward(units[name]),  # noqa: B023
            )
            self._after_forward(units[""])
            is_loss = stage.is_last and place == len(stage.blocks) - 1
            if is_loss and self.plan.pipeline:  # a pipeline's stage holds its output, the logits
                self.outputs[number, microbatch] = self.tape.hold(x)
            self.tape.drop(x)
            frames.append(frame)
            x = y
        self.shards.end_forward()
        self.frames[number, microbatch] = frames
        if stage.is_last:
            self.losses[number, microbatch] = x
        else:
            self.outputs[number, microbatch] = x

    def _after_forward(self, unit: Unit) -> None:
        if unit.reshard:
            self.shards.reshard(unit)

    def backward(self, number: int, microbatch: int, weights_later: bool) -> None:
        """Run the backward of a micro-batch, or only its input gradients."""
        stage, tape = self.stages[number], self.tape
        frames = self.frames.pop((number, microbatch))
        output = self.outputs.pop((number, microbatch), None)
        loss = self.losses.pop((number, microbatch), None)
        gradient = tape.hold(self.received_gradients.get((number, microbatch))) or tape.new(512)
        waiting: list[Held] = []
        for place in range(len(stage.blocks) - 1, -1, -1):
            units = self.units[number][place]
            self.shards.unshard(units[""], forward=False)
            self._prefetch(number, place, "")
            gradient, weights, later = run_backward(
                tape,
                stage.blocks[place],
                frames[place],
                gradient,
                lambda name, _: self._enter_backward(number, place, name),  # noqa: B023
                lambda name, of_unit: self._leave_backward(units[name], of_unit),  # noqa: B023
                weights_later,
            )
            waiting.append(later)
            if not weights_later:
                self._leave_backward(units[""], weights)
        tape.drop(gradient)
        tape.drop(output)
        tape.drop(loss)
        if weights_later:
            self.waiting[number, microbatch] = waiting

    def _enter_backward(self, number: int, place: int, name: str) -> None:
        self.shards.unshard(self.units[number][place][name], forward=False)
        self._prefetch(number, place, name)

    def _prefetch(self, number: int, place: int, name: str) -> None:
        """Gather what the forward ended before this unit: a unit in the block, or the block before."""
        units = self.units[number][place]
        inner = [unit for key, unit in units.items() if key]
        if not name and inner:
            self.shards.gather(inner[-1])
        elif place:
            self.shards.gather(self.units[number][place - 1][""])

    def _leave_backward(self, unit: Unit, gradients: list[Tensor | None]) -> None:
        if not gradients and unit.sizes:
            return  # they are computed later
        unit.gradients = list(gradients)
        self.shards.after_backward(unit)

    def weights(self, number: int, microbatch: int) -> None:
        """Compute the weight gradients that were left for later."""
        blocks = self.stages[number].blocks
        for place, held in zip(
            range(len(blocks) - 1, -1, -1), self.waiting.pop((number, microbatch)), strict=True
        ):
            own, of_units = run_weights(self.tape, blocks[place], held)
            for name, unit in self.units[number][place].items():
                self._leave_backward(unit, of_units.get(name, []) if name else own)

    # -- steps -------------------------------------------------------------------------------------------

    def step(self, passes: Iterable[Action]) -> None:
        """Run all passes and the reductions that were left for the end of the step."""
        for unit in self.all_units():
            self.shards.drop_gradient(unit)
        for action in passes:
            self.run(action)
        if self.plan.pipeline:
            for unit in reversed(list(self.all_units())):
                self.shards.reduce(unit)
        self.shards.end_step()


def events_of_rank(stages: Sequence[EagerStage], passes: Sequence[Action], plan: StepPlan) -> list[Event]:
    """Events of the first two steps of a rank, after which the allocator takes nothing more.

    The first step runs without optimizer states, which its end allocates. `passes` names stages by their
    position in `stages`.
    """
    rank = _Rank(stages, plan)
    for _ in range(GEMM_THREADS):
        rank.tape.new(GEMM_WORKSPACE_BYTES)
    for unit in rank.all_units():
        rank.shards.store(unit, 1)
    if plan.pipeline:
        rank.receive_into()
    rank.step(passes)
    for unit in rank.all_units():
        rank.shards.store(unit, plan.states)
    rank.step(passes)
    return rank.tape.events
