"""The compiled engine, equal to the SimPy engine to the nanosecond, and the choice between the two."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any

import numpy as np
from msgspec.structs import replace

from moesim.hwmodels.arrays import IntArray
from moesim.hwmodels.files import cache_folder
from moesim.simulator.common.bounded_cache import BoundedCache, Same
from moesim.simulator.engine.compiled.loader import (
    DAY_S,
    FOLDER,
    NAME,
    CannotCompileError,
    attempts,
    is_ready,
    native,
    numba_version,
    place,
    problem,
    warm,
)
from moesim.simulator.engine.compiled.lower import LoweredStep, RepeatedStep, StepRates, lower
from moesim.simulator.engine.compiled.state import (
    DONE,
    ERROR,
    SENDS,
    SIZES,
    STEP_LAYOUT,
    RunState,
    ShortArray,
    address_of,
    initial_room,
    new_state,
)
from moesim.simulator.engine.link_map import FoldedLinkMap
from moesim.simulator.engine.maxmin import CAPACITY_UNITS, MOST_LINKS_IN_STEPS
from moesim.simulator.engine.program import Program, action_table
from moesim.simulator.engine.records import (
    Barriers,
    BarrierWaits,
    Engine,
    Execution,
    RecordedTimes,
    SendRecord,
    ShortTimes,
    end_of_step,
    free_by_rank,
)
from moesim.simulator.engine.task_durations import use_for_phases

# -- runs ------------------------------------------------------------------------------------------

EVENTS_A_SLICE = 200_000
"""Events between two looks at whether the run was cancelled: some 20 to 100 ms."""


class CannotRunError(RuntimeError):
    """The compiled loop met a step that it does not run; the SimPy engine runs it or says what is wrong."""


def run_compiled(programs: Sequence[Program]) -> list[Execution]:
    """Run the programs of all groups together, with the records of the SimPy engine.

    Raises CannotRunError where a link has no bandwidth or ranks wait for each other forever.
    """
    lowered = _lowered(programs)
    state = _run(lowered)
    times = [_times(lowered, state, group) for group in range(len(programs))]
    sends = [SendTimes(lowered, state, group) for group in range(len(programs))]
    free = [free_by_rank(table, own) for table, own in zip(lowered.actions, times, strict=True)]
    syncs, end_ns = end_of_step(programs, free)
    return [
        Execution(program, table, own, syncs, sent, end_ns, state.link_bytes)
        for program, table, own, sent in zip(programs, lowered.actions, times, sends, strict=True)
    ]


_BEFORE: BoundedCache[list[RepeatedStep]] = BoundedCache(4)
"""Steps that ran before; empty for one that ran once, whose tables nobody needed again."""


def _lowered(programs: Sequence[Program]) -> LoweredStep:
    """The tables of programs, where only rates changed those of the same steps before."""
    program = programs[0]
    if len(programs) > 1 or not isinstance(program.link_map, FoldedLinkMap):
        return lower(programs, _few_links(program), CAPACITY_UNITS)
    table = action_table(program)
    parts = tuple([(Same(code.part.template), code.part.stages) for code in table.codes])
    key = Same(program.schedule), program.blocks, program.group, program.variation.seed, parts
    before = _BEFORE.find(key)
    if before is None:
        _BEFORE.put(key, [])
    elif before:
        found = before[0].at(StepRates(program.costs, program.variation, program.link_map))
        if found is not None:
            return replace(found, actions=(table,))
    else:
        before.append(repeated(program))
        return before[0].lowered
    return lower(programs, _few_links(program), CAPACITY_UNITS)


def _few_links(program: Program) -> bool:
    return len(program.link_map.capacity_bytes_per_ns) <= MOST_LINKS_IN_STEPS


def repeated(program: Program) -> RepeatedStep:
    """A program of folded resolution, to be run at other rates."""
    return RepeatedStep(program, _few_links(program), CAPACITY_UNITS)


def end_at(step: RepeatedStep, rates: StepRates) -> int | None:
    """Nanosecond at which a step ends at other rates; None where only the reference, or a program compiled
    for these rates, can say."""
    lowered = step.at(rates)
    if lowered is None:
        return None
    try:
        times = _times(lowered, _run(lowered), 0)
    except CannotRunError:
        return None
    program = replace(step.program, costs=rates.costs, link_map=rates.link_map)
    return end_of_step([program], [free_by_rank(lowered.actions[0], times)])[1]


def _run(lowered: LoweredStep) -> RunState:
    room = initial_room(lowered.sizes)
    while True:
        state = new_state(lowered.tables, lowered.sizes, room)
        table = STEP_LAYOUT.addresses(lowered.tables, state)
        code, address = native(), address_of(table)
        code.start(address)
        while code.advance(address, EVENTS_A_SLICE):
            pass
        error = int(state.counters[ERROR])
        if error == 0:
            break
        larger = room.more(error)
        if larger == room:
            raise CannotRunError("a transfer crosses a link without bandwidth")
        room = larger
    if not (state.process_state == DONE).all():
        raise CannotRunError("pipeline ranks wait for each other")
    return state


def _times(lowered: LoweredStep, state: RunState, group: int) -> RecordedTimes:
    """The times of one group, as views of the state's arrays."""
    tables, sizes = lowered.tables, lowered.sizes
    actions, tasks, ranks = sizes.actions, sizes.tasks, sizes.ranks
    first, last = tables.process_first[group * ranks], tables.process_first[(group + 1) * ranks]
    begin, end = tables.action_first_task[first], tables.action_first_task[last]
    short = len(state.ticks) > 0
    rows = state.clock if short else state.clock[tasks:]
    starts, ends, frees = (rows[n * actions : (n + 1) * actions] for n in range(3))
    task_ends: Any = state.clock[begin:end]
    if short:
        counts = np.diff(tables.action_first_task[first : last + 1])
        base = np.repeat(state.action_base[first:last], counts)
        task_ends = ShortTimes(partial(_ticks, lowered, state, group, begin, end), base, sizes.members)
    waits = None
    if sizes.wait_rows > 0:
        own = slice(*lowered.first_transfer[group : group + 2])
        waits = BarrierWaits(state.waits[own], state.held_up[group * ranks : (group + 1) * ranks])
    return RecordedTimes(
        starts[first:last],
        ends[first:last],
        frees[first:last],
        task_ends,
        state.begins[begin:end],
        state.finishes[begin:end],
        Barriers(state.last_member[begin:end], state.ready_total[begin:end]),
        waits,
    )


