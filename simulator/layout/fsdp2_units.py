"""Buffers of FSDP2: gathered parameters and reduced gradients, by stream (docs/model.md, eq. M42)."""

from __future__ import annotations

from dataclasses import dataclass, field

from moesim.simulator.layout.eager_tape import Tape, Tensor

COMPUTE, COPY_IN, REDUCE = 0, 1, 2
"""Streams: operators and unsharded parameters; buffers of all-gathers; reduced gradients."""
NARROW, WIDE = 2, 4
"""Bytes of an element of a gathered parameter and its gradient, and of a stored parameter."""


@dataclass(slots=True)
class Unit:
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


class ShardBuffers:
    """Gathers and reduces units of parameters on a tape.

    With `whole_gradients` gradients are added in FP32 and reduced by the caller, at the end of a step.
    """

    def __init__(self, tape: Tape, whole_gradients: bool) -> None:
        """Start without buffers."""
        self.tape, self.whole_gradients = tape, whole_gradients
        self.last_gather: Tensor | None = None
        self.reducing: Tensor | None = None

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
        if not self.whole_gradients:
            self.reduce(unit)
            return
        if not unit.accumulated:
            for place, size in enumerate(unit.sizes):
                unit.accumulated.append(self.tape.new(WIDE * size))
                self.tape.drop(unit.gradients[place])
            unit.gradients.clear()
        self.tape.drop_all(unit.gradients)

    def end_forward(self) -> None:
        """Free the last all-gather of a forward."""
        self.tape.drop(self.last_gather)
        self.last_gather = None

    def end_step(self) -> None:
        """Free the last input of a reduction."""
        self.tape.drop(self.reducing)
        self.reducing = None

    def drop_gradient(self, unit: Unit) -> None:
        """Free the reduced gradients of a unit."""
        self.tape.drop(unit.reduced)
        unit.reduced = None
