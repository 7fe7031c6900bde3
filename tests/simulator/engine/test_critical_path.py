from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from step_records import execute

from moesim.simulator.cost.table import SyncCost
from moesim.simulator.engine.critical import critical_path, seconds_by_cause
from moesim.simulator.engine.program import Program
from moesim.simulator.engine.records import Execution
from moesim.simulator.model.operator import BlockKind
from moesim.simulator.schedules import SCHEDULES, build

Toy = Callable[..., Program]


def check_path(execution: Execution) -> None:
    path = critical_path(execution)
    assert path[0].begin_ns == 0
    assert path[-1].end_ns == execution.end_ns
    for before, after in pairwise(path):
        assert before.end_ns == after.begin_ns
        assert before.end_ns > before.begin_ns
    assert sum(s.end_ns - s.begin_ns for s in path) == execution.end_ns
    total = sum(seconds for _, seconds in seconds_by_cause(path))
    assert total == pytest.approx(execution.end_ns / 1e9, rel=1e-12)


@given(st.data())
def test_segments_touch_and_sum_to_the_step(toy: Toy, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(SCHEDULES)))
    pp = data.draw(st.sampled_from([2, 4]))
    schedule = build(name, pp, 2 * pp)
    # An embedding alone has no input gradient: actions without any task are on the way.
    inner: st.SearchStrategy[list[BlockKind]] = st.sampled_from((["moe"], ["dense"], ["moe", "moe"]))
    blocks = [data.draw(inner) for _ in range(schedule.n_stages)]
    if data.draw(st.booleans()):
        blocks[0] = ["embedding"]
    members = data.draw(st.integers(1, 4))
    factors = st.lists(st.sampled_from([0.7, 0.95, 1.0, 1.02, 1.5]), min_size=members, max_size=members)
    shared = data.draw(st.booleans())
    more: dict[str, Any] = {
        "clock": [data.draw(factors) for _ in range(pp)],
        "launch_ns": data.draw(st.sampled_from([0, 9])),
        "send_ns": data.draw(st.sampled_from([0.0, 700.0])),
        "bytes_": 300.0,
        "rate": 1e9 if shared else 1e30,
        "sync": [SyncCost(30e-9, 5e-9, 20e-9, 10e-9)] * pp,
    }
    times = data.draw(st.lists(st.integers(1, 900), min_size=4, max_size=4))
    check_path(
        execute(
            toy(
                schedule,
                blocks,
                lambda kind, phase, o: times[len(phase) % 2 + 2 * o],
                lambda phase, o: 300 + times[len(phase) % 3],
                **more,
            )
        )
    )


def test_the_home_case_and_the_trace_pair_are_explained_without_gaps(home_case: Any, trace_pair: Any) -> None:
    for prepared, execution, result in (home_case, trace_pair):
        check_path(execution)
        causes = {row.cause: row.seconds for row in result.critical_path_s}
        assert sum(causes.values()) == pytest.approx(result.step.time_s, rel=1e-12)
        known = {task.phase for steps in prepared.program.ranks for s in steps for task in s.code.tasks}
        ends = {"parameter gather", "optimizer", "gradient norm", "gradient reduction"}
        assert set(causes) <= {*known, "notify", "pipeline send", *ends}
        assert list(causes.values()) == sorted(causes.values(), reverse=True)


def test_the_path_goes_to_the_slowest_member_and_to_the_sender(toy: Toy) -> None:
    program = toy(
        build("gpipe", 2, 1), [["moe"], ["dense"]], lambda k, p, o: 100, lambda p, o: 40.0,
        clock=[[1.0, 3.0], [1.0, 1.0]], send_ns=7.0,
    )  # fmt: skip
    execution = execute(program)
    path = critical_path(execution)
    forward = [(s.rank, s.cause, s.end_ns - s.begin_ns) for s in path if s.step.endswith("F0")]
    assert forward[:4] == [
        (0, "attn F", 300),  # member 1, three times as slow
        (0, "dispatch F", 40),
        (0, "mlp F", 300),
        (0, "combine F", 40),
    ]
    assert forward[4] == (1, "pipeline send", 7)
