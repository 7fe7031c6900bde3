"""A second engine, added as docs/extend.md says: one class, one line in the registry, this test.

The engine takes the longest path through the tasks and knows no contention, so it must agree with SimPy to
the nanosecond wherever no link is shared, and can never be slower anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from moesim.hwmodels.arrays import FloatArray, IntArray
from moesim.hwmodels.errors import InputError
from moesim.simulator.engine.link_map import Demand
from moesim.simulator.engine.program import NS, PlacedStep, Program, action_table
from moesim.simulator.engine.records import Execution, RecordedTimes, SendRecord, end_of_step, free_by_rank
from moesim.simulator.engine.registry import ENGINES, engine_of
from moesim.simulator.engine.simpy.execute import SimpyEngine
from moesim.simulator.model.operator import BlockKind
from moesim.simulator.predict.driver import predict
from moesim.simulator.predict.step import run_step
from moesim.simulator.scenario import Scenario, load_scenario
from moesim.simulator.schedules import SCHEDULES, build

Key = tuple[str, int, int]
"""("F" or "B", stage, micro-batch) of an activation or gradient that a step waits for."""

MODEL = "longest-path"


class LongestPath:
    """Every transfer and send takes the time that it takes alone."""

    name = MODEL

    def execute(self, programs: Sequence[Program]) -> list[Execution]:
        """Run every group for itself: without contention they meet at the end of the step only."""
        groups = [_Group(program) for program in programs]
        for group in groups:
            group.run()
        syncs, end_ns = end_of_step(programs, [free_by_rank(group.table, group.times) for group in groups])
        carried = np.sum([group.carried for group in groups], axis=0)
        return [Execution(g.program, g.table, g.times, syncs, g.sends, end_ns, carried) for g in groups]


class _Group:
    def __init__(self, program: Program) -> None:
        self.program, self.schedule = program, program.schedule
        self.table = action_table(program)
        self.times = RecordedTimes.empty(self.table, program.members)
        self.done = [0] * len(program.ranks)  # actions of every rank
        self.sends: list[SendRecord] = []
        self.arrived: dict[Key, IntArray] = {}
        self.carried: FloatArray = np.zeros(len(program.link_map.capacity_bytes_per_ns))

    def run(self) -> None:
        """Whatever rank can run its next step does, until all have."""
        while sum(self.done) < len(self.table.steps):
            before = sum(self.done)
            for rank, steps in enumerate(self.program.ranks):
                for step in steps[self.done[rank] :]:
                    if not self._inputs(step) <= self.arrived.keys():
                        break
                    self._step(rank, step)
            if sum(self.done) == before:
                raise RuntimeError("ranks wait for each other for ever")

    def _inputs(self, step: PlacedStep) -> set[Key]:
        (forward, backward), (fmb, bmb) = step.stages, step.microbatches
        keys: set[Key] = {("F", forward, fmb)} if forward > 0 else set()
        last = self.schedule.n_stages - 1
        return keys | ({("B", backward, bmb)} if 0 <= backward < last and step.code.kind != "W" else set())

    def _step(self, rank: int, step: PlacedStep) -> None:
        times, action = self.times, int(self.table.first_action[rank]) + self.done[rank]
        first = int(self.table.first_task[action])
        start = times.free[action - 1] if self.done[rank] else np.zeros(self.program.members, dtype=np.int64)
        for key in self._inputs(step):
            start = np.maximum(start, self.arrived[key])
        streams = [start, start]
        for number in range(len(step.code.tasks)):
            self._task(rank, step, first, number, streams)
        end = free = np.maximum(*streams)
        code, late = step.code, self.schedule.awaits_sends
        for kind, side, out, gives in (
            ("F", 0, code.forward_out, code.kind in ("F", "F&B", "F&I")),
            ("B", 1, code.backward_out, code.kind in ("B", "I", "F&B", "F&I")),
        ):
            if gives:
                ready = end if out is None else times.ends[first + out]
                sent = self._send(rank, kind, step.stages[side], step.microbatches[side], ready)
                free = np.maximum(free, sent) if late else free
        times.start[action], times.end[action], times.free[action] = start, end, free
        self.done[rank] += 1

    def _task(self, rank: int, step: PlacedStep, first: int, number: int, streams: list[IntArray]) -> None:
        """Run a task; `first`: number of the first task of its action."""
        task, times = step.code.tasks[number], self.times
        mb, transfer = step.microbatches[task.side], task.transfer
        end = streams[0 if transfer is None else 1]
        for dep in task.deps:
            end = np.maximum(end, times.ends[first + dep])
        end = end + task.rows_ns[mb]
        meet = finish = -1
        if transfer is not None:
            meet = int(end.max())
            begin, alone = meet + transfer.launch_ns, transfer.payload_ns.item(mb)
            finish, end = begin + round(alone), begin + transfer.member_ns[mb]
            if alone > 0.0:
                row = mb % len(transfer.load)
                link_map, loads = self.program.link_map, (transfer.load[row], transfer.node_load[row])
                self._carry(transfer.demand or link_map.transfer(rank, task.phase, transfer.cost, *loads))
        streams[0 if transfer is None else 1] = end
        at = first + number
        times.begins[at], times.finishes[at], times.ends[at] = meet, finish, end

    def _send(self, rank: int, kind: str, stage: int, microbatch: int, ready: IntArray) -> IntArray:
        """Hand an output on; returns when it has arrived (where nothing moves: when it was ready)."""
        to = stage + 1 if kind == "F" else stage - 1
        if not 0 <= to < self.schedule.n_stages:
            return ready
        target, costs, link_map = (
            self.schedule.rank_of(to, microbatch),
            self.program.costs,
            self.program.link_map,
        )
        if target != rank and costs.send_s > 0.0:
            took = np.rint(costs.send_s * NS * np.asarray(link_map.send_slowness(rank, target))).astype(
                np.int64
            )
            begin = int(ready.max())
            end = begin + int(took.max())
            self.sends.append(SendRecord(rank, target, f"{stage}{kind}{microbatch}", begin, end))
            self._carry(link_map.send(rank, target, costs.send_bytes))
            ready = ready + took
        self.arrived[kind, to, microbatch] = ready
        return ready

    def _carry(self, demand: Demand) -> None:
        np.add.at(self.carried, demand.links, demand.bytes)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> str:
    """The line in the registry."""
    monkeypatch.setitem(ENGINES, MODEL, LongestPath())
    return MODEL


@pytest.fixture
def no_simpy(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the default engine was asked")

    monkeypatch.setattr(SimpyEngine, "execute", refuse)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_without_contention_every_engine_returns_the_longest_path(
    toy: Callable[..., Program], registered: str, name: str
) -> None:
    """Every schedule, members with clocks and loads of their own, sends: to the nanosecond."""
    schedule = build(name, 4, 8)
    blocks: list[list[BlockKind]] = [["moe", "dense"]] * schedule.n_stages
    program = toy(
        schedule, blocks, lambda kind, phase, o: 100 + 7 * len(phase), lambda phase, o: 60.0,
        clock=[[1.0, 1.1], [0.9, 1.0], [1.0, 1.0], [1.2, 0.8]], loads={0: [0.5, 1.5]}, send_ns=30.0,
        launch_ns=7, bytes_=8.0,
    )  # fmt: skip
    (one,), (other,) = (engine_of(engine).execute([program]) for engine in ("simpy", registered))
    assert one.end_ns == other.end_ns and one.syncs == other.syncs and one.events == other.events
    for name_ in ("start", "end", "free", "ends", "begins", "finishes"):
        assert np.array_equal(getattr(one.times, name_), getattr(other.times, name_)), name_
    assert np.allclose(one.carried_bytes, other.carried_bytes)

    def order(send: SendRecord) -> tuple[int, str]:
        return send.start, send.label

    assert sorted(one.sends, key=order) == sorted(other.sends, key=order)


def test_a_prediction_runs_on_the_engine_that_is_chosen(registered: str, small: Scenario) -> None:
    """One pipeline rank shares its links with nobody: the whole result is the same."""
    alone = small.overridden("parallel.pp=1", "schedule=1f1b", "stages.blocks=[embedding moe*4 head]")
    assert predict(alone, engine=registered).result == predict(alone).result


def test_it_bounds_simpy_from_below_where_links_are_shared(registered: str, small: Scenario) -> None:
    free, shared = predict(small, engine=registered), predict(small, engine="simpy")
    assert free.prepared.engine.name == registered and shared.prepared.engine.name == "simpy"
    assert 0.9 * shared.result.step.time_s < free.result.step.time_s <= shared.result.step.time_s
    assert free.result.step.lower_bound_s <= free.result.step.time_s


def test_faults_groups_phases_and_fleets_run_on_it_too(
    registered: str, no_simpy: None, small: Scenario, mixed: Scenario
) -> None:
    faulty = small.overridden(
        "resolution=full",
        "cluster.network=ft3-ib-400g",
        "faults=[{kind: slow-gpu, gpu: 3, speed: 0.8}, {kind: slow-link, link: 'nic:5', bandwidth: 0.5}]",
        "run.phases=[{name: long, tokens: 1.0e9, sequence_length: 8192}]",
    )
    result = predict(faulty, engine=registered).result
    assert result.full is not None and len(result.full.causes) == 4
    assert result.run.report is not None and len(result.run.report.phases) == 2
    assert run_step(mixed, engine=registered).time_s > 0.0


def test_an_unknown_engine_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"engine='simpi' is not known.*simpy"):
        predict(load_scenario("deepseek-v3-trace-pair"), engine="simpi")
