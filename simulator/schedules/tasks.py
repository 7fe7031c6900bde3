"""Tasks of one schedule action, and the template that lists them: plain data without times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from moesim.simulator.model.operator import Phase
from moesim.simulator.schedules.overlap_order import EP_PHASES, SHARDING_PHASES

Stream = Literal["compute", "communication", "sharding"]
ActionKind = Literal["F", "B", "I", "W", "F&B", "F&I"]

BlockPhases = Sequence[frozenset[Phase]]
"""Phases of every block of a stage, in forward order."""


@dataclass(frozen=True, slots=True)
class Task:
    """One phase of one block. `deps` are positions of earlier tasks in the same template."""

    phase: Phase
    stream: Stream
    side: int
    """0: the forward micro-batch of the action, 1: the backward one."""
    block: int
    """Position of the block in its stage."""
    deps: tuple[int, ...]
    overlapped_share: float | None = None
    """In an action on two streams, the share of the four expert-parallel transfers of a MoE layer pair that
    this layer pair has; this share of its compute runs while communication kernels occupy their SMs (eq. E6).
    None where the action runs as one chain."""
    layer_pair: int = 0
    """Number of the layer pair of the task, in the order in which they run."""


@dataclass(frozen=True, slots=True)
class Template:
    """Tasks in an order that respects every stream and every dependency.

    `forward_out` is the position of the task after which the activation leaves for the next stage, and
    `backward_out` that of the task after which the input gradient leaves; None where the action produces
    none, it leaves at the end of the action, or the stage has no such phase.
    """

    kind: ActionKind
    tasks: tuple[Task, ...]
    forward_out: int | None
    backward_out: int | None
    by_duration: bool = False
    """Whether the share of compute beside busy communication SMs follows from durations (eq. E20)."""

    @property
    def on_two_streams(self) -> bool:
        """Whether compute and expert-parallel transfers run side by side."""
        return any(task.overlapped_share is not None for task in self.tasks)


def stream_of(phase: Phase) -> Stream:
    """The in-order stream that a phase runs on."""
    if phase in SHARDING_PHASES:
        return "sharding"
    return "communication" if phase in EP_PHASES else "compute"
