"""Allocations of PyTorch's eager operators and of its autograd, as events of the allocator (eq. M41).

A block is a list of `EagerOp` in the order of its forward. The backward runs the same list from its end,
as autograd does: an operator allocates the gradients of its inputs, then its saved tensors and the gradient
of its output are freed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from moesim.simulator.layout.allocator import Event

INPUT = "x"
"""Name of a block's input."""
Saving = Literal["none", "all", "some"]
"""What a forward leaves: nothing but the block's input, all that the backward needs, or the outputs of the
operators that a selective policy keeps."""


@dataclass(frozen=True, slots=True)
class EagerOp:
    """One operator: it reads `inputs` and writes `output`; both are names of tensors of its block."""

    output: str
    inputs: tuple[str, ...]
    size_bytes: float
    """Bytes of the output; 0 for a view of the first input."""
    saves: tuple[str, ...] = ()
    """Tensors that the backward needs: inputs or the output."""
    gradients: tuple[tuple[str, float], ...] = ()
    """Inputs that get a gradient, with its bytes; 0 where the gradient of the output is passed on."""
    weights: tuple[float, ...] = ()
    """Bytes of the gradients of its weights."""
    kept: bool = False
    """Whether a policy that keeps outputs of single operators keeps this one."""
    extra_bytes: float = 0.0
    """A second output that only the backward needs, such as a log-sum-exp."""
    until: str = ""
    """Operator, named by its output, up to which a variable in Python holds this output; none: its last
    use."""
    unit: str = ""
    """Part of the block whose parameters are sharded on their own; none: those of the block."""


@dataclass(slots=True)
class Tensor:
    """A tensor in memory and the number of its holders."""

    number: int
    holders: int = 1


@dataclass(slots=True)
class Tape:
    """Collects the events of a process."""

    events: list[Event] = field(default_factory=list)
    count: int = 0

    def new(self, size_bytes: float, stream: int = 0) -> Tensor | None:
        """Allocate a tensor; None for no bytes."""
        if size_bytes <= 0:
            return None
        self.count += 1
        self.events.append(Event("allocate", self.count, int(size_bytes), stream))
        return Tensor(self.count)

    def hold(self, tensor: Tensor | None) -> Tensor | None:
        """Add a holder."""
        if tensor is not None:
            tensor.holders += 1
        return tensor

    def drop(self, tensor: Tensor | None) -> None:
        """Remove a holder, and the tensor with its last one."""
        if tensor is not None:
            tensor.holders -= 1
            if not tensor.holders:
                self.events.append(Event("free", tensor.number))

    def drop_all(self, tensors: list[Tensor | None]) -> None:
        """Remove one holder of each, and empty the list."""
        for tensor in tensors:
            self.drop(tensor)
        tensors.clear()


Held: TypeAlias = dict[int, list[Tensor | None]]
"""Tensors that the operators of a block hold, by the place of the operator."""
UnitHook: TypeAlias = Callable[[str, list[Tensor | None]], None]
"""Called with the name of a unit inside a block, such as its experts, where it begins or ends; at the end of
its backward with the gradients of its weights."""


@dataclass(slots=True)
class BlockFrame:
    """What one micro-batch of a block holds between its forward and its backward."""

    block_input: Tensor | None
    saved: Held
    kept: Held
    """Outputs that a selective policy keeps, each with a second output."""
    complete: bool


def run_forward(
    tape: Tape,
    ops: Sequence[EagerOp],
    x: Tensor | None,
    saving: Saving,
    enter: UnitHook,
    leave: UnitHook,
) -> tuple[Tensor | None, BlockFrame]:
    """Run a block forward: its output, held once, and its frame; the caller keeps its hold of `x`."""
    frame = BlockFrame(None if saving == "all" else tape.hold(x), {}, {}, saving == "all")
    output = _forward(tape, ops, x, saving, frame, (enter, leave))
    return output, frame


def _forward(
    tape: Tape,
    ops: Sequence[EagerOp],
    x: Tensor | None,
    saving: Saving,
    frame: BlockFrame,
    hooks: tuple[UnitHook, UnitHook],
    again: bool = False,
) -> Tensor | None:
    """Allocate and free what the operators do; `again` stops where the backward has all that it needs."""
    values: dict[str, Tensor | None] = {INPUT: tape.hold(x)}
    ends = _ends_of_variables(ops)
    stop = _last_saving(ops) if again else len(ops)
    unit = ""
    for place, op in enumerate(ops):
        if op.unit != unit:
            hooks[bool(unit)](unit or op.unit, [])
            unit = op.unit
        if place == stop and not op.extra_bytes and op.output not in op.saves:
            frame.saved[place] = [tape.hold(values[name]) for name in op.saves]
            break
        out, extra = _run(tape, op, values, frame.kept.pop(place, None) if again else None)
        values[op.output] = out
        if saving == "all":
            frame.saved[place] = [*(tape.hold(values[name]) for name in op.saves), tape.hold(extra)]
        elif saving == "some" and op.kept:
            frame.kept[place] = [tape.hold(out), tape.hold(extra)]
        tape.drop(extra)
        for name in ends.get(place, ()):
            tape.drop(values.pop(name))
        if place == stop:
            break
    if unit:
        hooks[1](unit, [])
    output = None if again else values.pop(ops[-1].output)
    tape.drop_all(list(values.values()))
    return output


