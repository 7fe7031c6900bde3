"""Runs a program: the only place where simulated time passes.

Compute of a pipeline rank advances as vectors of member clocks; transfers are SimPy flows on shared
links. A transfer is a barrier of its group: it starts when the slowest member is ready.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import simpy

from moesim.simulator.engine.links import Demand, LinkPool
from moesim.simulator.engine.program import (
    NS,
    CompiledTemplate,
    FloatVector,
    IntVector,
    PlacedStep,
    Program,
    nic_in,
    nic_out,
    scale_up,
)
from moesim.simulator.schedules import Schedule

Process = Generator[simpy.Event, Any, None]


@dataclass(slots=True)
class StepRecord:
    """When one schedule step ran: nanoseconds, one value a member."""

    step: PlacedStep
    start: IntVector
    end: IntVector
    ends: list[IntVector]
    """End of every task of the template."""
    begins: list[int]
    """When the last member reached the barrier of each transfer; -1 for compute tasks."""
    finishes: list[int]
    """When the slowest member had its payload; -1 for compute tasks."""


@dataclass(slots=True)
class SyncRecord:
    """End of the step on one pipeline rank: when each part began and ended (nanoseconds)."""

    ready_ns: int
    reduce: tuple[int, int]
    norm: tuple[int, int]
    optimizer: tuple[int, int]
    gather: tuple[int, int]


@dataclass(slots=True)
class SendRecord:
    """One pipeline send: from rank to rank, nanoseconds of its payload on the wire."""

    source: int
    target: int
    label: str
    start: int
    end: int


@dataclass(slots=True)
class Execution:
    """What happened: records per pipeline rank, sends, end of the step, bytes carried per link."""

    program: Program
    ranks: list[list[StepRecord]]
    syncs: list[SyncRecord]
    sends: list[SendRecord]
    end_ns: int
    carried_bytes: FloatVector
    events: int


class _Machine:
    """State of one run: who waits for which activation or gradient."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.env = simpy.Environment(initial_time=0)
        self.links = LinkPool(self.env, program.link_bytes_per_ns)
        self.arrived: dict[tuple[str, int, int], IntVector] = {}
        self.waiting: dict[tuple[str, int, int], simpy.Event] = {}
        self.records: list[list[StepRecord]] = [[] for _ in program.ranks]
        self.sends: list[SendRecord] = []
        self.send_demand: dict[tuple[int, int], Demand] = {}
        self.last_stage = program.schedule.n_stages - 1
        self.send_ns = program.costs.send_s * NS

    # -- pipeline sends ------------------------------------------------------------------------------

    def deliver(self, key: tuple[str, int, int], when: IntVector) -> None:
        self.arrived[key] = when
        event = self.waiting.pop(key, None)
        if event is not None:
            event.succeed()

    def send(self, rank: int, kind: str, stage: int, microbatch: int, ready: IntVector) -> None:
        """Hand the output of a stage to the next one, over the NIC where that is another rank."""
        target_stage = stage + 1 if kind == "F" else stage - 1
        if not 0 <= target_stage <= self.last_stage:
            return
        key = (kind, target_stage, microbatch)
        target = self.program.schedule.rank_of(target_stage, microbatch)
        if target == rank or self.send_ns == 0.0:
            self.deliver(key, ready)
            return
        label = f"{stage}{kind}{microbatch}"
        demand = self.demand_of_send(rank, target)

        def launch(_: simpy.Event) -> None:
            begin = int(self.env.now)
            arrived = self.links.start(demand, self.send_ns)

            def finish(_: simpy.Event) -> None:
                took = int(self.env.now) - begin
                self.sends.append(SendRecord(rank, target, label, begin, int(self.env.now)))
                self.deliver(key, ready + took)

            assert arrived.callbacks is not None
            arrived.callbacks.append(finish)

        self.at(int(ready.max()), launch)

    def demand_of_send(self, rank: int, target: int) -> Demand:
        if (rank, target) not in self.send_demand:
            # A scale-up port is one link for both directions: a send counts at its source only.
            across = self.program.costs.send_across_nodes
            links = (nic_out(rank), nic_in(target)) if across else (scale_up(rank),)
            demand = Demand.of((link, self.program.costs.send_bytes) for link in links)
            self.send_demand[rank, target] = demand
        return self.send_demand[rank, target]

    def at(self, when_ns: int, call: Callable[[simpy.Event], None]) -> None:
        timeout = self.env.timeout(max(0, when_ns - int(self.env.now)))
        assert timeout.callbacks is not None
        timeout.callbacks.append(call)

    # -- one pipeline rank ---------------------------------------------------------------------------

    def run_rank(self, rank: int) -> Process:
        free: IntVector = np.zeros(self.program.members, dtype=np.int64)
        for step in self.program.ranks[rank]:
            start = free
            for key in self._inputs(step):
                if key not in self.arrived:
                    event = self.waiting[key] = self.env.event()
                    yield event
                start = np.maximum(start, self.arrived.pop(key))
            record = StepRecord(step, start, start, [], [], [])
            yield from self._run_tasks(rank, step, record)
            self.records[rank].append(record)
            free = record.end

    def _inputs(self, step: PlacedStep) -> list[tuple[str, int, int]]:
        keys = []
        (forward, backward), (fmb, bmb) = step.stages, step.microbatches
        if forward > 0:
            keys.append(("F", forward, fmb))
        if 0 <= backward < self.last_stage and step.code.kind != "W":
            keys.append(("B", backward, bmb))
        return keys

    def _run_tasks(self, rank: int, step: PlacedStep, record: StepRecord) -> Process:
        code: CompiledTemplate = step.code
        ends, begins, finishes = record.ends, record.begins, record.finishes
        maximum, transfer_on_links = np.maximum, self.links.transfer
        compute = communication = record.start
        micro = step.microbatches
        env = self.env
        for number, task in enumerate(code.tasks):
            mb = micro[task.side]
            transfer = task.transfer
            end = compute if transfer is None else communication
            for dep in task.deps:
                if ends[dep] is not end:
                    end = maximum(end, ends[dep])
            end = end + task.rows_ns[mb]
            if transfer is None:
                compute = end
                meet = finish = -1
            else:
                # Barrier: everybody waits for the slowest member, then the payload goes out.
                meet = int(end.max())
                launch = meet + transfer.launch_ns
                if launch > env.now:
                    yield env.timeout(launch - int(env.now))
                begin = int(env.now)
                alone = transfer.payload_ns[mb]
                if alone > 0.0:  # a group of one has nothing to move
                    yield from transfer_on_links(transfer.demand, alone)
                finish = int(env.now)
                end = transfer.member_ns[mb]
                if finish - begin != round(alone):  # others were on its links: stretch every member alike
                    end = np.rint(end * ((finish - begin) / alone)).astype(np.int64)
                end = end + begin
                communication = end
            begins.append(meet)
            finishes.append(finish)
            ends.append(end)
            if number == code.forward_out:
                self.send(rank, "F", step.stages[0], micro[0], end)
            if number == code.backward_out:
                self.send(rank, "B", step.stages[1], micro[1], end)
        record.end = compute if compute is communication else np.maximum(compute, communication)
        if code.forward_out is None and code.kind in ("F", "F&B", "F&I"):
            self.send(rank, "F", step.stages[0], micro[0], record.end)
        if code.backward_out is None and code.kind in ("B", "I", "F&B", "F&I"):
            self.send(rank, "B", step.stages[1], micro[1], record.end)


