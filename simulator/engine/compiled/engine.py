"""The compiled engine, and the choice between it and the SimPy engine."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache

from moesim.simulator.engine.compiled.cache import cache_folder, first_today, is_ready, numba_version
from moesim.simulator.engine.compiled.native import CannotCompileError, native
from moesim.simulator.engine.compiled.warm import problem, start_in_background, warm_once
from moesim.simulator.engine.program import Program
from moesim.simulator.engine.protocol import Engine
from moesim.simulator.engine.records import Execution


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
        if not self.usable or not self._loads():
            return self.reference.execute(programs)
        from moesim.simulator.engine.compiled.execute import CannotRunError, run_compiled

        try:
            return run_compiled(programs)
        except CannotRunError as reason:
            _say(f"the SimPy engine runs this step, because {reason}")
            return self.reference.execute(programs)

    def _loads(self) -> bool:
        """Whether the compiled code is there or can be made; if not, one line says why."""
        try:
            if numba_version() is None:
                raise CannotCompileError(problem())
            warm_once()
            native()
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
        ranks = (rank for program in programs for rank in program.ranks)
        self.tasks += sum(len(step.code.tasks) for rank in ranks for step in rank)
        use_compiled = self.tasks > TASKS_BEFORE and self._is_ready()
        return (self.compiled if use_compiled else self.reference).execute(programs)

    def _is_ready(self) -> bool:
        """Whether the cache is ready; the first time that it is not, a process starts to fill it.

        Where none could, one line on stderr says so, once a day.
        """
        if not self.ready:
            first, self.ready = self.ready is None, is_ready(cache_folder())
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
def _say(line: str) -> None:
    sys.stderr.write(f"moesim: {line}\n")
