"""Helpers of the schedule builders, which number micro-batches and merge forwards with backwards."""

from __future__ import annotations

from collections.abc import Sequence

from moesim.simulator.schedules.action import Action, Kind, Overlap, Step

Chunk = tuple[int, int]
"""(stage, micro-batch)."""


class RankWriter:
    """Writes the steps of one rank; every (chunk, kind) takes its micro-batches in ascending order.

    A chunk is given as (stage, first micro-batch), so that one writer can serve both directions of a
    bidirectional pipeline. Micro-batches from number `limit` on are dropped.
    """

    def __init__(self, limit: int | None = None) -> None:
        """Start with an empty rank."""
        self.steps: list[Step] = []
        self._limit = limit
        self._next: dict[tuple[Chunk, Kind], int] = {}
        self._deferred: list[Chunk] = []

    def _take(self, chunk: Chunk, kind: Kind) -> Action:
        # B and I share a counter because a micro-batch has either one B or one I.
        key = (chunk, "I" if kind == "B" else kind)
        microbatch = self._next.get(key, chunk[1])
        self._next[key] = microbatch + 1
        return Action(chunk[0], kind, microbatch)

    def count(self, chunk: Chunk, kind: Kind) -> int:
        """Micro-batches that `kind` of `chunk` has taken so far, dropped ones included."""
        return self._next.get((chunk, "I" if kind == "B" else kind), chunk[1]) - chunk[1]

    def put(self, chunk: Chunk, *kinds: Kind) -> None:
        """Append the next micro-batch of each kind in turn."""
        for kind in kinds:
            action = self._take(chunk, kind)
            if self._limit is None or action.microbatch < self._limit:
                self.steps.append(action)

    def put_overlap(self, forward: Chunk, backward: Chunk) -> None:
        """Append the next forward of one chunk, overlapped with the next full backward of another."""
        self.steps.append(Overlap(self._take(forward, "F"), self._take(backward, "B")))

    def put_input_gradient(self, chunk: Chunk) -> None:
        """Append the next input gradient and queue its weight gradient."""
        action = self._take(chunk, "I")
        self.steps.append(action)
        self._deferred.append((action.stage, action.microbatch))

    def put_deferred_weight(self) -> None:
        """Append the oldest queued weight gradient."""
        stage, microbatch = self._deferred.pop(0)
        self.steps.append(Action(stage, "W", microbatch))


def one_forward_one_backward(
    forwards: Sequence[Chunk], backwards: Sequence[Chunk], warmup: int
) -> tuple[Step, ...]:
    """`warmup` forwards, then forward and backward in turn, then the backwards that are left."""
    steps: list[Step] = [Action(s, "F", m) for s, m in forwards[:warmup]]
    for index, (stage, microbatch) in enumerate(backwards):
        if warmup + index < len(forwards):
            steps.append(Action(forwards[warmup + index][0], "F", forwards[warmup + index][1]))
        steps.append(Action(stage, "B", microbatch))
    return tuple(steps)


def split_backwards(steps: Sequence[Step], delay: int) -> tuple[Step, ...]:
    """Split each full backward into its input gradient and a weight gradient `delay` backwards later.

    Weight gradients that are left over run at the end.
    """
    split: list[Step] = []
    pending: list[Action] = []
    for step in steps:
        if not isinstance(step, Action) or step.kind != "B":
            split.append(step)
            continue
        split.append(Action(step.stage, "I", step.microbatch))
        pending.append(Action(step.stage, "W", step.microbatch))
        if len(pending) > delay:
            split.append(pending.pop(0))
    return (*split, *pending)
