from __future__ import annotations

from collections.abc import Callable, Hashable

import numpy as np
import pytest
from step_records import execute, records_of

from moesim.hwmodels.arrays import IntArray
from moesim.simulator.engine.full_resolution.statistics import group_times
from moesim.simulator.engine.program import PhaseRows, Program
from moesim.simulator.engine.records import inputs_ready_ns
from moesim.simulator.engine.task_table import task_table
from moesim.simulator.predict.report import breakdowns, compute_ns
from moesim.simulator.schedules import build

Toy = Callable[..., Program]
SCHEDULES = ("dualpipe", "1f1b", "zb-h1", "zbv")


def program_of(toy: Toy, name: str, send_ns: float = 300.0) -> Program:
    """Three members of different speed and load, so that means are no short binary fractions."""
    schedule = build(name, 2, 6)
    blocks = [["moe", "dense"], ["moe"], ["dense"], ["moe"]][: schedule.n_stages]
    return toy(
        schedule,
        blocks,
        lambda kind, phase, paired: 1000.0 + 37 * len(phase) + 101 * paired,
        lambda phase, paired: 211.0,
        launch_ns=7,
        send_ns=send_ns,
        bytes_=10.0,
        rate=1e9,
        clock=[[1.0, 1.3, 1.1], [1.2, 1.05, 1.0]],
        loads={0: [0.5, 1.0, 1.5]},
    )


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_table_holds_what_a_walk_over_all_steps_finds(toy: Toy, name: str) -> None:
    program = program_of(toy, name)
    table = task_table(program)
    steps = [step for steps in program.ranks for step in steps]
    tasks = [(step, task) for step in steps for task in step.code.tasks]
    micro = [step.microbatches[task.side] for step, task in tasks]
    assert table.microbatch.tolist() == micro
    assert [table.of_template[number] for number in table.template_task] == [task for _, task in tasks]
    slowest = [int(task.rows_ns[m].max()) for (_, task), m in zip(tasks, micro, strict=True)]
    assert table.slowest_ns.tolist() == slowest
    transfers = [number for number, (_, task) in enumerate(tasks) if task.transfer is not None]
    assert table.transfers.task.tolist() == transfers
    payloads = [tasks[n][1].transfer.payload_ns[micro[n]] for n in transfers]  # type: ignore[union-attr]
    assert table.transfers.payload_ns().tolist() == payloads
    compute = [
        sum(float(step.code.part.compute_ns[side][step.microbatches[side]]) for side in (0, 1)
            if step.microbatches[side] >= 0)
        for step in steps
    ]  # fmt: skip
    assert compute_ns(table.actions).tolist() == compute


@pytest.mark.parametrize("name", SCHEDULES)
def test_breakdowns_are_sums_in_the_order_of_the_actions(toy: Toy, name: str) -> None:
    """Equal to the last bit to a loop over the records, on which printed results depend."""
    execution = execute(program_of(toy, name))
    for row, records in zip(breakdowns(execution), records_of(execution), strict=True):
        forward = backward = exposed = 0.0
        for record in records:
            code, micro = record.step.code, record.step.microbatches
            span = float((record.end - record.start).mean())
            forward += span if code.kind == "F" else 0.0
            backward += span if code.kind in ("B", "I") else 0.0
            busy = sum(float(code.part.compute_ns[side][micro[side]]) for side in (0, 1) if micro[side] >= 0)
            exposed += span - busy + float((record.free - record.end).mean())
        assert row.forward == forward / 1e9
        assert row.backward_input == backward / 1e9
        assert row.exposed_communication == exposed / 1e9


def test_arrivals_and_waits_are_those_of_every_pass(toy: Toy) -> None:
    execution = execute(program_of(toy, "dualpipe"))
    times = group_times(execution)
    for rank, records in enumerate(records_of(execution)):
        wait, held_up, compute = np.zeros(3), np.zeros(3), np.zeros(3)
        for record in records:
            for number, task in enumerate(record.step.code.tasks):
                rows = task.rows_ns[record.step.microbatches[task.side]]
                if task.transfer is None:
                    compute += rows
                    continue
                before = record.step.code.before[number]
                ready = record.start
                for dep in (*task.deps, *([] if before is None else [before])):
                    ready = np.maximum(ready, record.ends[dep])
                ready = ready + rows
                wait += record.begins[number] - ready
                held_up[ready.argmax()] += record.begins[number] - np.sort(ready)[-2]
        assert times.compute_s[rank].tolist() == (compute / 1e9).tolist()
        assert times.wait_s[rank].tolist() == (wait / 1e9).tolist()
        assert times.held_up_s[rank].tolist() == (held_up / 1e9).tolist()
        assert held_up.sum() > 0.0


def test_a_transfer_that_waits_for_no_task_is_ready_when_its_action_starts(toy: Toy) -> None:
    execution = execute(program_of(toy, "dualpipe"))
    checked = 0
    for _, number, actions in execution.tasks.groups:
        code = execution.table.codes[number]
        free = [n for n in code.transfers if not code.tasks[n].deps and code.before[n] is None]
        for row in inputs_ready_ns(execution, code, actions, free):
            assert row.tolist() == execution.times.start[actions].tolist()
            checked += 1
    assert checked


def test_durations_are_worked_out_when_they_are_read_and_their_figures_once() -> None:
    made: list[int] = []

    def make() -> tuple[IntArray, dict[Hashable, IntArray]]:
        made.append(len(made))
        return np.array([[1, 5, 3], [2, 2, 9]]), {"slowest": np.array([5, 9])}

    rows = PhaseRows((2, 3), make)
    assert rows.slowest_ns.tolist() == [5, 9] and rows.fastest_ns.tolist() == [1, 2]
    kept = rows.total_ns
    assert kept.tolist() == [9, 13] and rows.total_ns is kept
    before, numbers = len(made), rows.ns  # which nobody had kept
    assert rows.ns is numbers and len(made) == before + 1
