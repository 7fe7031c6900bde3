"""Timelines to draw: the actions of every pipeline rank, the critical path, and the phases of one action."""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from moesim.hwmodels.arrays import IntArray
from moesim.hwmodels.errors import InputError
from moesim.simulator.engine.program import NS
from moesim.simulator.predict.step_events import (
    EXPOSED,
    HIDDEN,
    Actions,
    Events,
    StepEvents,
    step_events,
    stream_names,
)
from moesim.simulator.predict.trace import FIRST_SEND, SCHEDULE
from moesim.simulator.scenario import Scenario
from moesim.simulator.scenario.inputs import Inputs, inputs_of


class Bar(Struct, frozen=True):
    """A bar on one row of a timeline, in seconds from the start of the step.

    `kind`: a schedule action (F, B, I, W, F&B, F&I), a phase, a part of the step's end, or a cause of the
    critical path. `detail`: its stages and micro-batches. `critical`: whether the critical path goes through
    it.
    """

    row: str
    kind: str
    detail: str
    start_s: float
    end_s: float
    critical: bool = False


class Timeline(Struct, frozen=True):
    """Timeline of the first GPU of every pipeline rank.

    `actions`: schedule actions and the end of the step, with one row a pipeline rank. `zoomed`: the phases of
    one action of `zoomed_rank` on its streams; by default of an overlapped pair from the middle of the step
    if the schedule has pairs, else of the middle action. `communication`: communication inside the zoomed
    action, on the rows "hidden communication" (the compute SMs work meanwhile) and "exposed communication".
    `critical_path`: what the step waits for, from its start to its end without gaps; the row is the pipeline
    rank. It may run through other GPUs of the rank than the first.
    """

    step_s: float
    ranks: int
    actions: tuple[Bar, ...]
    zoomed_rank: int
    zoomed: tuple[Bar, ...]
    communication: tuple[Bar, ...] = ()
    critical_path: tuple[Bar, ...] = ()
    inputs: Inputs | None = None


def timeline(scenario: Scenario, rank: int = 0, action: int | None = None) -> Timeline:
    """Run a step and return its timeline. Raises InputError for an illegal scenario.

    `action`: the action of `rank` to show phase by phase, counted from 0 in the order in which the rank runs
    them; raises InputError where there is none of that number.
    """
    step = step_events(scenario)
    rank = min(max(rank, 0), step.ranks - 1)
    chosen = zoomed_action(step.actions, rank, action)
    events = step.events
    inside = events.where((events.action == chosen) & (events.rank == rank) & (chosen >= 0))
    derived = (inside.stream == HIDDEN) | (inside.stream == EXPOSED)
    phases = ~derived & (inside.stream != SCHEDULE) & (inside.stream < FIRST_SEND)
    path, actions = step.path, step.actions
    columns = (
        path.rank.tolist(),
        path.cause,
        path.action.tolist(),
        path.begin_ns.tolist(),
        path.end_ns.tolist(),
    )
    longest = [
        Bar(
            str(row),
            cause,
            "" if a < 0 else which(actions.kind[a], actions.stages[a], actions.microbatches[a]),
            begin / NS,
            end / NS,
            critical=True,
        )
        for row, cause, a, begin, end in zip(*columns, strict=True)
    ]
    return Timeline(
        step_s=step.end_ns / NS,
        ranks=step.ranks,
        actions=tuple(_bars(step, events.where(events.stream == SCHEDULE), by_rank=True)),
        zoomed_rank=rank,
        zoomed=tuple(_bars(step, inside.where(phases))),
        communication=tuple(_bars(step, inside.where(derived))),
        critical_path=tuple(longest),
        inputs=inputs_of(scenario),
    )


def zoomed_action(actions: Actions, rank: int, number: int | None = None) -> int:
    """The action of a rank to show phase by phase: the given one, by default one from the middle.

    Counted from 0 over all ranks; -1 for a rank that runs nothing. Raises InputError for a number that the
    rank does not have.
    """
    own = np.flatnonzero(actions.rank == rank)
    if number is not None:
        if not 0 <= number < len(own):
            raise InputError(
                f"action {number} of pipeline rank {rank}: the rank runs {len(own)} actions, numbered from 0"
            )
        return int(own[number])
    pairs = [action for action in own.tolist() if actions.kind[action] in ("F&B", "F&I")]
    among: list[int] = pairs or own.tolist()
    return among[len(among) // 2] if among else -1


def which(kind: str, stages: IntArray, microbatches: IntArray) -> str:
    """Stage and micro-batch of an action, such as "F of stage 0, micro-batch 7"; of both sides of a pair."""
    sides = ((part, 0 if part == "F" else 1) for part in kind.split("&"))
    return "; ".join(
        f"{part} of stage {stages[side]}, micro-batch {microbatches[side]}" for part, side in sides
    )


def _bars(step: StepEvents, events: Events, by_rank: bool = False) -> list[Bar]:
    rows = stream_names(events.stream.tolist())
    columns = (events.rank, events.stream, events.name, events.action, events.block, events.begin_ns)
    lists = (column.tolist() for column in (*columns, events.end_ns, events.critical))
    return [
        Bar(
            str(rank) if by_rank else rows[stream],
            events.names[name],
            _detail(step.actions, events.names[name], action, block),
            begin / NS,
            end / NS,
            critical,
        )
        for rank, stream, name, action, block, begin, end, critical in zip(*lists, strict=True)
    ]


def _detail(actions: Actions, name: str, action: int, block: int) -> str:
    """Stage and micro-batch of an action, or stage, block and micro-batch of a phase inside it."""
    if action < 0:
        return name
    stages, microbatches = actions.stages[action], actions.microbatches[action]
    if name == actions.kind[action]:
        return which(name, stages, microbatches)
    side = int(name.rpartition(" ")[2] != "F" and stages[1] >= 0)
    if stages[side] < 0:
        side = 1 - side
    block_text = "" if block < 0 else f"block {block}, "
    return f"stage {stages[side]}, {block_text}micro-batch {microbatches[side]}"