def _ticks(lowered: LoweredStep, state: RunState, group: int, begin: int, end: int) -> ShortArray:
    """The ends of a group's tasks as the run kept them, or worked out again from what it kept."""
    if state.sizes[SIZES.index("ring")] == 0:
        return state.ticks[begin:end]
    again = state._replace(ticks=np.empty((end - begin, lowered.sizes.members), dtype=np.int32))
    table = STEP_LAYOUT.addresses(lowered.tables, again)
    native().end_times(address_of(table), group)
    return again.ticks


class SendTimes(Sequence[SendRecord]):
    """The sends of one group in the order of their ends; a record is made when it is read."""

    def __init__(self, lowered: LoweredStep, state: RunState, group: int) -> None:
        """Keep what the records are made of."""
        ended: IntArray = state.key_order[: state.counters[SENDS]]
        sizes = lowered.sizes
        own = ended[ended // (2 * sizes.stages * sizes.microbatches) == group]
        self._keys, self._rank_of, self._sizes = own, lowered.tables.rank_of, sizes
        self._begin, self._end = state.key_begin[own], state.key_end[own]

    def __len__(self) -> int:
        """Number of sends."""
        return len(self._keys)

    def __getitem__(self, at):  # type: ignore[no-untyped-def]
        """The record at a position, or a list of records."""
        if isinstance(at, slice):
            return [self[n] for n in range(*at.indices(len(self)))]
        key, sizes, rank_of = int(self._keys[at]), self._sizes, self._rank_of
        stage, microbatch = key // sizes.microbatches % sizes.stages, key % sizes.microbatches
        forward = key // (sizes.stages * sizes.microbatches) % 2 == 0
        sender = stage - 1 if forward else stage + 1
        source, target = rank_of[sender, microbatch], rank_of[stage, microbatch]
        label = f"{sender}{'F' if forward else 'B'}{microbatch}"
        return SendRecord(int(source), int(target), label, int(self._begin[at]), int(self._end[at]))

    def __iter__(self) -> Iterator[SendRecord]:
        """All records."""
        return (self[n] for n in range(len(self)))


# -- engines ---------------------------------------------------------------------------------------


class CompiledEngine:
    """The events of the SimPy engine in the same order, as one compiled loop over arrays.

    What it does not run, the reference engine runs, and one line on stderr says so.
    """

    name = "compiled"

    def __init__(self, reference: Engine) -> None:
        """`reference`: the engine that runs what the compiled loop cannot."""
        self.reference = reference
        self.usable = True

    def execute(self, programs: Sequence[Program]) -> list[Execution]:
        """Run the programs, one a group; the records equal those of the reference to the nanosecond.

        Raises what the reference raises: RuntimeError where ranks wait for each other forever, InputError
        for a transfer over a link without bandwidth.
        """
        if not self.usable or not self.loads():
            return self.reference.execute(programs)
        try:
            return run_compiled(programs)
        except CannotRunError as reason:
            _say(f"the SimPy engine runs this step, because {reason}")
            return self.reference.execute(programs)

    def loads(self) -> bool:
        """Whether the compiled code is there or can be made; if not, one line says why."""
        try:
            if numba_version() is None:
                raise CannotCompileError(problem())
            _load()
        except CannotCompileError as reason:
            self.usable = False
            _say(f"the SimPy engine runs instead of the compiled one: {reason}")
        return self.usable


TASKS_BEFORE = 6_000
"""Tasks that a process runs on SimPy before it loads the compiled code, which takes as long as they do."""


class AutomaticEngine:
    """The compiled engine once its code is in the cache; until then SimPy, while another process compiles.

    A process that has little to run stays with SimPy, so no run is slower than it would be with SimPy alone.
    Which engine runs does not show in the records.
    """

    name = "auto"

    def __init__(self, compiled: Engine, reference: Engine) -> None:
        """The two engines to choose from."""
        self.compiled, self.reference = compiled, reference
        self.tasks = 0
        self.ready: bool | None = None

    def execute(self, programs: Sequence[Program]) -> list[Execution]:
        """Run the programs on the engine that is ready."""
        return (self.compiled if self.takes_compiled(programs) else self.reference).execute(programs)

    def takes_compiled(self, programs: Sequence[Program]) -> bool:
        """Whether the compiled engine is to run these programs, which count from now on."""
        ranks = (rank for program in programs for rank in program.ranks)
        self.tasks += sum(len(step.code.tasks) for rank in ranks for step in rank)
        return self.tasks > TASKS_BEFORE and self.is_ready()

    def is_ready(self) -> bool:
        """Whether the cache is ready; the first time that it is not, a process starts to fill it.

        Where none could, one line on stderr says so, once a day.
        """
        if not self.ready:
            first, self.ready = self.ready is None, is_ready()
            if first and not self.ready:
                start_in_background()
                reason = problem()
                if reason is not None and first_today():
                    _say(
                        "predictions run on the slower SimPy engine, with the same results, until this is "
                        f"mended: {reason} (`moesim doctor` says more; this line comes once a day)"
                    )
        return self.ready


@cache
def _load() -> None:
    """Before the first use in a process: make the code unless it is there, and use it for phases too."""
    warm()
    use_for_phases(native())


def start_in_background() -> None:
    """Start a process that compiles with low priority, unless one does so already or none could."""
    file = place()[0]
    with suppress(OSError):
        if problem() is None and file is not None and not attempts(file)[0]:
            quiet: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
            command = [sys.executable, "-P", "-m", "moesim.simulator.engine.compiled.loader"]
            subprocess.Popen(command, start_new_session=True, **quiet)


def first_today() -> bool:
    """Whether no process has given a notice for a day; it counts as given now.

    Where no time can be written down, every process may give it. Raises nothing.
    """
    with suppress(OSError, RuntimeError):
        stamp = (
            cache_folder(FOLDER, NAME) / "said"
        )  # also where code would not be safe: this file is never run
        with suppress(FileNotFoundError):
            if 0.0 <= time.time() - stamp.lstat().st_mtime < DAY_S:
                return False
        os.close(os.open(stamp, os.O_WRONLY | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600))
        os.utime(stamp)
    return True


@cache
def _say(line: str) -> None:
    sys.stderr.write(f"moesim: {line}\n")
