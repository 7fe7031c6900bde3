"""Costs of the end of a step, computed once for all plans of a search that share them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from moesim.simulator.cost.end_of_step import rank_step_end
from moesim.simulator.cost.pricing import Pricer
from moesim.simulator.cost.table import SyncCost
from moesim.simulator.layout.in_flight import RankChunks, chunks_by_rank
from moesim.simulator.layout.stages import StageAssignment
from moesim.simulator.planner.pattern import Pattern

Key = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class StepEndPrices:
    """The ends of steps by what a plan shares with others, its pattern and its stages."""

    _syncs: dict[Key, tuple[SyncCost, ...]] = field(default_factory=dict)
    _by_rank: dict[Key, dict[RankChunks, SyncCost]] = field(default_factory=dict)
    _held: dict[Key, list[RankChunks]] = field(default_factory=dict)
    _by_id: dict[Key, tuple[Pattern, StageAssignment, tuple[SyncCost, ...]]] = field(default_factory=dict)
    """Ends of the step by the ids of pattern and stages, which the entries keep alive."""

    def of(
        self,
        shared: Key,
        shape: Pattern,
        layers: tuple[int, ...],
        stages: StageAssignment,
        pricer_of: Callable[[], Pricer],
    ) -> tuple[SyncCost, ...]:
        """Costs on every pipeline rank; `shared`: all that decides them but schedule and stages.

        `layers`: those of `stages`, counted once for many plans.
        """
        by_id = (shared, id(shape), id(stages))
        known_by_id = self._by_id.get(by_id)
        if known_by_id is not None:
            return known_by_id[2]
        schedule = shape.samples[0]
        key = (shared, schedule.routes, layers)
        found = self._syncs.get(key)
        if found is None:
            place = (schedule.routes, layers)
            held = self._held.get(place)
            pricer: Pricer | None = None
            if held is None:
                pricer = pricer_of()
                by_place = pricer.scenario.software.buckets_by_chunk
                held = self._held[place] = chunks_by_rank(schedule, stages, by_place=by_place)
            known = self._by_rank.setdefault(shared, {})
            missing = [kinds for kinds in dict.fromkeys(held) if kinds not in known]
            if missing:
                pricer = pricer or pricer_of()
                known |= {kinds: rank_step_end(pricer, kinds, schedule) for kinds in missing}
            found = self._syncs[key] = tuple(known[kinds] for kinds in held)
        self._by_id[by_id] = shape, stages, found
        return found
