"""From a scenario with a fleet to one program: every pipeline rank priced on the pool that holds it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from moesim.hwmodels.errors import InputError
from moesim.simulator.cost.pricing import Pricer
from moesim.simulator.engine.link_map import FoldedLinkMap
from moesim.simulator.engine.program import Program
from moesim.simulator.layout.in_flight import rank_stages
from moesim.simulator.layout.job import resolve
from moesim.simulator.layout.parallel import Layout, microbatches
from moesim.simulator.layout.pools import PoolSlice, check_schedule, owners_of, spread
from moesim.simulator.layout.stages import StageAssignment, blocks_of
from moesim.simulator.predict.compile import Prepared, load_schedule, prepare
from moesim.simulator.predict.fleet_balance import FleetMemory, balanced_over_pools
from moesim.simulator.predict.placement import block_seconds
from moesim.simulator.scenario import Scenario
from moesim.simulator.schedules import Schedule


@dataclass(frozen=True, slots=True)
class PreparedFleet:
    """A scenario with a fleet, resolved, before any time is simulated.

    `prepared[p]`: as if the whole pipeline ran on pool p; `program`: every rank's steps from its own pool.
    """

    scenario: Scenario
    parts: tuple[PoolSlice, ...]
    prepared: tuple[Prepared, ...]
    program: Program

    @property
    def n_gpus(self) -> int:
        """GPUs of all pools."""
        return sum(part.cluster.n_gpus for part in self.parts)


def prepare_fleet(scenario: Scenario) -> PreparedFleet:
    """Spread the pipeline over the pools, balance the layers where none are given, price and compile.

    Raises InputError, naming the pool, for anything that does not fit together.
    """
    parts = spread(scenario)
    first = parts[0].scenario
    layout = Layout(first.parallel, first.machine.n_gpus, first.machine.node.n_gpus)
    schedule = load_schedule(first, microbatches(layout, first.batch.sequences))
    check_schedule(schedule, owners_of(parts), [part.label for part in parts])
    stages = None if scenario.stages.layers is not None else _balanced(parts, schedule)
    prepared = []
    for part in parts:
        try:
            prepared.append(prepare(part.scenario, stages=stages))
        except InputError as error:
            raise _named(error, part) from None
    return PreparedFleet(scenario, parts, tuple(prepared), _joined(parts, [p.program for p in prepared]))


def _named(error: InputError, part: PoolSlice) -> InputError:
    own = {"communication.sms": " (communication_sms of the pool)", "profile": " (profile of the pool)"}
    text = f"{part.label}: {error}{own.get(error.key or '', '')}"
    return InputError(text, key=error.key, nearest=error.nearest)


def _balanced(parts: Sequence[PoolSlice], schedule: Schedule) -> StageAssignment:
    """Layers of each stage so that the slowest is as fast as it can be, each on its own pool."""
    seconds, owners = [], owners_of(parts)
    shape = parts[0].scenario.shape
    for part in parts:
        try:
            pricer = Pricer(resolve(part.scenario))
            seconds.append({b: block_seconds(pricer, b) for b in {block.kind for block in blocks_of(shape)}})
        except InputError as error:
            raise _named(error, part) from None
    memory = FleetMemory(shape, parts, rank_stages(schedule), schedule.microbatches)
    return balanced_over_pools(seconds, [owners[rank] for rank in schedule.routes[0]], memory)[0]


def _joined(parts: Sequence[PoolSlice], programs: Sequence[Program]) -> Program:
    """Every rank's steps, links and end of the step from the program of its pool."""
    owners = [programs[number] for number in owners_of(parts)]
    across = any(program.costs.send_across_nodes for program in programs)
    return replace(
        programs[0],
        ranks=tuple(program.ranks[rank] for rank, program in enumerate(owners)),
        link_map=FoldedLinkMap.joined([program.link_map for program in owners], across),
        costs=replace(
            programs[0].costs,
            sync=tuple(program.costs.sync[rank] for rank, program in enumerate(owners)),
            send_s=max(program.costs.send_s for program in programs),
            send_across_nodes=across,
        ),
    )
