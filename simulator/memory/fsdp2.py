"""A rank's training steps under FSDP2 through PyTorch's allocator: buffers, events and peaks (eq. M42)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from msgspec import Struct, field

from moesim.simulator.layout.stages import Block, StageAssignment
from moesim.simulator.memory.allocator import AllocatorBytes, Event, peak_bytes
from moesim.simulator.memory.eager_tape import (
    BlockFrame,
    EagerOp,
    Held,
    Saving,
    Tape,
    Tensor,
    eager_block,
    eager_loss,
    run_backward,
    run_forward,
    run_weights,
)
from moesim.simulator.memory.gpu import MemoryInputs
from moesim.simulator.memory.rank_bytes import StateFormats
from moesim.simulator.schedules.action import Action, Schedule, actions_of

# -- fsdp2 units -------------------------------------------------------------------------------------
# Buffers of FSDP2: gathered parameters and reduced gradients, by stream (docs/model.md, eq. M42).

COMPUTE, COPY_IN, REDUCE = 0, 1, 2
"""Streams: operators and unsharded parameters; buffers of all-gathers; reduced gradients."""
NARROW, WIDE = 2, 4
"""Bytes of an element of a gathered parameter and its gradient, and of a stored parameter."""


class Unit(Struct):
    """Parameters that FSDP2 gathers and reduces together."""

    sizes: tuple[float, ...]
    """Elements of each parameter."""
    ranks: int
    reshard: bool
    gathering: Tensor | None = None
    gathered: list[Tensor | None] = field(default_factory=list)
    gradients: list[Tensor | None] = field(default_factory=list)
    """Gradients of the last backward."""
    accumulated: list[Tensor | None] = field(default_factory=list)
    """FP32 gradients of earlier micro-batches."""
    reduced: Tensor | None = None
    open: bool = False

    @property
    def elements(self) -> float:
        """Elements of all parameters."""
        return sum(self.sizes)


# -- fsdp2 step --------------------------------------------------------------------------------------
# Events of PyTorch's allocator in the training steps of a rank under FSDP2 (docs/model.md, eq. M42).
#
# Which buffer lives on which stream, and until when, is read from torch 2.11
# (`distributed/fsdp/_fully_shard`, `distributed/pipelining`).

GEMM_WORKSPACE_BYTES, GEMM_THREADS = 32 << 20, 2
"""Workspace of cuBLAS, which the threads of forward and backward each keep; measured on an H200."""


class EagerStage(Struct, frozen=True):
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


class StepPlan(Struct, frozen=True):
    """How the steps of a rank run."""

    microbatches: int
    pipeline: bool
    """Gradients of all micro-batches are added in FP32 without a reduction, which ends the step."""
    reshard: bool
    """Parameters are freed after each forward, except those of the last module."""
    states: int
    """FP32 tensors of the optimizer for each parameter."""


class _Rank:
    """Runs the steps of one rank on a tape.

    In a pipeline gradients are added in FP32, and reduced at the end of the step.
    """

    def __init__(self, stages: Sequence[EagerStage], plan: StepPlan) -> None:
        self.tape, self.stages, self.plan = Tape(), stages, plan
        self.units: list[list[dict[str, Unit]]] = [
            [self._units_of(stage, n) for n in range(len(stage.blocks))] for stage in stages
        ]
        self.last_gather: Tensor | None = None
        self.reducing: Tensor | None = None
        self.frames: dict[tuple[int, int], list[BlockFrame]] = {}
        self.outputs: dict[tuple[int, int], Tensor | None] = {}
        self.losses: dict[tuple[int, int], Tensor | None] = {}
        self.waiting: dict[tuple[int, int], list[Held]] = {}
        self.received: dict[tuple[int, int], Tensor | None] = {}
        self.received_gradients: dict[tuple[int, int], Tensor | None] = {}

    def _units_of(self, stage: EagerStage, place: int) -> dict[str, Unit]:
        names = dict.fromkeys(op.unit for op in stage.blocks[place])
        last = stage.is_last and place >= len(stage.blocks) - 2  # head and loss
        units = {}
        for name in names:
            sizes = tuple(w / NARROW for op in stage.blocks[place] if op.unit == name for w in op.weights)
            ranks = stage.unit_shards if name else stage.shards
            units[name] = Unit(sizes, ranks, reshard=self.plan.reshard and not last)
        return units

    # -- parameters: gathered, reduced and freed as units -------------------------------------------------

    def all_units(self) -> Iterable[Unit]:
        """All units in the order of the model."""
        return (unit for stage in self.units for block in stage for unit in block.values())

    def store(self, unit: Unit, copies: int) -> None:
        """Allocate `copies` FP32 tensors for the shard of every parameter of a unit, for good."""
        for size in unit.sizes:
            for _ in range(copies):
                self.tape.new(WIDE * size / unit.ranks)

    def gather(self, unit: Unit) -> None:
        """Start the all-gather of a unit; a unit of one rank needs none."""
        if unit.open or unit.gathering is not None or unit.ranks == 1:
            return
        shard = self.tape.new(NARROW * unit.elements / unit.ranks, COPY_IN)
        unit.gathering = self.tape.new(NARROW * unit.elements, COPY_IN)
        self.tape.drop(shard)

    def unshard(self, unit: Unit, forward: bool) -> None:
        """Copy the parameters of a unit out of its all-gather."""
        if unit.open:
            return
        self.gather(unit)
        if forward:
            self.tape.drop(self.last_gather)
            self.last_gather = None
        for size in unit.sizes:
            cast = self.tape.new(NARROW * size) if unit.ranks == 1 else None
            unit.gathered.append(self.tape.new(NARROW * size))
            self.tape.drop(cast)
        if forward:
            self.last_gather = unit.gathering
        else:
            self.tape.drop(unit.gathering)
        unit.gathering, unit.open = None, True

    def reshard(self, unit: Unit) -> None:
        """Free the parameters of a unit."""
        self.tape.drop_all(unit.gathered)
        unit.open = False

    def reduce(self, unit: Unit) -> None:
        """Reduce and scatter the gradients of a unit."""
        self.reshard(unit)
        self.tape.drop(self.reducing)
        self.reducing = self.tape.new(WIDE * unit.elements)
        self.tape.drop_all(unit.gradients)
        self.tape.drop_all(unit.accumulated)
        reduced = self.tape.new(WIDE * unit.elements / unit.ranks, REDUCE)
        if unit.ranks == 1:  # divided out of place and copied, as nothing is reduced
            self.tape.drop(self.tape.new(WIDE * unit.elements, REDUCE))
        if unit.reduced is None:
            unit.reduced = reduced
        else:
            self.tape.drop(reduced)  # added to the gradient of earlier micro-batches

    def after_backward(self, unit: Unit) -> None:
        """Reduce the gradients of a unit, or add them to those of earlier micro-batches in FP32."""
        if not self.plan.pipeline:
            self.reduce(unit)
            return
        if not unit.accumulated:
            for place, size in enumerate(unit.sizes):
                unit.accumulated.append(self.tape.new(WIDE * size))
                self.tape.drop(unit.gradients[place])
            unit.gradients.clear()
        self.tape.drop_all(unit.gradients)

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
            self.unshard(units[""], forward=True)
            y, frame = run_forward(
                self.tape,
                ops,
                x,
                stage.recomputed[place],
                lambda name, _: self.unshard(units[name], forward=True),  # noqa: B023
                lambda name, _: self._after_forward(units[name]),  # noqa: B023
            )
            self._after_forward(units[""])
            is_loss = stage.is_last and place == len(stage.blocks) - 1
            if is_loss and self.plan.pipeline:  # a pipeline's stage holds its output, the logits
                self.outputs[number, microbatch] = self.tape.hold(x)
            self.tape.drop(x)
            frames.append(frame)
            x = y
        self.tape.drop(self.last_gather)
        self.last_gather = None
        self.frames[number, microbatch] = frames
        if stage.is_last:
            self.losses[number, microbatch] = x
        else:
            self.outputs[number, microbatch] = x

    def _after_forward(self, unit: Unit) -> None:
        if unit.reshard:
            self.reshard(unit)

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
            self._enter_backward(number, place, "")
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
        """Copy out a unit, and gather what the forward ended before it: in the block, or the block before."""
        units = self.units[number][place]
        self.unshard(units[name], forward=False)
        inner = [unit for key, unit in units.items() if key]
        if not name and inner:
            self.gather(inner[-1])
        elif place:
            self.gather(self.units[number][place - 1][""])

    def _leave_backward(self, unit: Unit, gradients: list[Tensor | None]) -> None:
        if not gradients and unit.sizes:
            return  # they are computed later
        unit.gradients = list(gradients)
        self.after_backward(unit)

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
            self.tape.drop(unit.reduced)
            unit.reduced = None
        for action in passes:
            self.run(action)
        if self.plan.pipeline:
            for unit in reversed(list(self.all_units())):
                self.reduce(unit)
        self.tape.drop(self.reducing)
        self.reducing = None


def events_of_rank(stages: Sequence[EagerStage], passes: Sequence[Action], plan: StepPlan) -> list[Event]:
    """Events of the first two steps of a rank, after which the allocator takes nothing more.

    The first step runs without optimizer states, which its end allocates. `passes` names stages by their
    position in `stages`.
    """
    rank = _Rank(stages, plan)
    for _ in range(GEMM_THREADS):
        rank.tape.new(GEMM_WORKSPACE_BYTES)
    for unit in rank.all_units():
        rank.store(unit, 1)
    if plan.pipeline:  # into which a pipeline receives inputs and gradients of every micro-batch
        for number, stage in enumerate(stages):
            for place in ((number, microbatch) for microbatch in range(plan.microbatches)):
                if not stage.is_first:
                    rank.received[place] = rank.tape.new(stage.hidden_bytes)
                if not stage.is_last:
                    rank.received_gradients[place] = rank.tape.new(stage.hidden_bytes)
    rank.step(passes)
    for unit in rank.all_units():
        rank.store(unit, plan.states)
    rank.step(passes)
    return rank.tape.events


# -- step replay -------------------------------------------------------------------------------------
# Replays a rank's training steps through PyTorch's allocator: its peaks of active and reserved bytes.

MOST_OPERATORS = 400_000
"""Operators of two steps that are replayed at most: about two seconds."""
LEFT_BY_FORWARD: dict[str, Saving] = {"none": "all", "op": "some", "full": "none"}
"""What the forward of a layer leaves, by recompute policy."""
FSDP2_PRECISION = {
    "linear": "bf16",
    "head": "bf16",
    "loss": "fp32",
    "parameters": "fp32",
    "parameter_gather": "bf16",
    "gradient_reduce": "fp32",
    "activation_cache": "bf16",
}
"""FSDP2's mixed precision that is described: FP32 parameters and reductions, BF16 compute and gathers."""


