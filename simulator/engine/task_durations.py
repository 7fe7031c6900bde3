"""Durations of tasks for all micro-batches and members of a group, computed once and shared by scenarios.

Every array is read-only and a pure function of its key: random draws by their seed, factors of a phase by
draws and spreads, nanoseconds by factors, loads and price.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cached_property
from typing import Any, NamedTuple, get_args

import numpy as np
from msgspec import Struct

from moesim.hwmodels.arrays import FloatArray, IntArray
from moesim.simulator.common.bounded_cache import ENTRY_BYTES, BoundedCache, array_key, digest, read_only
from moesim.simulator.cost.formulas import compute_seconds, payload_seconds
from moesim.simulator.cost.table import PhaseCost, TransferCost
from moesim.simulator.engine.link_map import LinkMap
from moesim.simulator.engine.program import (
    LONGEST_PHASE_S,
    NO_FORMULA,
    NS,
    Formula,
    MemberVariation,
    PhaseRows,
    SingleArray,
    TransferRows,
    slowest_draws,
    whole_ns,
)
from moesim.simulator.engine.task_table import most_loaded
from moesim.simulator.model.operator import Phase
from moesim.simulator.schedules import Schedule

LOAD_TOLERANCE = 1e-9
"""Mean rows of the members that are below 1 by less than this count as complete."""

Rows = tuple[IntArray, dict[Hashable, IntArray]]
"""Nanoseconds [micro-batches, members] of a compute phase, and figures that were computed with them."""
Payload = tuple[FloatArray, IntArray | None]
"""Nanoseconds of a payload: the slowest member's for every micro-batch, and each member's unless they follow
from the loads."""

_TOKENS: BoundedCache[object] = BoundedCache(50_000)
"""An object for every long key, so that the keys made from it are short."""
_DRAWS: BoundedCache[SingleArray] = BoundedCache(32_000_000, lambda draws: draws.nbytes)
_FACTORS: BoundedCache[FloatArray] = BoundedCache(64_000_000, lambda factor: factor.nbytes)
_PHASES: BoundedCache[PhaseRows] = BoundedCache(128_000_000, lambda phase: phase.nbytes + 2 * ENTRY_BYTES)
"""Phases by all that their durations depend on, limited by the bytes that these take where they are read."""
_ROWS: BoundedCache[Rows] = BoundedCache(128_000_000, lambda rows: rows[0].nbytes + ENTRY_BYTES)
_PAYLOADS: BoundedCache[Payload] = BoundedCache(
    32_000_000, lambda own: own[0].nbytes + (0 if own[1] is None else own[1].nbytes) + ENTRY_BYTES
)


MOST_DEVIATIONS = 40.0
"""No 32-bit normal draw is so many standard deviations from its mean."""


def _no_compute(shape: tuple[int, int]) -> PhaseRows:
    none = read_only(np.zeros(shape, np.int64))
    return PhaseRows.of(none)


class LoadFacts(NamedTuple):
    """Facts of the loads of a variation."""

    key: object
    """Stands for the loads in other keys, which so do not keep their arrays alive."""
    bytes: int
    least: float
    most: float
    dropping: frozenset[int]
    """Routed blocks whose transfers send fewer bytes than under even load, because capacity dropped rows."""


_LOADS: BoundedCache[LoadFacts] = BoundedCache(48_000_000, lambda loads: loads.bytes + 1000)

_PHASE_NUMBER: dict[Phase, int] = {phase: number for number, phase in enumerate(get_args(Phase))}
"""Part of the seed of a phase's run-to-run noise."""


class CompiledPhases(Struct, frozen=True):
    """The same durations as `TaskDurations` computes with NumPy, by compiled code, which is faster."""

    native: Any
    """The compiled functions `fill_rows` and `fill_figures`, which take addresses."""

    def phase_rows(self, formula: Formula, shape: tuple[int, int]) -> tuple[IntArray, IntArray, IntArray]:
        """Nanoseconds [micro-batches, members] of a phase, and their largest and sum by micro-batch."""
        microbatches, members = shape
        rows, figures = np.empty(shape, np.int64), np.empty((2, microbatches), np.int64)
        self.native.fill_rows(*formula, microbatches, members, _address(rows), _address(figures))
        return rows, figures[0], figures[1]

    def sums(
        self,
        phases: Sequence[PhaseRows],
        bounds: tuple[IntArray, IntArray],
        rank: IntArray,
        weights: FloatArray,
        sums: FloatArray,
    ) -> None:
        """Add what `weighted_sums_ns` adds for phases with formulas; `bounds`: first use and end of each."""
        formulas = [phase.formula or NO_FORMULA for phase in phases]
        numbers = np.array([(f.fixed_s, f.row_s, f.cv) for f in formulas])
        places = np.array([f[2:5] for f in formulas], dtype=np.int64)
        figures = np.empty((len(phases), 3, weights.shape[1]), np.int64)
        row = np.empty(sums.shape[1], np.int64)
        known = np.array([phase.has_figures for phase in phases], dtype=np.int64)
        arrays = numbers, places, known, figures, *bounds, rank, weights, sums, row
        at = [_address(array) for array in arrays]
        self.native.fill_figures(len(phases), *at[:3], weights.shape[1], sums.shape[1], *at[3:])
        for number in np.flatnonzero(known == 0).tolist():
            phases[number].keep(figures[number].copy())


