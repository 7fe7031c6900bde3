"""docs/extend.md, "A schedule": a file that defines a spec and one line that registers it are enough."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

import moesim
from moesim.hwmodels import InputError
from moesim.simulator.planner import replay
from moesim.simulator.schedules import SCHEDULES, Action, Schedule, ScheduleSpec, build, register, validate
from moesim.simulator.schedules.action import loop_route
from moesim.simulator.schedules.spec import check_microbatches
from moesim.simulator.trainers.torchtitan.export import torchtitan_snippet

ROOT = Path(__file__).parents[2]
NAME = "two-by-two"


def build_two_by_two(pp: int, microbatches: int, vpp: int = 1) -> Schedule:
    """Micro-batches in rounds of two: two forwards, then their two backwards, however long the pipeline."""
    ranks = []
    for rank in range(pp):
        steps = []
        for first in range(0, microbatches, 2):
            steps += [Action(rank, "F", m) for m in (first, first + 1)]
            steps += [Action(rank, "B", m) for m in (first, first + 1)]
        ranks.append(tuple(steps))
    return Schedule(NAME, microbatches, (loop_route(pp, pp),), tuple(ranks))


def check_even(pp: int, microbatches: int) -> None:
    check_microbatches(NAME, microbatches, 2, lambda m: m % 2 == 0, "they run two by two")


TWO_BY_TWO = ScheduleSpec(
    NAME,
    build_two_by_two,
    check_sizes=check_even,
    microbatch_step=lambda pp, microbatches: 2,
    names_elsewhere={"torch": "TwoByTwo"},
)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    register(TWO_BY_TWO)
    yield
    del SCHEDULES[NAME]
    for cache in (replay.pattern, replay._pattern):
        cache.cache_clear()


SMALL = (
    "deepseek-v3-2048xh800",
    "model=qwen3-30b-a3b",
    "cluster={node: hgx-h800, nodes: 4, network: mpft-ib-400g}",
    "parallel={pp: 4, ep: 8, zero_stage: 1}",
    "batch.sequences=256",
    f"schedule={NAME}",
)


def test_it_is_built_checked_and_validated() -> None:
    schedule = build(NAME, 4, 8)
    validate(schedule)
    assert schedule.n_stages == 4
    with pytest.raises(InputError, match=r"they run two by two; nearest legal: 6, 8"):
        build(NAME, 4, 7)
    with pytest.raises(InputError, match=r"vpp=3 is illegal"):
        build(NAME, 4, 8, 3)


def test_it_is_simulated_and_planned() -> None:
    scenario = moesim.load(*SMALL)
    result = moesim.simulate(scenario)
    space = moesim.PlanSpace(
        tp=(1,), pp=(4,), ep=(8,), cp=(1,), microbatch=(1,), zero_stage=(1,), recompute=("full",),
        precision=("bf16",), sms=(20,), schedule=("1f1b", NAME),
    )  # fmt: skip
    found = moesim.plan(scenario, space)
    times = {row.schedule: row for row in found.ranked}
    assert set(times) == {"1f1b", NAME}
    assert times[NAME].time_s > times["1f1b"].time_s
    estimate = times[NAME].closed_form_s
    assert estimate == pytest.approx(times[NAME].time_s, rel=0.03)
    assert result.step.time_s > 0.0


def test_it_is_part_of_the_default_space_of_the_advice_and_of_the_trainers() -> None:
    scenario = moesim.load(*SMALL)
    wanted = moesim.PlanSpace(
        tp=(1,), pp=(4,), ep=(8,), cp=(1,), vpp=(2,), microbatch=(1,), zero_stage=(1,), recompute=("full",),
        precision=("bf16",), sms=(20,),
    )  # fmt: skip
    assert moesim.plan(scenario, wanted, top=1).considered == len(SCHEDULES)
    before = moesim.load(*SMALL, "schedule=1f1b")
    tried = {row.override for row in moesim.neighbours(before, moesim.simulate(before))}
    assert f"schedule={NAME}" in tried
    assert 'pipeline_parallel_schedule="TwoByTwo"' in torchtitan_snippet(scenario)


def test_the_command_line_draws_it_and_lists_it() -> None:
    from moesim.cli.root import app

    shown = CliRunner().invoke(app, ["schedule", NAME, "--pp", "4", "--microbatches", "8"])
    assert shown.exit_code == 0, shown.output
    assert "no published formula" in shown.output
    with pytest.raises(InputError, match=rf"valid names: .*, {NAME}\."):
        CliRunner().invoke(app, ["schedule", "?", "--pp", "4", "--microbatches", "8"], catch_exceptions=False)


def test_the_tables_of_the_docs_list_it() -> None:
    tables = runpy.run_path(str(ROOT / "lab" / "writers" / "key_tables.py"))["tables"]()
    line = next(line for line in tables["scenario"] if line.startswith("| `schedule` |"))
    assert f"`dualpipev`, `{NAME}`" in line


@pytest.mark.parametrize(("page", "key"), [("scenario", "schedule"), ("planner", "schedules")])
def test_the_dashboard_offers_it(page: str, key: str) -> None:
    testing = pytest.importorskip("streamlit.testing.v1", reason="the dashboard extra is not installed")
    app = testing.AppTest.from_string(
        f"""
from moesim.app import state, widgets
from moesim.app.views import {page}
state.synchronise()
widgets.guard({page}.show)
state.publish()
""",
        default_timeout=120,
    ).run()
    assert not app.exception
    offered = app.selectbox if page == "scenario" else app.multiselect
    choices = next(widget for widget in offered if key in str(widget.key) or widget.label == "Schedule")
    assert NAME in choices.options