def replayed_peaks(
    inputs: MemoryInputs, assignment: StageAssignment, schedule: Schedule, rank: int
) -> AllocatorBytes | str:
    """Peaks of the bytes active and reserved on a GPU of a pipeline rank (docs/model.md, eqs. M40 to M43).

    A plan that the replay does not describe gives the reason instead.
    """
    plan, precision = inputs.layout.plan, inputs.precision
    if plan.tp > 1 or plan.cp > 1 or plan.expert_tp > 1:
        return "tensor and context parallelism are not described"
    if plan.zero_stage < 2 or plan.shard_group is not None:
        return "FSDP2 is described for zero_stage 2 and 3 without groups of shards"
    if any(getattr(precision, key) != value for key, value in FSDP2_PRECISION.items()):
        return "only FSDP2's mixed precision of FP32 parameters and BF16 compute is described"
    if not isinstance(inputs.recompute, str) or inputs.recompute not in LEFT_BY_FORWARD:
        return "the recompute policies none, op and full are described"
    if inputs.shape.tied_embeddings or inputs.redundant_experts or len(schedule.routes) > 1:
        return "tied tables, replicas of experts and bidirectional pipelines are not described"
    numbers = schedule.stages_on_rank(rank)
    stages = []
    for number in numbers:
        stage = _eager_stage(inputs, assignment.stages[number])
        if stage is None:
            return "its blocks have operators that the replay does not describe"
        stages.append(stage)
    actions = [action for step in schedule.ranks[rank] for action in actions_of(step)]
    places = {number: place for place, number in enumerate(numbers)}
    # After as many micro-batches as are in flight at most, and two more, the bytes in flight repeat.
    in_flight: Counter[int] = Counter()
    most, ends = 0, "W" if any(action.kind == "W" for action in actions) else "B"
    for action in actions:
        in_flight[action.stage] += (action.kind == "F") - (action.kind == ends)
        most = max(most, in_flight[action.stage])
    passes = [Action(places[a.stage], a.kind, a.microbatch) for a in actions if a.microbatch < most + 2]
    if 2 * sum(len(ops) for a in passes for ops in stages[a.stage].blocks) > MOST_OPERATORS:
        return f"its steps have more than {MOST_OPERATORS} operators on a rank"
    events = events_of_rank(
        stages,
        passes,
        StepPlan(
            microbatches=schedule.microbatches,
            pipeline=plan.pp > 1,
            reshard=plan.zero_stage == 3,
            states=round(float(StateFormats.of(precision).optimizer) / WIDE),
        ),
    )
    return peak_bytes(events, expandable=inputs.software.allocator == "expandable")