def weighted_sums_ns(
    phases: Sequence[PhaseRows], first_use: IntArray, rank: IntArray, weights: FloatArray, sums: FloatArray
) -> None:
    """Add nanoseconds of phases, weighted by micro-batch, to the sums by rank [ranks, members] in any order.

    Uses `first_use[p]` to `first_use[p + 1]` of phase p add their `weights` [uses, micro-batches] to the row
    `rank` [uses]. Compiled code keeps the figures of the phases too.
    """
    usual = [n for n, phase in enumerate(phases) if _faster is not None and phase.formula is not None]
    if _faster is not None and usual:
        bounds = first_use[usual], first_use[1:][usual]
        _faster.sums([phases[n] for n in usual], bounds, rank, weights, sums)
    for number in sorted({*range(len(phases))} - {*usual}):
        uses = slice(first_use[number], first_use[number + 1])
        if weights[uses].any():
            np.add.at(sums, rank[uses], weights[uses] @ phases[number].ns)


def _address(array: np.ndarray[Any, Any]) -> int:
    """Where an array begins."""
    return int(array.__array_interface__["data"][0])


_faster: CompiledPhases | None = None


def use_for_phases(native: Any) -> None:
    """Compute durations by compiled code from now on; their values stay the same."""
    global _faster
    _faster = CompiledPhases(native)


