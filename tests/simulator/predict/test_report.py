from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from step_records import execute, records_of

from moesim.simulator.cost.table import SyncCost
from moesim.simulator.engine.program import Program
from moesim.simulator.predict.driver import simulate
from moesim.simulator.predict.report import (
    breakdowns,
    mean_breakdown,
    moved_bytes,
    pair_phases,
    pair_seconds,
    utilisation,
)
from moesim.simulator.predict.result import Result
from moesim.simulator.scenario import load_scenario
from moesim.simulator.schedules import Schedule, build, parse_step

Toy = Callable[..., Program]

PARTS = ("forward", "backward_input", "backward_weight", "forward_backward", "bubble", "optimizer")


def test_the_parts_of_every_rank_sum_to_the_step(home_case: Any, trace_pair: Any) -> None:
    for _, execution, result in (home_case, trace_pair):
        rows = [
            *result.breakdown_by_rank_s,
            *breakdowns(execution, split_weight=True),
            result.breakdown_split_w_s,
        ]
        for row in rows:
            assert sum(getattr(row, part) for part in PARTS) == pytest.approx(result.step.time_s, abs=1e-9)
            assert all(getattr(row, part) >= 0.0 for part in PARTS)
            assert 0.0 <= row.exposed_communication <= result.step.time_s - row.bubble
        assert result.breakdown_s == result.breakdown_by_rank_s[0]


def test_the_other_reading_moves_the_weights_of_full_backwards_only(home_case: Any) -> None:
    _, execution, result = home_case
    fixed, split = breakdowns(execution), breakdowns(execution, split_weight=True)
    for one, other in zip(fixed, split, strict=True):
        moved = other.backward_weight - one.backward_weight
        assert moved > 0.0
        assert one.backward_input - other.backward_input == pytest.approx(moved, abs=1e-9)
        for same in ("forward", "forward_backward", "bubble", "optimizer", "exposed_communication"):
            assert getattr(one, same) == getattr(other, same)
    assert result.breakdown_split_w_s == mean_breakdown(split)


def test_the_pair_is_the_mean_over_all_overlapped_steps(home_case: Any, trace_pair: Any) -> None:
    for _, execution, result in (home_case, trace_pair):
        spans = [
            float((record.end - record.start).mean()) / 1e9
            for records in records_of(execution)
            for record in records
            if "OVERLAP" in record.step.label
        ]
        assert result.forward_backward_pair_s == pytest.approx(sum(spans) / len(spans))


# -- hand-made programs ------------------------------------------------------------------------------


def one_rank(text: str, microbatches: int) -> Schedule:
    return Schedule("by hand", microbatches, ((0,),), (tuple(parse_step(cell) for cell in text.split(",")),))


def test_a_breakdown_by_hand(toy: Toy) -> None:
    sync = [SyncCost(40e-9, 3e-9, 20e-9, 10e-9)]
    program = toy(
        one_rank("0F0,0I0,0W0,0F1,0B1", 2), [["moe"]], lambda k, p, o: 100, lambda p, o: 30.0, sync=sync
    )
    row = breakdowns(execute(program))[0]
    assert row.forward == pytest.approx(2 * 260e-9)
    assert row.backward_input == pytest.approx(260e-9 + 460e-9)
    assert row.backward_weight == pytest.approx(200e-9)
    assert row.optimizer == pytest.approx(73e-9)
    assert row.bubble == pytest.approx(0.0, abs=1e-15)
    # Four serial actions with transfers of 2 x 30 ns each, and the end of the step without its update.
    assert row.exposed_communication == pytest.approx(4 * 60e-9 + 53e-9)
    split = breakdowns(execute(program), split_weight=True)[0]
    assert split.backward_weight == pytest.approx(400e-9)
    assert split.backward_input == pytest.approx(520e-9)


def test_the_bubble_is_the_time_that_no_action_runs(toy: Toy) -> None:
    program = toy(build("gpipe", 3, 3), [["dense"]] * 3, lambda k, p, o: 100)
    for row in breakdowns(execute(program)):
        assert row.bubble == pytest.approx(2 * (200 + 400) * 1e-9)  # (pp - 1) (F + B)
        assert row.exposed_communication == pytest.approx(0.0, abs=1e-15)


def test_without_pairs_there_is_no_pair(toy: Toy) -> None:
    execution = execute(toy(build("1f1b", 2, 4), [["moe"]] * 2, lambda k, p, o: 10, lambda p, o: 5.0))
    assert pair_seconds([execution]) is None
    assert pair_phases([execution]) == ()


def test_waits_count_from_the_moment_a_member_could_have_gone_on(toy: Toy) -> None:
    """Member 1 takes twice as long in compute: member 0 waits the difference, and the mean is told."""
    program = toy(
        one_rank("0F0,(0F1;0B0)OVERLAP_F_B,0B1", 2), [["moe"]],
        lambda k, p, o: 1000, lambda p, o: 10.0, clock=[[1.0, 2.0]], launch_ns=3,
    )  # fmt: skip
    execution = execute(program)
    spans = {row.phase: row for row in pair_phases([execution])}
    record = next(r for r in records_of(execution)[0] if r.step.code.kind == "F&B")
    at: dict[str, int] = {task.phase: n for n, task in enumerate(record.step.code.tasks)}
    needs = {"dispatch F": "attn F", "dispatch B": "mlp I", "combine F": "mlp F"}
    order = ["combine B", "dispatch F", "dispatch B", "combine F"]
    for phase, need in needs.items():
        launch = record.begins[at[phase]] + 3
        stream = order[order.index(phase) - 1]
        waits = [
            launch - max(int(record.ends[at[need]][member]), int(record.ends[at[stream]][member]))
            for member in (0, 1)
        ]
        assert waits[0] > waits[1] == 3
        assert spans[phase].wait_s == pytest.approx(sum(waits) / 2 / 1e9)
        assert spans[phase].seconds == pytest.approx(10e-9)
    assert spans["mlp F"].seconds == pytest.approx(1500e-9)
    assert spans["mlp F"].wait_s == 0.0


def test_links_count_what_they_carried(toy: Toy) -> None:
    program = toy(
        one_rank("0F0,0B0", 1), [["moe"]], lambda k, p, o: 100, lambda p, o: 50.0, bytes_=25.0, rate=1e9
    )
    execution = execute(program)
    assert execution.end_ns == 2 * 100 + 4 * 100 + 4 * 50
    use = utilisation([execution], moved_bytes([execution]), 1e9, 1e9)
    assert use.compute_partition == pytest.approx(600 / 800)
    assert use.communication_partition == pytest.approx(200 / 800)
    assert use.nic == pytest.approx(4 * 25 / 800)
    assert use.scale_up == 0.0
    assert utilisation([execution], (), 0.0, 0.0).nic == 0.0


def test_results_of_version_0_1_0_are_read_under_their_old_names() -> None:
    result = simulate(load_scenario("deepseek-v3-trace-pair"))
    data = result.to_dict()
    assert data["breakdown_alternative_s"] == data["breakdown_split_w_s"]
    assert Result.model_validate(data) == result
    old = {key: value for key, value in data.items() if key != "breakdown_split_w_s"}
    assert Result.model_validate(old) == result