def _eager_stage(inputs: MemoryInputs, blocks: tuple[Block, ...]) -> EagerStage | None:
    """Operators of a stage's blocks; None where one is not described."""
    plan, shape = inputs.layout.plan, inputs.shape
    tokens = float(plan.microbatch * inputs.sequence)
    described: dict[str, tuple[EagerOp, ...] | None] = {}
    lists: list[tuple[EagerOp, ...]] = []
    left: list[Saving] = []
    for block in blocks:
        if block.kind not in described:
            described[block.kind] = eager_block(
                shape, shape.block(block.kind), tokens, plan.ep, inputs.software.op_keeps_transfers
            )
        ops = described[block.kind]
        if ops is None:
            return None
        lists.append(ops)
        left.append(LEFT_BY_FORWARD[str(inputs.recompute)] if block.is_layer else "all")
        if block.is_head:
            lists.append(eager_loss(shape.vocab, tokens, compiled=inputs.software.loss == "compiled"))
            left.append("all")
    of_experts, of_others = inputs.layout.shards
    return EagerStage(
        tuple(lists),
        tuple(left),
        of_others,
        of_experts,
        NARROW * tokens * shape.hidden,
        is_first=any(block.is_embedding for block in blocks),
        is_last=any(block.is_head for block in blocks),
    )
