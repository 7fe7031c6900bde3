"""Validates schedules: every action occurs once, on the right rank, with all dependencies met."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from moesim.hwmodels.errors import InputError
from moesim.simulator.schedules.action import KINDS, Action, Step, actions_of
from moesim.simulator.schedules.schedule import Schedule
from moesim.simulator.schedules.timeline import longest_path


@dataclass(frozen=True, slots=True)
class RankReport:
    """Peak of chunks in flight and counts of actions on one rank.

    `peak_in_flight` counts (stage, micro-batch) chunks from the start of their forward to the end of
    their last backward part (B or W); `peak_stages` lists that peak (the first of several equal ones) as
    (stage, count) pairs. `peak_until_input_gradient` counts chunks only to the end of B or I. `counts` holds
    the actions outside of pairs by kind (F, I, W, B), and the pairs as `overlap`.
    """

    peak_in_flight: int
    peak_stages: tuple[tuple[int, int], ...]
    peak_until_input_gradient: int
    counts: dict[str, int]


@dataclass(frozen=True, slots=True)
class ScheduleReport:
    """Result of a successful validation, with a report for every rank in rank order."""

    ranks: tuple[RankReport, ...]

    @property
    def peak_in_flight(self) -> tuple[int, ...]:
        """Peak of chunks in flight on every rank."""
        return tuple(rank.peak_in_flight for rank in self.ranks)


def validate(schedule: Schedule) -> ScheduleReport:
    """Check a schedule by counting its actions and by a dry run across the ranks.

    Raises InputError, naming rank, position and action, for an action that is on the wrong rank, out of
    range, repeated or missing, or that waits for a result that never comes.
    """
    _check_actions(schedule)
    longest_path(schedule, lambda rank, step: 0.0)
    return ScheduleReport(tuple(_rank_report(steps) for steps in schedule.ranks))


def _positions(schedule: Schedule) -> Iterator[tuple[int, int, Action]]:
    for rank, steps in enumerate(schedule.ranks):
        for position, step in enumerate(steps):
            for action in actions_of(step):
                yield rank, position, action


def _check_actions(schedule: Schedule) -> None:
    seen: dict[tuple[int, int, str], tuple[int, int]] = {}
    n_stages, microbatches = schedule.n_stages, schedule.microbatches
    for rank, position, action in _positions(schedule):
        here = f"schedule {schedule.name}: rank {rank}, position {position}: {action}"
        if not (0 <= action.stage < n_stages and 0 <= action.microbatch < microbatches):
            raise InputError(
                f"{here} is out of range: stages are 0..{n_stages - 1} and micro-batches "
                f"0..{microbatches - 1}."
            )
        if action.kind not in KINDS:
            raise InputError(f"{here} has kind {action.kind!r}; use one of {', '.join(KINDS)}.")
        owner = schedule.rank_of(action.stage, action.microbatch)
        if owner != rank:
            raise InputError(
                f"{here} is on the wrong rank: stage {action.stage} of micro-batch {action.microbatch} lives "
                f"on rank {owner} ({schedule.placement} placement); move it there."
            )
        # B is both gradients, so an I or W of the same chunk would be the same work twice.
        for kind in ("I", "W") if action.kind == "B" else (action.kind,):
            first = seen.setdefault((action.stage, action.microbatch, kind), (rank, position))
            if first != (rank, position):
                raise InputError(
                    f"{here} repeats work that position {first[1]} of rank {first[0]} does; "
                    "give every chunk one F and either one B or one I and one W."
                )
    _check_complete(schedule, seen)


def _check_complete(schedule: Schedule, seen: dict[tuple[int, int, str], tuple[int, int]]) -> None:
    if len(seen) == 3 * schedule.n_stages * schedule.microbatches:
        return
    for stage in range(schedule.n_stages):
        for microbatch in range(schedule.microbatches):
            missing = [kind for kind in ("F", "I", "W") if (stage, microbatch, kind) not in seen]
            if missing:
                kind = "B" if missing == ["I", "W"] else missing[0]
                rank = schedule.rank_of(stage, microbatch)
                raise InputError(
                    f"schedule {schedule.name}: rank {rank}, position {len(schedule.ranks[rank])} (its end): "
                    f"{stage}{kind}{microbatch} is missing; give every chunk one F and either one B or one I "
                    "and one W."
                )


def _rank_report(steps: tuple[Step, ...]) -> RankReport:
    by_stage: Counter[int] = Counter()
    peak, peak_stages = 0, by_stage.copy()
    until_input = peak_until_input = 0
    in_flight = 0
    counts: Counter[str] = Counter()
    for step in steps:
        actions = actions_of(step)
        counts["overlap" if len(actions) == 2 else actions[0].kind] += 1
        for action in actions:
            if action.kind == "F":
                by_stage[action.stage] += 1
                in_flight += 1
                until_input += 1
        # A pair allocates the chunk of its forward before it frees that of its backward.
        if in_flight > peak:
            peak, peak_stages = in_flight, by_stage.copy()
        peak_until_input = max(peak_until_input, until_input)
        for action in actions:
            if action.kind in ("B", "W"):
                by_stage[action.stage] -= 1
                in_flight -= 1
            if action.kind in ("B", "I"):
                until_input -= 1
    stages = tuple(sorted((stage, count) for stage, count in peak_stages.items() if count))
    return RankReport(peak, stages, peak_until_input, dict(sorted(counts.items())))
