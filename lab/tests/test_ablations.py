"""A mechanism is switched off in the rows that use it, and only there."""

from __future__ import annotations

from lab.scoring.ablations import ablations, sampled, switched_off
from moesim.simulator.predict.driver import simulate
from moesim.simulator.scenario import load_scenario
from moesim.simulator.scoring.scoreboard import open_rows
from moesim.simulator.scoring.scoreboard.score import ScoredRow, predict, prepared_row

ROWS = {row.id: row for row in open_rows()}
OVERLAP = next(a for a in ablations() if a.only)


def test_without_its_overlap_a_row_is_slower_and_nothing_else_changes() -> None:
    row = ROWS["mcoremoe-004"]
    scenario = prepared_row(row).scenario
    without = switched_off(scenario, OVERLAP)
    assert without is not None and without.schedule == "interleaved-1f1b"
    assert without.replace(schedule=scenario.schedule).resolved() == scenario.resolved()
    assert simulate(without).step.time_s > predict(row).result.step.time_s


def test_rows_without_the_mechanism_are_left_alone() -> None:
    scenario = prepared_row(ROWS["kort-a100-001"]).scenario
    assert scenario.software.dropout and scenario.schedule != "interleaved-1f1b-overlapped"
    assert switched_off(scenario, OVERLAP) is None
    dry = switched_off(scenario, next(a for a in ablations() if "software.dropout" in a.without))
    assert dry is not None and not dry.software.dropout


def test_every_mechanism_is_named_once_and_its_keys_exist() -> None:
    assert len({a.name for a in ablations()}) == len(ablations())
    scenario = load_scenario("deepseek-v3-2048xh800")
    for ablation in ablations():
        changes = {key: value for key, value in ablation.without.items() if key != "schedule"}
        scenario.replace(**changes)  # raises where a key or a value does not exist


def test_sampled_rows_are_complete_and_spread_over_their_group() -> None:
    rows = [
        ScoredRow(
            id=f"{group}-{n}", group=group, arch="moe", family="Hopper", source="", complete=n != 3,
            published_step_s=1.0, predicted_step_s=1.1, relative_error=0.1,
        )
        for group, size in (("large", 21), ("small", 2))
        for n in range(size)
    ]  # fmt: skip
    assert [row.id for row in sampled(rows, 4)] == [
        "large-0", "large-6", "large-11", "large-16", "small-0", "small-1",
    ]  # fmt: skip
