"""What every cause costs a step: one engine run for each cause, with that cause alone switched off."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moesim.hwmodels.frozen import Frozen
from moesim.simulator.common.tables import Row, TableResult
from moesim.simulator.engine.compilation import compile_program
from moesim.simulator.engine.program import PricedSchedule, Program
from moesim.simulator.engine.records import step_time_s
from moesim.simulator.predict.fleet_compile import joined_program
from moesim.simulator.predict.prepared import Prepared, PreparedPool
from moesim.simulator.studies.switched_off import CAUSES, SwitchableCause

Say = Callable[[int, int, str], None]
"""Called before every run with (number of the run, most runs, name of the cause)."""

ALL_CAUSES = "all of them"


class Counterfactual(Frozen):
    """A cause, the seconds of the step without it, and the seconds and share of the step that it costs.

    `cost_s` is negative where the step is slower without the cause.
    """

    cause: str
    without_s: float
    cost_s: float
    share: float


class Counterfactuals(TableResult):
    """The runs of a step with one cause switched off each, and the run with all of them switched off."""

    step_s: float
    causes: tuple[Counterfactual, ...]
    """The causes that the step has, the most expensive first."""
    together: Counterfactual
    """All of them switched off."""

    @property
    def sentence(self) -> str:
        """Says that the costs of the causes do not add up, and what they cost together."""
        added = sum(row.cost_s for row in self.causes)
        return (
            f"The causes overlap, so their costs do not add up: one by one they sum to {added:.3f} s, "
            f"switched off together they save {self.together.cost_s:.3f} s; the other "
            f"{self.together.without_s:.3f} s are the longest path through the remaining compute."
        )

    def rows(self) -> list[Row]:
        """One row for each cause, and one for all of them together."""
        return [row.model_dump() for row in (*self.causes, self.together)]

    def __str__(self) -> str:
        """The causes that cost at least one per mille of the step, all of them together, and the sentence."""
        shown = [*(row for row in self.causes if abs(row.share) >= 0.001), self.together]
        lines = [f"the step without a cause, and what the cause costs ({self.step_s:.3f} s with all of them)"]
        lines += [f"{r.cause:42s} {r.without_s:8.3f} s  {r.cost_s:8.3f} s  {r.share:6.1%}" for r in shown]
        return "\n".join([*lines, self.sentence])


def counterfactuals(
    prepared: Prepared, step_s: float, say: Say = lambda number, most, cause: None
) -> Counterfactuals:
    """Run a prepared step once without each cause that it has, and once without all of them (eq. T3).

    `step_s`: seconds of the step with all causes. The programs are compiled anew with the same draws; the
    prices of all other work stay. Faults stay in all runs (`predict.fault_effects` switches them off).
    """
    rows, present = [], []
    for number, cause in enumerate(CAUSES):
        programs = _programs(prepared, (cause,))
        if programs:
            say(number, len(CAUSES) + 1, cause.name)
            present.append(cause)
            rows.append(_row(prepared, step_s, cause.name, programs))
    say(len(CAUSES), len(CAUSES) + 1, ALL_CAUSES)
    everything = _programs(prepared, present) or prepared.programs
    return Counterfactuals(
        step_s=step_s,
        causes=tuple(sorted(rows, key=lambda row: (-row.cost_s, row.cause))),
        together=_row(prepared, step_s, ALL_CAUSES, everything),
    )


def _row(prepared: Prepared, step_s: float, name: str, programs: Sequence[Program]) -> Counterfactual:
    without_s = step_time_s(prepared.engine.execute(programs))
    cost_s = step_s - without_s
    return Counterfactual(cause=name, without_s=without_s, cost_s=cost_s, share=cost_s / step_s)


def _programs(prepared: Prepared, causes: Sequence[SwitchableCause]) -> tuple[Program, ...]:
    """The programs without some causes; no program where the step has none of them."""
    pools = [_of_pool(pool, causes) for pool in prepared.pools]
    if not any(changed for _, changed in pools):
        return ()
    if not prepared.of_fleet:
        return pools[0][0]
    parts = zip(prepared.pools, pools, strict=True)
    return (joined_program([(pool.part, programs[0]) for pool, (programs, _) in parts]),)


def _of_pool(pool: PreparedPool, causes: Sequence[SwitchableCause]) -> tuple[tuple[Program, ...], bool]:
    """The programs of a pool without some causes, and whether they differ from those with them."""
    before = pool.programs[0].costs
    costs = before
    for cause in causes:
        costs = cause.costs(pool, costs)
    order = pool.scenario.communication.order_of(pool.scenario.schedule)
    programs = []
    for program in pool.programs:
        variation, link_map = program.variation, program.link_map
        for cause in causes:
            variation = cause.variation(pool, program, variation)
            link_map = cause.links(pool, link_map)
        if costs is before and variation is program.variation and link_map is program.link_map:
            programs.append(program)
            continue
        priced = PricedSchedule(program.schedule, program.blocks, costs, order)
        programs.append(compile_program(priced, variation, link_map, program.group))
    return tuple(programs), any(a is not b for a, b in zip(programs, pool.programs, strict=True))