class TaskDurations:
    """Durations of the tasks of one group: `variation` at the ranks of a schedule, on the links of a map."""

    def __init__(
        self, schedule: Schedule, stages: int, variation: MemberVariation, link_map: LinkMap, group: int
    ) -> None:
        """`stages`: number of stages; `group`: part of the seed of run-to-run noise."""
        self.schedule, self.variation, self.link_map, self.group = schedule, variation, link_map, group
        self.shape = (schedule.microbatches, variation.clock.shape[1])
        self._even = read_only(np.ones((1, self.shape[1])))
        self._slowest_clock = float(variation.clock.max(initial=0.0))
        self.loads = load_facts(variation)
        self.stage_tokens = self._tokens(stages)
        self._clocks: dict[int, FloatArray] = {}
        self._of_blocks: dict[int, tuple[TransferCost, FloatArray | None]] = {}
        self._loads: dict[int | None, tuple[FloatArray, FloatArray]] = {None: (self._even, self._even)}
        self._transfers: dict[tuple[int | None, int, object], TransferRows] = {}

    def _tokens(self, stages: int) -> list[object]:
        """Stand for all that the factors of the phases of each stage depend on, besides block and phase."""
        v, cv = self.variation, self.variation.jitter_cv
        shared = (
            (self.group, self.schedule.routes, self.shape, v.seed, v.stands_for, v.in_step),
            digest(v.clock),
            cv if isinstance(cv, float) else digest(cv),
        )
        return [_TOKENS.get((stage, shared), object) for stage in range(stages)]

    # -- compute ---------------------------------------------------------------------------------------

    def rows(self, place: tuple[int, int, Phase], price: PhaseCost, routed: int | None) -> PhaseRows:
        """A compute phase at a price.

        `place`: stage, block and phase; `routed`: number of the block among those with routed experts.
        """
        fixed_s, row_s = price.fixed_s, price.row_s
        if fixed_s == row_s == 0.0:
            return _PHASES.get(("no compute", self.shape), lambda: _no_compute(self.shape))
        number = routed if row_s else None
        load_key = None if number is None else (self.loads.key, number)
        key = (self.stage_tokens[place[0]], place[1], place[2], load_key, fixed_s, row_s)
        return _PHASES.get(key, lambda: self._phase(key, place, price, number))

    def _phase(
        self, key: Hashable, place: tuple[int, int, Phase], price: PhaseCost, number: int | None
    ) -> PhaseRows:
        """A phase whose durations are worked out when they are read, or now if they may be unusual."""
        fixed_s, row_s, v = price.fixed_s, price.row_s, self.variation
        arrays: tuple[FloatArray | SingleArray | None, ...]
        load, cv = None if number is None else v.loads[number], v.jitter_cv
        formula, arrays = None, (load,)
        if isinstance(cv, float) and min(fixed_s, row_s, self.loads.least) >= 0.0:
            rows = 1.0 if load is None else self.loads.most
            longest_s = (fixed_s + row_s * rows) * (1.0 + MOST_DEVIATIONS * cv) * self._slowest_clock
            if longest_s * self.shape[1] <= LONGEST_PHASE_S and (load is None or load.flags.c_contiguous):
                arrays = load, *self._noise(place)
                places = [0 if array is None else _address(array) for array in arrays]
                formula = Formula(fixed_s, row_s, places[0], places[1], places[2], cv)
        phase = PhaseRows(
            self.shape,
            lambda: _ROWS.get(key, lambda: self._rows(place, load, formula, price)),
            formula,
            arrays,
        )
        if formula is None:
            assert phase.ns.size  # which raises the error of a duration that is none
        return phase

    def _rows(
        self,
        place: tuple[int, int, Phase],
        load: FloatArray | None,
        formula: Formula | None,
        price: PhaseCost,
    ) -> Rows:
        """Eq. E1 with the factors of the members, rounded to nanoseconds."""
        if _faster is not None and formula is not None:
            rows_ns, slowest, total = _faster.phase_rows(formula, self.shape)
            return read_only(rows_ns), {"slowest": slowest, "total": total}
        fixed_s, row_s = price.fixed_s, price.row_s
        factor = self._factor(place) if fixed_s + row_s > 0.0 else 1.0
        seconds = compute_seconds(fixed_s, row_s, 1.0 if load is None else load) * factor
        return read_only(whole_ns(np.array(np.broadcast_to(seconds, self.shape)))), {}

    def _factor(self, place: tuple[int, int, Phase]) -> FloatArray:
        """Time of a phase over that on a usual GPU in a usual run [micro-batches, members], at least 0."""
        key = (self.stage_tokens[place[0]], place[1], place[2])
        return _FACTORS.get(key, lambda: read_only(self._new_factor(place)))

    def _ranks(self, stage: int) -> list[int]:
        """Rank of each micro-batch: a stage of a bidirectional schedule runs on one for every direction."""
        return [self.schedule.rank_of(stage, m) for m in range(self.shape[0])]

    def _noise(self, place: tuple[int, int, Phase]) -> tuple[SingleArray | None, FloatArray]:
        """(draws of run-to-run noise or None, time factors) [micro-batches, members] of a phase."""
        stage = place[0]
        if stage not in self._clocks:
            self._clocks[stage] = read_only(self.variation.clock[self._ranks(stage)])
        cv = self.variation.jitter_cv
        if isinstance(cv, float) and cv == 0.0:
            return None, self._clocks[stage]
        entropy = (self.variation.seed, stage, place[1], _PHASE_NUMBER[place[2]])
        draws = self._draws((*entropy, self.group) if self.group else entropy)
        return draws, self._clocks[stage]

    def _new_factor(self, place: tuple[int, int, Phase]) -> FloatArray:
        """Clock of each member times run-to-run noise, drawn once a micro-batch and member for all modes."""
        (draws, clock), cv = self._noise(place), self.variation.jitter_cv
        if draws is None:
            return clock.copy()
        noise = draws.astype(np.float64)
        noise *= cv if isinstance(cv, float) else cv[self._ranks(place[0])]
        noise += 1.0
        np.maximum(noise, 0.0, out=noise)
        noise *= clock
        return noise

    def _draws(self, entropy: tuple[int, ...]) -> SingleArray:
        in_step, stands_for = self.variation.in_step, self.variation.stands_for

        def drawn() -> SingleArray:
            generator = np.random.default_rng(list(entropy))
            return read_only(slowest_draws(generator, self.shape, in_step, stands_for))

        if in_step * stands_for > 1:  # the draws of one GPU follow those of another
            return _DRAWS.get((entropy, self.shape, in_step, stands_for), drawn)
        # Micro-batches are drawn one after the other, so that the draws of more begin with those of fewer.
        key: Hashable = (entropy, self.shape[1])
        draws = _DRAWS.find(key)
        if draws is None or len(draws) < self.shape[0]:
            draws = _DRAWS.replace(key, drawn())
        return draws[: self.shape[0]]

    # -- transfers -------------------------------------------------------------------------------------

    def transfer(self, rank: int, phase: Phase, routed: int | None, cost: TransferCost) -> TransferRows:
        """Durations of a transfer phase on a pipeline rank.

        `routed`: number of its block among those with routed experts, if the load decides the bytes.
        """
        both = self._loads.get(routed)
        if both is None:
            assert routed is not None
            both = self._loads[routed] = self.variation.loads[routed], self.variation.node_loads[routed]
        load, node_load = both
        slow = self.link_map.slowness(rank, phase)
        is_plain = isinstance(slow[0], float) and isinstance(slow[1], float)
        key = (routed, id(cost), slow if is_plain else (rank, phase))
        known = self._transfers.get(key)
        if known is None:  # which keeps the cost, so that its identity stays its own
            own = self._payload(slow, routed, cost, node_load, load)
            known = TransferRows(round(cost.launch_s * NS), *own, cost, None, load, node_load)
            self._transfers[key] = known
        demand = self.link_map.uniform(rank, phase, cost) if routed not in self.loads.dropping else None
        return known if demand is None else known._replace(demand=demand)

    def _slowest_ns(self, cost: TransferCost) -> FloatArray | None:
        """Payload in ns of the slowest member, which is the most loaded one, on healthy links (eq. E2).

        One row a routed block, and one for even load [routed blocks + 1, micro-batches]; None where durations
        are unusual.
        """
        known = self._of_blocks.get(id(cost))
        if known is None:  # which keeps the cost, so that its identity stays its own
            seconds = payload_seconds((cost.nic_s, self._most[0]), (cost.scale_up_s, self._most[1]))
            loads = self.variation.node_loads, self.variation.loads
            usual = min(cost.nic_s, cost.scale_up_s, self.loads.least) >= 0.0 and (
                float(seconds.max()) <= LONGEST_PHASE_S and all(own.flags.c_contiguous for own in loads)
            )
            known = self._of_blocks[id(cost)] = cost, read_only(seconds * NS) if usual else None
        return known[1]

    @cached_property
    def _most(self) -> FloatArray:
        return most_rows(self.variation)

    def _payload(
        self,
        slowness: tuple[FloatArray | float, FloatArray | float],
        routed: int | None,
        cost: TransferCost,
        node_load: FloatArray,
        load: FloatArray,
    ) -> Payload:
        """Payload in ns of the slowest member, and of each unless it follows from the loads (eq. E2)."""
        nic, scale_up = slowness
        if isinstance(nic, float) and isinstance(scale_up, float) and nic == scale_up == 1.0:
            of_blocks = self._slowest_ns(cost)
            if of_blocks is not None:
                return of_blocks[-1 if routed is None else routed], None
        slow = (
            nic if isinstance(nic, float) else array_key(nic),
            scale_up if isinstance(scale_up, float) else array_key(scale_up),
        )
        load_key = None if routed is None else (self.loads.key, routed)
        least = min(cost.nic_s, cost.scale_up_s, self.loads.least)
        key = (load_key, self.shape, cost.nic_s, cost.scale_up_s, slow)

        def payload() -> Payload:
            seconds = payload_seconds((cost.nic_s, node_load), (cost.scale_up_s, load), (nic, scale_up))
            each = np.ascontiguousarray(np.broadcast_to(seconds, self.shape))
            slowest = each.max(axis=1)
            if least < 0.0 or not float(slowest.max(initial=0.0)) <= LONGEST_PHASE_S:
                whole_ns(each)  # says what is wrong with it
            return read_only(slowest * NS), read_only(np.rint(each * NS).astype(np.int64))

        return _PAYLOADS.get(key, payload)


