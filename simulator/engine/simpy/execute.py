"""Runs programs in SimPy: pipeline ranks as processes, their transfers on shared links (`engine/links.py`).

Compute of a pipeline rank advances as vectors of member clocks; transfers are SimPy flows on shared
links. A transfer is a barrier of its group: it starts when the slowest member is ready. Groups have
programs of their own and meet on the links, and at the end of the step.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import simpy

from moesim.hwmodels.arrays import FloatArray, IntArray
from moesim.simulator.cost.formulas import SyncParts, end_of_step
from moesim.simulator.engine.program import NS, CompiledTemplate, PlacedStep, Program
from moesim.simulator.engine.simpy.links import LinkPool

Process = Generator[simpy.Event, Any, None]


@dataclass(slots=True)
class StepRecord:
    """When one schedule step ran: nanoseconds, one value a member."""

    step: PlacedStep
    start: IntArray
    end: IntArray
    """When the last task of the action had ended."""
    free: IntArray
    """When the next action may start: later than `end` where the rank waits for its own sends."""
    ends: list[IntArray]
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
    """What happened to one group: records per pipeline rank, sends; end of the step; bytes per link.

    `end_ns`, `syncs` and `carried_bytes` are those of all groups together.
    """

    program: Program
    ranks: list[list[StepRecord]]
    syncs: list[SyncRecord]
    sends: list[SendRecord]
    end_ns: int
    carried_bytes: FloatArray
    events: int


class _Machine:
    """State of one group's run: who waits for which activation or gradient."""

    def __init__(self, program: Program, env: simpy.Environment, links: LinkPool) -> None:
        self.program = program
        self.env, self.links = env, links
        self.arrived: dict[tuple[str, int, int], IntArray] = {}
        self.waiting: dict[tuple[str, int, int], simpy.Event] = {}
        self.records: list[list[StepRecord]] = [[] for _ in program.ranks]
        self.sends: list[SendRecord] = []
        self.last_stage = program.schedule.n_stages - 1
        self.send_ns = program.costs.send_s * NS

    # -- pipeline sends ------------------------------------------------------------------------------

    def deliver(self, key: tuple[str, int, int], when: IntArray) -> None:
        self.arrived[key] = when
        event = self.waiting.pop(key, None)
        if event is not None:
            event.succeed()

    def send(self, rank: int, kind: str, stage: int, microbatch: int, ready: IntArray) -> simpy.Event | None:
        """Hand the output of a stage to the next one, over the NIC where that is another rank.

        The event comes when the send has ended, with that moment for every member; None: nothing to wait for.
        """
        target_stage = stage + 1 if kind == "F" else stage - 1
        if not 0 <= target_stage <= self.last_stage:
            return None
        key = (kind, target_stage, microbatch)
        target = self.program.schedule.rank_of(target_stage, microbatch)
        if target == rank or self.send_ns == 0.0:
            self.deliver(key, ready)
            return None
        sent = self.env.event()
        label = f"{stage}{kind}{microbatch}"
        link_map = self.program.link_map
        slow = link_map.send_slowness(rank, target)
        alone = self.send_ns * (slow if isinstance(slow, float) else float(slow.max()))

        def launch(_: simpy.Event) -> None:
            begin = int(self.env.now)
            arrived = self.links.start(link_map.send(rank, target, self.program.costs.send_bytes), alone)

            def finish(_: simpy.Event) -> None:
                took = int(self.env.now) - begin
                self.sends.append(SendRecord(rank, target, label, begin, int(self.env.now)))
                if isinstance(slow, float):
                    when = ready + took
                else:  # each member's send ends with its own NICs
                    when = ready + np.rint(slow * (took / slow.max())).astype(np.int64)
                self.deliver(key, when)
                sent.succeed(when)

            assert arrived.callbacks is not None
            arrived.callbacks.append(finish)

        self.at(int(ready.max()), launch)
        return sent

    def at(self, when_ns: int, call: Callable[[simpy.Event], None]) -> None:
        timeout = self.env.timeout(max(0, when_ns - int(self.env.now)))
        assert timeout.callbacks is not None
        timeout.callbacks.append(call)

    # -- one pipeline rank ---------------------------------------------------------------------------

    def run_rank(self, rank: int) -> Process:
        free: IntArray = np.zeros(self.program.members, dtype=np.int64)
        for step in self.program.ranks[rank]:
            start = free
            for key in self._inputs(step):
                if key not in self.arrived:
                    event = self.waiting[key] = self.env.event()
                    yield event
                start = np.maximum(start, self.arrived.pop(key))
            record = StepRecord(step, start, start, start, [], [], [])
            yield from self._run_tasks(rank, step, record)
            self.records[rank].append(record)
            record.free = record.end
            sends = self._post(rank, step, record)
            if self.program.schedule.awaits_sends:
                for send in sends:
                    sent = yield send
                    record.free = np.maximum(record.free, sent)
            free = record.free

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
        env, link_map = self.env, self.program.link_map
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
                    demand = transfer.demand
                    if demand is None:
                        row = mb % len(transfer.load)
                        demand = link_map.transfer(
                            rank, task.phase, transfer.cost, transfer.load[row], transfer.node_load[row]
                        )
                    yield from transfer_on_links(demand, alone)
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

    def _post(self, rank: int, step: PlacedStep, record: StepRecord) -> list[simpy.Event]:
        """Sends of the outputs that leave at the end of an action: those of other ranks that take time."""
        code, micro, sends = step.code, step.microbatches, []
        if code.forward_out is None and code.kind in ("F", "F&B", "F&I"):
            sends.append(self.send(rank, "F", step.stages[0], micro[0], record.end))
        if code.backward_out is None and code.kind in ("B", "I", "F&B", "F&I"):
            sends.append(self.send(rank, "B", step.stages[1], micro[1], record.end))
        return [send for send in sends if send is not None]


