"""Operators and their prices, kept for the plans of a search that split and compute a layer alike."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from moesim.simulator.common.bounded_cache import BoundedCache
from moesim.simulator.cost.phase_memo import PhaseKey, PhaseMemo
from moesim.simulator.cost.pricing import Operators, Pricer
from moesim.simulator.cost.table import PhaseCost
from moesim.simulator.layout.job import ResolvedJob
from moesim.simulator.model.operator import BlockKind

T = TypeVar("T")

MOST_KEPT = 512
"""Most ways to split and compute a layer that are kept; each takes some tens of kilobytes."""


@dataclass(frozen=True, slots=True)
class _Kept:
    operators: dict[BlockKind, Operators] = field(default_factory=dict)
    alone: PhaseMemo = field(default_factory=PhaseMemo)
    beside: dict[int, PhaseMemo] = field(default_factory=dict)
    """Prices beside communication SMs, by their number."""


@dataclass(frozen=True, slots=True)
class SharedOperators:
    """What the pricers of one model, cluster and profile share, by a key of all else that they depend on."""

    _kept: BoundedCache[_Kept] = field(default_factory=lambda: BoundedCache(MOST_KEPT))
    _made: dict[tuple[object, ...], tuple[list[PhaseCost], Any]] = field(default_factory=dict)
    """Values by the ids of the prices that they were made from, which the entries keep alive."""

    def pricer(self, job: ResolvedJob, key: Hashable) -> Pricer:
        """The pricer of a job with what is kept for its key; `key` need not name the communication SMs."""
        kept = self._kept.get(key, _Kept)
        sms = job.scenario.communication.sms
        return Pricer(job, kept.operators, kept.alone, kept.beside.setdefault(sms, PhaseMemo()))

    def once(
        self, kind: BlockKind, compute: Mapping[PhaseKey, PhaseCost], about: object, make: Callable[[], T]
    ) -> T:
        """What `make` makes of one block's prices, the same for all plans that share the prices themselves.

        `about`: what else it depends on.
        """
        own = [cost for (k, _, _), cost in compute.items() if k == kind]
        key = (about, *map(id, own))
        if key not in self._made:
            self._made[key] = own, make()
        found: T = self._made[key][1]
        return found
