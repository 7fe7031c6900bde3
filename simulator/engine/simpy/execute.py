"""Runs programs in SimPy: every pipeline rank is a process, and transfers share links (`links.py`).

A pipeline rank's compute advances a vector of member clocks. A transfer is a barrier of its group: it starts
when the slowest member is ready, and is then a flow on the shared links. Groups have their own programs; they
affect each other on the links and at the end of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np
import simpy
from msgspec import Struct, field

from moesim.hwmodels.arrays import IntArray
from moesim.simulator.common.processes import without_cyclic_collection
from moesim.simulator.engine.program import NS, PlacedStep, Program, action_table
from moesim.simulator.engine.records import Execution, RecordedTimes, SendRecord, end_of_step, free_by_rank
from moesim.simulator.engine.simpy.links import LinkPool

Process = Generator[simpy.Event, Any, None]


class _ActionTimes(Struct):
    """An action and the times of its tasks so far, in the words of `RecordedTimes`."""

    step: PlacedStep
    start: IntArray
    end: IntArray
    ends: list[IntArray] = field(default_factory=list)
    begins: list[int] = field(default_factory=list)
    finishes: list[int] = field(default_factory=list)


class _GroupRun:
    """State of one group's run, with the inputs that arrived and the processes that wait for one."""

    def __init__(self, program: Program, env: simpy.Environment, links: LinkPool) -> None:
        self.program = program
        self.env, self.links = env, links
        self.arrived: dict[tuple[str, int, int], IntArray] = {}
        self.waiting: dict[tuple[str, int, int], simpy.Event] = {}
        self.table = action_table(program)
        self.times = RecordedTimes.empty(self.table, program.members)
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
        """Send the output of a stage to the next stage, over links where another rank holds it.

        The event succeeds at the end of the send, with each member's arrival in ns; None if nothing is sent.
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
        awaits, times, first_task = self.program.schedule.awaits(rank), self.times, self.table.first_task
        steps = zip(self.program.ranks[rank], awaits, strict=True)
        for action, (step, waits) in enumerate(steps, start=int(self.table.first_action[rank])):
            start = free
            for key in self._inputs(step):
                if key not in self.arrived:
                    event = self.waiting[key] = self.env.event()
                    yield event
                start = np.maximum(start, self.arrived.pop(key))
            record = _ActionTimes(step, start, start)
            sends = yield from self._run_tasks(rank, step, record)
            free, code, micro = record.end, step.code, step.microbatches
            tasks = slice(first_task[action], first_task[action + 1])
            times.start[action], times.end[action] = start, free
            times.ends[tasks] = np.reshape(record.ends, (-1, len(free)))  # an action may have no tasks
            times.begins[tasks], times.finishes[tasks] = record.begins, record.finishes
            if code.forward_out is None and code.kind in ("F", "F&B", "F&I"):
                sends.append(self.send(rank, "F", step.stages[0], micro[0], record.end))
            if code.backward_out is None and code.kind in ("B", "I", "F&B", "F&I"):
                sends.append(self.send(rank, "B", step.stages[1], micro[1], record.end))
            for send in sends if waits else ():
                if send is not None:
                    sent = yield send
                    free = np.maximum(free, sent)
            times.free[action] = free

    def _inputs(self, step: PlacedStep) -> list[tuple[str, int, int]]:
        keys = []
        (forward, backward), (fmb, bmb) = step.stages, step.microbatches
        if forward > 0:
            keys.append(("F", forward, fmb))
        if 0 <= backward < self.last_stage and step.code.kind != "W":
            keys.append(("B", backward, bmb))
        return keys

    def _run_tasks(
        self, rank: int, step: PlacedStep, record: _ActionTimes
    ) -> Generator[simpy.Event, Any, list[simpy.Event | None]]:
        """Run the tasks of an action; return the sends that left inside it."""
        left: list[simpy.Event | None] = []
        code = step.code
        ends, begins, finishes = record.ends, record.begins, record.finishes
        maximum = np.maximum
        compute = communication = record.start
        beside: dict[int, simpy.Event] = {}  # collectives of the sharding stream, which other tasks may await
        last: simpy.Event | None = None
        for number, task in enumerate(code.tasks):
            own = task.transfer is not None and task.stream == "sharding"
            end = record.start if own else compute if task.transfer is None else communication
            for dep in task.deps:
                if dep in beside and not beside[dep].processed:
                    yield beside[dep]
                if ends[dep] is not end:
                    end = maximum(end, ends[dep])
            end = end + task.rows_ns[step.microbatches[task.side]]
            begins.append(-1)
            finishes.append(-1)
            ends.append(end)
            if own:
                last = beside[number] = self.env.process(self._beside(rank, number, record, last))
            elif task.transfer is None:
                compute = end
            else:
                yield from self._transfer(rank, number, record)
                communication = ends[number]
            if number == code.forward_out:
                left.append(self.send(rank, "F", step.stages[0], step.microbatches[0], ends[number]))
            if number == code.backward_out:
                left.append(self.send(rank, "B", step.stages[1], step.microbatches[1], ends[number]))
        record.end = compute if compute is communication else maximum(compute, communication)
        for number, collective in beside.items():
            if not collective.processed:
                yield collective
            record.end = maximum(record.end, ends[number])
        return left

    def _beside(self, rank: int, number: int, record: _ActionTimes, before: simpy.Event | None) -> Process:
        """Run a collective of the sharding stream after the one before it, beside the rank's other work."""
        if before is not None:
            if not before.processed:
                yield before
            previous = record.step.code.before[number]
            assert previous is not None
            record.ends[number] = np.maximum(record.ends[number], record.ends[previous])
        yield from self._transfer(rank, number, record)

    def _transfer(self, rank: int, number: int, record: _ActionTimes) -> Process:
        """Run a transfer whose inputs are ready at `record.ends[number]`, and write down its times.

        All members wait for the slowest one, then the payload starts.
        """
        env, link_map, task = self.env, self.program.link_map, record.step.code.tasks[number]
        transfer, mb = task.transfer, record.step.microbatches[task.side]
        assert transfer is not None
        meet = record.begins[number] = int(record.ends[number].max())
        launch = meet + transfer.launch_ns
        if launch > env.now:
            yield env.timeout(launch - int(env.now))
        begin = int(env.now)
        alone = transfer.payload_ns.item(mb)
        if alone > 0.0:  # a group of one has nothing to move
            demand = transfer.demand
            if demand is None:
                row = mb % len(transfer.load)
                demand = link_map.transfer(
                    rank, task.phase, transfer.cost, transfer.load[row], transfer.node_load[row]
                )
            yield from self.links.transfer(demand, alone)
        finish = record.finishes[number] = int(env.now)
        end = transfer.member_row_ns(mb)
        if finish - begin != round(alone):  # other flows shared its links: stretch every member alike
            end = np.rint(end * ((finish - begin) / alone)).astype(np.int64)
        record.ends[number] = end + begin


