"""The protocol of an engine, which runs programs and returns executions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from moesim.simulator.engine.program import Program
from moesim.simulator.engine.records import Execution


class Engine(Protocol):
    """Runs the programs of all groups of a step together.

    An engine decides how tasks, transfers and sends share the cluster's links; the program states their
    durations and order. Everything that reads an execution relies on these promises:

    - The executions come in the order of the programs, and each has a record for every placed step, in the
      order of its pipeline rank. The tasks of a step start in template order, each on its stream (compute or
      communication), after the tasks that it depends on (docs/model.md, eq. E1).
    - A transfer is a barrier: `begins` is when its last member was ready, and no member has its payload
      before `begins` + launch + its own payload alone on its links (eq. E2).
    - A step starts when its rank is free and its activation and gradient have arrived (eqs. E4 and E7).
    - `syncs`, `end_ns` and `carried_bytes` are the same in all executions; `end_of_step` computes the first
      two from the records.
    - Equal programs give equal executions.

    With links that are never full, every engine returns the longest path through the tasks
    (docs/model.md, section "Engine"); the tests hold each registered engine to that.
    """

    @property
    def name(self) -> str:
        """Name of the engine in `ENGINES`."""

    def execute(self, programs: Sequence[Program]) -> list[Execution]:
        """Run the programs, one a group, and return what happened to each.

        All programs follow one schedule on the links of one cluster. Raises RuntimeError where ranks wait
        for each other forever, which a validated schedule cannot cause.
        """
