"""A schedule that somebody adds: the search tries it, and refuses it as a plan where it cannot run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from planner_jobs import small_job

import moesim
from moesim.hwmodels import InputError
from moesim.simulator.planner import replay
from moesim.simulator.planner.space import PlanSpace
from moesim.simulator.scenario import Scenario
from moesim.simulator.schedules import SCHEDULES, Schedule, ScheduleSpec, build

NAME = "one-off"
Builder = Callable[[int, int, int], Schedule]


SPACE: dict[str, Any] = {
    "tp": (1,), "pp": (2, 4), "ep": (8,), "cp": (1,), "vpp": (2,), "microbatch": (1,), "zero_stage": (1,),
    "recompute": ("selective",), "precision": ("bf16",), "sms": (20,),
}  # fmt: skip


@pytest.fixture
def add(monkeypatch: pytest.MonkeyPatch) -> Callable[[Builder], None]:
    def registered(builder: Builder) -> None:
        monkeypatch.setitem(SCHEDULES, NAME, ScheduleSpec(NAME, builder, awaits_sends=True))
        for cache in (replay.pattern, replay._pattern):
            cache.cache_clear()

    return registered


def copied(pp: int, microbatches: int) -> Schedule:
    return replace(build("1f1b", pp, microbatches), name=NAME)


def test_an_added_schedule_is_planned_like_the_one_that_it_copies(add: Callable[[Builder], None]) -> None:
    add(lambda pp, microbatches, vpp: copied(pp, microbatches))
    found = moesim.plan(small_job(), PlanSpace(**SPACE, schedule=("1f1b", NAME)), top=10)
    times = {(row.schedule, row.pp): row.time_s for row in found.ranked}
    assert len(times) == 4
    for pp in (2, 4):
        assert times[NAME, pp] == times["1f1b", pp]
    estimates = {(row.schedule, row.pp): row.closed_form_s for row in found.ranked}
    assert estimates[NAME, 2] == pytest.approx(estimates["1f1b", 2], rel=1e-3)


def test_it_is_part_of_the_default_space(add: Callable[[Builder], None]) -> None:
    add(lambda pp, microbatches, vpp: copied(pp, microbatches))
    found = moesim.plan(small_job(), PlanSpace(**SPACE), top=1)
    assert found.considered == 2 * (len(SCHEDULES))


def whole_rounds_only(pp: int, microbatches: int, vpp: int) -> Schedule:
    """A rule that its check forgot."""
    if microbatches % 64:
        raise InputError(f"schedule {NAME}: microbatches={microbatches} is not a multiple of 64; nearest: 64")
    return copied(pp, microbatches)


def deadlocked(pp: int, microbatches: int, vpp: int) -> Schedule:
    """The last rank turns its order around, so that the first one waits for ever."""
    good = copied(pp, microbatches)
    return replace(good, ranks=(*good.ranks[:-1], tuple(reversed(good.ranks[-1]))))


def unfinished(pp: int, microbatches: int, vpp: int) -> Schedule:
    good = copied(pp, microbatches)
    return replace(good, ranks=(good.ranks[0][:-1], *good.ranks[1:]))


@pytest.mark.parametrize(
    ("builder", "words"),
    [
        (whole_rounds_only, "is not a multiple of n"),
        (deadlocked, "is stuck at position n"),
        (unfinished, "rank n position n"),
    ],
)
def test_what_cannot_run_is_refused_as_a_plan(
    add: Callable[[Builder], None], builder: Builder, words: str
) -> None:
    add(builder)
    job = small_job().replace(batch={"sequences": 80})  # 5 and 10 micro-batches
    found = moesim.plan(job, PlanSpace(**SPACE, schedule=("1f1b", NAME)), top=5)
    assert {row.schedule for row in found.ranked} == {"1f1b"}
    refused = [row for row in found.refused if NAME in row.reason]
    assert sum(row.count for row in refused) == 2
    assert any(words in row.reason for row in refused), refused
    assert found.considered == found.fitting + sum(row.count for row in found.refused)


def test_a_fleet_refuses_it_too(add: Callable[[Builder], None], mixed: Scenario) -> None:
    add(deadlocked)
    wanted = {key: value for key, value in SPACE.items() if key != "sms"}
    found = moesim.plan(
        mixed, PlanSpace(**{**wanted, "recompute": ("full",)}, schedule=("1f1b", NAME)), top=2
    )
    assert {row.schedule for row in found.ranked} == {"1f1b"}
    assert any("is stuck" in row.reason for row in found.refused)


def test_a_schedule_that_two_pools_would_share_is_refused_by_what_it_does(
    add: Callable[[Builder], None], mixed: Scenario
) -> None:
    add(lambda pp, microbatches, vpp: replace(build("dualpipe", pp, microbatches), name=NAME))
    wanted = {key: value for key, value in SPACE.items() if key != "sms"}
    found = moesim.plan(
        mixed, PlanSpace(**{**wanted, "recompute": ("full",)}, schedule=("1f1b", NAME)), top=2
    )
    assert {row.schedule for row in found.ranked} == {"1f1b"}
    assert any(f"{NAME} keeps every stage in two pools" in row.reason for row in found.refused)