class SimpyEngine:
    """The engine in SimPy: discrete events, with max-min fair rates on shared links."""

    name = "simpy"

    def execute(self, programs: Sequence[Program]) -> list[Execution]:
        """Run the programs of all groups together and return what happened to each.

        Compute follows docs/model.md, eq. E1, transfers with their barrier eq. E2, and pipeline sends eqs. E4
        and E7. Raises RuntimeError where ranks wait for each other forever, which a validated schedule
        cannot cause.
        """
        codes = {id(step.code): step.code for program in programs for rank in program.ranks for step in rank}
        kept = [task.rows_ns for code in codes.values() for task in code.tasks]  # until the last is read
        env = simpy.Environment(initial_time=0)
        links = LinkPool(env, programs[0].link_map.capacity_bytes_per_ns)
        groups = [_GroupRun(program, env, links) for program in programs]
        processes = [
            (group, rank, env.process(group.run_rank(rank)))
            for group in groups
            for rank in range(len(group.program.ranks))
        ]
        with without_cyclic_collection():
            env.run()
        del kept
        stuck = [(group, rank) for group, rank, process in processes if process.is_alive]
        if stuck:
            waits = sorted(key for group, _ in stuck for key in group.waiting)[:4]
            ranks = sorted({rank for _, rank in stuck})
            raise RuntimeError(
                f"pipeline ranks {ranks} wait for {waits} for ever: the schedule is not executable"
            )
        syncs, end_ns = end_of_step(programs, [free_by_rank(group.table, group.times) for group in groups])
        carried = links.carried_bytes
        return [
            Execution(group.program, group.table, group.times, syncs, group.sends, end_ns, carried)
            for group in groups
        ]
