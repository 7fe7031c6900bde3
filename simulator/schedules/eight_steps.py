"""The eight steps that DualPipe and DualPipeV share (deepseek-ai/DualPipe at 3da1bbea5360)."""

from __future__ import annotations

from moesim.simulator.schedules.action import Step
from moesim.simulator.schedules.spec import Chunk, RankWriter


def eight_steps(own: Chunk, other: Chunk, position: int, depth: int, chunks: int) -> tuple[Step, ...]:
    """Build the steps of one rank.

    `own` is (stage, first micro-batch) of the direction that enters nearer to this rank, `other` that of the
    opposite direction. `position` counts ranks from the nearer entry, `depth` is the number of positions up
    to the turning point, and `chunks` is the number of micro-batches of one direction, at least 2 * depth.
    """
    writer = RankWriter()
    before_turn = depth - 1 - position
    for _ in range(2 * before_turn):  # 1: fill
        writer.put(own, "F")
    for _ in range(position + 1):  # 2: both directions meet
        writer.put(own, "F")
        writer.put(other, "F")
    for _ in range(before_turn):  # 3: first backwards, weight gradients fill the gaps
        writer.put_input_gradient(other)
        writer.put_deferred_weight()
        writer.put(other, "F")
    for index in range(chunks - 2 * depth + position + 1):  # 4: overlapped pairs
        if index == 0 and before_turn == 0:
            # At the turning point the first pair is not overlapped: its forward need not wait for the
            # backward's input, which arrives later, and the bubble becomes smaller.
            writer.put(own, "F")
            writer.put(other, "B")
        else:
            writer.put_overlap(own, other)
        writer.put_overlap(other, own)
    for _ in range(before_turn):  # 5: the own direction has no forwards left
        writer.put(other, "B")
        writer.put_overlap(other, own)
    for index in range(2 * (position + 1)):  # 6: backwards only, the second half of them split
        chunk = own if index % 2 else other
        if index <= position:
            writer.put(chunk, "B")
        else:
            writer.put_input_gradient(chunk)
    for _ in range(before_turn):  # 7: weight gradients while waiting for the last backwards
        writer.put_deferred_weight()
        writer.put_input_gradient(own)
    for _ in range(position + 1):  # 8: the weight gradients left over
        writer.put_deferred_weight()
    return tuple(writer.steps)