def execute(program: Program) -> Execution:
    """Run the program to its end and return every start and end in integer nanoseconds.

    Compute by docs/model.md, eq. E1, transfers behind their barrier by eq. E2, pipeline sends by eq. E4.
    Raises RuntimeError where ranks wait for each other forever (a validated schedule cannot).
    """
    machine = _Machine(program)
    processes = [machine.env.process(machine.run_rank(r)) for r in range(len(program.ranks))]
    with _collector_paused():
        machine.env.run()
    stuck = [r for r, p in enumerate(processes) if p.is_alive]
    if stuck:
        waits = sorted(machine.waiting)[:4]
        raise RuntimeError(
            f"pipeline ranks {stuck} wait for {waits} for ever: the schedule is not executable"
        )
    syncs, end_ns = _synchronise(program, machine.records)
    events = sum(len(r.ends) for rank in machine.records for r in rank)
    return Execution(
        program, machine.records, syncs, machine.sends, end_ns, machine.links.carried_bytes, events
    )


@contextmanager
def _collector_paused() -> Iterator[None]:
    """No cyclic garbage collection meanwhile: a run only adds records that stay, so looking finds nothing."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def holders(schedule: Schedule, rank: int) -> list[int]:
    """Pipeline ranks that hold a stage of `rank`: itself, and its mirror in a bidirectional pipeline."""
    stages = schedule.stages_on_rank(rank)
    return sorted({route[stage] for route in schedule.routes for stage in stages})


def _synchronise(program: Program, records: list[list[StepRecord]]) -> tuple[list[SyncRecord], int]:
    """Gradient reduction, global norm, optimizer and parameter gather after the last action (eq. E5).

    A rank's reduction waits for the ranks that hold the same parameters (the mirror rank of a
    bidirectional schedule); gradient clipping makes the norm a barrier of all ranks.
    """
    schedule, sync = program.schedule, program.costs.sync
    done = [int(steps[-1].end.max()) if steps else 0 for steps in records]
    ready = [max(done[holder] for holder in holders(schedule, r)) for r in range(schedule.pp)]
    reduced = [t + round(sync[r].reduce_s * NS) for r, t in enumerate(ready)]
    meet = max(reduced)
    result = []
    for r in range(len(records)):
        norm = meet + round(sync[r].norm_s * NS)
        updated = norm + round(sync[r].optimizer_s * NS)
        gathered = updated + round(sync[r].gather_s * NS)
        result.append(
            SyncRecord(done[r], (ready[r], reduced[r]), (meet, norm), (norm, updated), (updated, gathered))
        )
    return result, max((s.gather[1] for s in result), default=0)