def execute(program: Program) -> Execution:
    """Run one program to its end and return every start and end in integer nanoseconds.

    Raises RuntimeError as `execute_all` does.
    """
    return execute_all([program])[0]


def execute_all(programs: Sequence[Program]) -> list[Execution]:
    """Run the programs of all groups together and return what happened to each.

    Compute by docs/model.md, eq. E1, transfers behind their barrier by eq. E2, pipeline sends by eqs. E4, E7.
    All programs follow one schedule on the links of one cluster. Raises RuntimeError where ranks wait for
    each other forever (a validated schedule cannot).
    """
    env = simpy.Environment(initial_time=0)
    links = LinkPool(env, programs[0].link_map.capacity_bytes_per_ns)
    machines = [_Machine(program, env, links) for program in programs]
    processes = [
        (machine, rank, env.process(machine.run_rank(rank)))
        for machine in machines
        for rank in range(len(machine.program.ranks))
    ]
    with _collector_paused():
        env.run()
    stuck = [(machine, rank) for machine, rank, process in processes if process.is_alive]
    if stuck:
        waits = sorted(key for machine, _ in stuck for key in machine.waiting)[:4]
        ranks = sorted({rank for _, rank in stuck})
        raise RuntimeError(
            f"pipeline ranks {ranks} wait for {waits} for ever: the schedule is not executable"
        )
    syncs, end_ns = _synchronise(machines)
    return [
        Execution(
            machine.program,
            machine.records,
            syncs,
            machine.sends,
            end_ns,
            links.carried_bytes,
            sum(len(r.ends) for rank in machine.records for r in rank),
        )
        for machine in machines
    ]


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


def _synchronise(machines: list[_Machine]) -> tuple[list[SyncRecord], int]:
    """Gradient reduction, global norm, optimizer and parameter gather after the last action (eq. E5).

    A rank's reduction waits for every group of the ranks that hold the same parameters (the mirror rank of
    a bidirectional schedule); gradient clipping makes the norm a barrier of all ranks.
    """
    program = machines[0].program
    schedule, sync = program.schedule, program.costs.sync
    done = [max(_end(machine.records[r]) for machine in machines) for r in range(schedule.pp)]
    slow = [max(m.program.link_map.sync_slowness(r) for m in machines) for r in range(schedule.pp)]
    parts = [
        SyncParts(
            round(cost.reduce_s * slower * NS),
            round(cost.norm_s * NS),
            round(cost.optimizer_s * NS),
            round(cost.gather_s * slower * NS),
        )
        for cost, slower in zip(sync, slow, strict=True)
    ]
    ranks = [schedule.holders(r) for r in range(schedule.pp)]
    result = [
        SyncRecord(end, (t.ready, t.reduced), (t.meet, t.norm), (t.norm, t.updated), (t.updated, t.gathered))
        for end, t in zip(done, end_of_step(done, ranks, parts, max), strict=True)
    ]
    return result, max((s.gather[1] for s in result), default=0)


def _end(steps: list[StepRecord]) -> int:
    return int(steps[-1].free.max()) if steps else 0


def last_end(ranks: list[list[StepRecord]]) -> int:
    """When the last action of a group ended, nanoseconds."""
    return max(_end(steps) for steps in ranks)