def most_rows(variation: MemberVariation) -> FloatArray:
    """Rows of the most loaded node and member [2, routed blocks + 1, micro-batches], with 1 at the end."""
    blocks, microbatches, _ = variation.loads.shape
    most = np.ones((2, blocks + 1, microbatches))
    for own, loads in zip(most, (variation.node_loads, variation.loads), strict=True):
        for row, load in zip(own, loads, strict=False):
            row[:] = most_loaded(load)
    return most


def load_facts(variation: MemberVariation) -> LoadFacts:
    """The facts of the loads of a variation, worked out once for the same arrays."""
    key = array_key(variation.loads), array_key(variation.node_loads)
    return _LOADS.get(key, lambda: _loads(variation))


def _loads(variation: MemberVariation) -> LoadFacts:
    loads, node_loads = variation.loads, variation.node_loads
    if not loads.size:
        return LoadFacts(object(), 0, 1.0, 1.0, frozenset())
    dropping = np.flatnonzero(loads.mean(axis=2).min(axis=1) < 1.0 - LOAD_TOLERANCE)
    least = float(min(loads.min(), node_loads.min()))
    size, most = loads.nbytes + node_loads.nbytes, float(loads.max())
    return LoadFacts(object(), size, least, most, frozenset(dropping.tolist()))