def _run(
    tape: Tape, op: EagerOp, values: dict[str, Tensor | None], kept: list[Tensor | None] | None
) -> tuple[Tensor | None, Tensor | None]:
    """Return the output of an operator and its second output, allocated unless they were kept."""
    if kept is not None:
        return kept[0], kept[1]
    if op.size_bytes <= 0:
        return tape.hold(values[op.inputs[0]]), None
    return tape.new(op.size_bytes), tape.new(op.extra_bytes)


def run_backward(
    tape: Tape,
    ops: Sequence[EagerOp],
    frame: BlockFrame,
    gradient: Tensor | None,
    enter: UnitHook,
    leave: UnitHook,
    weights_later: bool = False,
) -> tuple[Tensor | None, list[Tensor | None], Held]:
    """Run a block backward: the gradient of its input, those of its own weights, and what waits for W.

    `gradient` is taken over. A frame that is not complete runs its forward again first. With `weights_later`
    all that was saved stays, with the gradients of the outputs of operators that have weights.
    """
    again = None if frame.complete else frame.block_input
    if not frame.complete:
        _forward(tape, ops, again, "all", frame, (enter, _nothing), again=True)
        if not weights_later:
            tape.drop(again)
    gradients: dict[str, Tensor | None] = {ops[-1].output: gradient}
    weights: list[Tensor | None] = []
    of_unit: list[Tensor | None] = []
    waiting: Held = {}
    unit = ""
    for place in range(len(ops) - 1, -1, -1):
        op = ops[place]
        if op.unit != unit:
            (leave if unit else enter)(unit or op.unit, of_unit)
            of_unit, unit = [], op.unit
        incoming = gradients.pop(op.output, None)
        saved = frame.saved.pop(place, [])
        if incoming is not None:
            for name, size in op.gradients:
                part = tape.new(size) if size else tape.hold(incoming)
                gradients[name] = _added(tape, gradients.get(name), part)
            if not weights_later:
                (of_unit if unit else weights).extend(tape.new(size) for size in op.weights)
        if weights_later:
            waiting[place] = [*(saved if again is None else ()), tape.hold(incoming) if op.weights else None]
        if not weights_later or again is not None:
            tape.drop_all(saved)
        tape.drop(incoming)
    for leftover in frame.kept.values():
        tape.drop_all(leftover)
    if weights_later and not frame.complete:
        waiting[-1] = [again]
    return gradients.pop(INPUT, None), weights, waiting


def run_weights(
    tape: Tape, ops: Sequence[EagerOp], waiting: Held
) -> tuple[list[Tensor | None], dict[str, list[Tensor | None]]]:
    """Compute the weight gradients that `run_backward` left for later: the block's own, and by unit.

    A block that is recomputed runs its forward once more, because W is another pass of autograd.
    """
    frame = BlockFrame(None, {}, {}, complete=True)
    for again in waiting.pop(-1, ()):
        _forward(tape, ops, again, "all", frame, (_nothing, _nothing), again=True)
        tape.drop(again)
    weights: list[Tensor | None] = []
    of_units: dict[str, list[Tensor | None]] = {}
    for place, tensors in waiting.items():
        unit = ops[place].unit
        target = of_units.setdefault(unit, []) if unit else weights
        target.extend(tape.new(size) for size in ops[place].weights)
        tape.drop_all(tensors)
        tape.drop_all(frame.saved.pop(place, []))
    return weights, of_units


def _added(tape: Tape, gradient: Tensor | None, part: Tensor | None) -> Tensor | None:
    """Add a gradient to another as autograd does: into the one that nobody else holds."""
    if gradient is None or part is None:
        return part if gradient is None else gradient
    if gradient.holders > 1:
        gradient, part = part, gradient
    tape.drop(part)
    return gradient


def _nothing(unit: str, gradients: list[Tensor | None]) -> None:
    """Do nothing: a unit that runs again stays as it is."""


def _last_saving(ops: Sequence[EagerOp]) -> int:
    """Place of the last operator that saves anything."""
    return max(place for place, op in enumerate(ops) if op.saves or op.extra_bytes)


def _ends_of_variables(ops: Sequence[EagerOp]) -> dict[int, list[str]]:
    """Names of the tensors that no variable holds after an operator, by its place."""
    place_of = {op.output: place for place, op in enumerate(ops)}
    ends: dict[str, int] = {INPUT: 0}
    for place, op in enumerate(ops):
        ends[op.output] = max(place, place_of.get(op.until, place))
        for name in op.inputs:
            ends[name] = max(ends[name], place)
    del ends[ops[-1].output]
    names: dict[int, list[str]] = {}
    for name, place in ends.items():
        names.setdefault(place, []).append(name)
    return names
