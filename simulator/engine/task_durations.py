"""Durations of tasks for all micro-batches and members of a group, computed once and shared by scenarios.

Every array is read-only and a pure function of its key: random draws by their seed, factors of a phase by
draws and spreads, nanoseconds by factors, loads and price.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

import numpy as np

from moesim.hwmodels.arrays import FloatArray, IntArray
from moesim.simulator.common.bounded_cache import BoundedCache, array_key, digest, read_only
from moesim.simulator.cost.formulas import compute_seconds, payload_seconds
from moesim.simulator.cost.table import PhaseCost, TransferCost
from moesim.simulator.engine.link_map import LinkMap
from moesim.simulator.engine.program import (
    LONGEST_PHASE_S,
    NS,
    MemberVariation,
    SingleArray,
    TransferRows,
    slowest_draws,
    whole_ns,
)
from moesim.simulator.engine.task_table import keep_figures
from moesim.simulator.model.operator import Phase
from moesim.simulator.schedules import Schedule

LOAD_TOLERANCE = 1e-9
"""Mean rows of the members that are below 1 by less than this count as complete."""

Rows = tuple[IntArray, FloatArray]
"""Nanoseconds [micro-batches, members] of a compute phase, and their mean over the members."""
Payload = tuple[FloatArray, IntArray]
"""Nanoseconds of a payload: the slowest member's for every micro-batch, and each member's."""

_TOKENS: BoundedCache[object] = BoundedCache(100_000)
"""An object for every long key, so that the keys made from it are short."""
_DRAWS: BoundedCache[SingleArray] = BoundedCache(32_000_000, lambda draws: draws.nbytes)
_FACTORS: BoundedCache[FloatArray] = BoundedCache(64_000_000, lambda factor: factor.nbytes)
_ROWS: BoundedCache[Rows] = BoundedCache(128_000_000, lambda rows: rows[0].nbytes + rows[1].nbytes)
_PAYLOADS: BoundedCache[Payload] = BoundedCache(32_000_000, lambda own: own[0].nbytes + own[1].nbytes)


class _Loads(NamedTuple):
    """Facts of the loads of a variation."""

    key: object
    """Stands for the loads in other keys, which so do not keep their arrays alive."""
    bytes: int
    least: float
    dropping: frozenset[int]
    """Routed blocks whose transfers send fewer bytes than under even load, because capacity dropped rows."""


_LOADS: BoundedCache[_Loads] = BoundedCache(48_000_000, lambda loads: loads.bytes + 1000)

_PHASE_NUMBER: dict[Phase, int] = {phase: number for number, phase in enumerate(get_args(Phase))}
"""Part of the seed of a phase's run-to-run noise."""


@dataclass(frozen=True, slots=True)
class CompiledPhases:
    """The same durations as `TaskDurations` computes with NumPy, by compiled code, which is faster."""

    native: Any
    """The compiled functions `fill_rows`, `fill_payloads` and `fill_noise`, which take addresses."""

    def phase_rows(
        self,
        fixed_s: float,
        row_s: float,
        load: FloatArray | None,
        factor: FloatArray | None,
        shape: tuple[int, int],
    ) -> tuple[IntArray, IntArray, IntArray, FloatArray] | None:
        """Nanoseconds [micro-batches, members] of a phase, and their largest, sum and mean by micro-batch.

        `load`, `factor`: contiguous arrays of that shape, or None for 1. None where some duration is no usual
        one, which NumPy's way then checks.
        """
        microbatches, members = shape
        results = np.empty(microbatches * (members + 3), np.int64)
        usual = self.native.fill_rows(
            fixed_s,
            row_s,
            0 if load is None else _address(load),
            0 if factor is None else _address(factor),
            microbatches,
            members,
            _address(results),
        )
        if not usual:
            return None
        figures = results[microbatches * members :].reshape(3, microbatches)
        return (
            results[: microbatches * members].reshape(shape),
            *(figures[0], figures[1], figures[2].view(np.float64)),
        )

    def payloads(
        self,
        nic_s: float,
        scale_up_s: float,
        loads: tuple[FloatArray, FloatArray] | None,
        shape: tuple[int, int],
    ) -> Payload | None:
        """Nanoseconds of a payload: the longest of each micro-batch, not rounded, and those of all members.

        `loads`: contiguous arrays of that shape, averaged over a node and by member, or None for 1. None
        where some duration is no usual one.
        """
        microbatches, members = shape
        results = np.empty(microbatches * (members + 1), np.int64)
        node_load, load = (0, 0) if loads is None else map(_address, loads)
        out = _address(results)
        if not self.native.fill_payloads(nic_s, scale_up_s, node_load, load, microbatches, members, out):
            return None
        rows = microbatches * members
        return results[rows:].view(np.float64), results[:rows].reshape(shape)

    def noisy_clock(self, cv: float, draws: SingleArray, clock: FloatArray) -> FloatArray:
        """Clock times run-to-run noise [micro-batches, members], from contiguous arrays of that shape."""
        factors = np.empty(draws.shape)
        self.native.fill_noise(cv, _address(draws), _address(clock), draws.size, _address(factors))
        return factors


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
        self._ones = np.ones(self.shape[1])
        self._seconds, self._whole = np.empty(self.shape), np.empty(self.shape)
        key = array_key(variation.loads), array_key(variation.node_loads)
        self.loads = _LOADS.get(key, lambda: _loads(variation))
        self.stage_tokens = self._tokens(stages)
        self.faster = _faster
        self._clocks: dict[int, FloatArray] = {}

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

    def rows(self, place: tuple[int, int, Phase], price: PhaseCost, routed: int | None) -> Rows:
        """Nanoseconds [micro-batches, members] of a compute phase at a price, and their mean.

        `place`: stage, block and phase; `routed`: number of the block among those with routed experts.
        """
        fixed_s, row_s = price.fixed_s, price.row_s
        if fixed_s == row_s == 0.0:
            none = np.zeros(self.shape, np.int64), np.zeros(self.shape[0])
            return _ROWS.get(("no compute", self.shape), lambda: (read_only(none[0]), read_only(none[1])))
        number = routed if row_s else None
        load_key = None if number is None else (self.loads.key, number)
        key = (self.stage_tokens[place[0]], place[1], place[2], load_key, fixed_s, row_s)
        return _ROWS.get(key, lambda: self._rows(place, price, number))

    def _rows(self, place: tuple[int, int, Phase], price: PhaseCost, number: int | None) -> Rows:
        """Eq. E1 with the factors of the members, rounded to nanoseconds."""
        seconds, fixed_s, row_s = self._seconds, price.fixed_s, price.row_s
        factor = self._factor(place) if fixed_s + row_s > 0.0 else None
        load = None if number is None else self.variation.loads[number]
        usual = fixed_s >= 0.0 and row_s >= 0.0 and self.loads.least >= 0.0
        if self.faster is not None and usual and (load is None or load.flags.c_contiguous):
            figures = self.faster.phase_rows(fixed_s, row_s, load, factor, self.shape)
            if figures is not None:
                rows_ns, slowest, total, mean = figures
                keep_figures(read_only(rows_ns), slowest, total)
                return rows_ns, read_only(mean)
        amount = compute_seconds(fixed_s, row_s, 1.0 if load is None else load)
        np.multiply(amount, 1.0 if factor is None else factor, out=seconds)
        if not usual:
            return self._checked(seconds)
        nanoseconds = np.multiply(seconds, NS, out=self._whole)
        np.rint(nanoseconds, out=nanoseconds)
        # Sums of whole numbers below 2^53 are exact in any order, and no member takes longer than the sum.
        sums = nanoseconds @ self._ones
        if not float(sums.max(initial=0.0)) <= LONGEST_PHASE_S * NS:
            return self._checked(seconds)
        return read_only(nanoseconds.astype(np.int64)), read_only(sums / self.shape[1])

    def _checked(self, seconds: FloatArray) -> Rows:
        """Unusual durations, of which every one is checked."""
        rows = whole_ns(seconds)
        return read_only(rows), read_only(rows.mean(axis=1))

    def _factor(self, place: tuple[int, int, Phase]) -> FloatArray:
        """Time of a phase over that on a usual GPU in a usual run [micro-batches, members], at least 0."""
        key = (self.stage_tokens[place[0]], place[1], place[2])
        return _FACTORS.get(key, lambda: read_only(self._new_factor(place)))

    def _ranks(self, stage: int) -> list[int]:
        """Rank of each micro-batch: a stage of a bidirectional schedule runs on one for every direction."""
        return [self.schedule.rank_of(stage, m) for m in range(self.shape[0])]

    def _new_factor(self, place: tuple[int, int, Phase]) -> FloatArray:
        """Clock of each member times run-to-run noise, drawn once a micro-batch and member for all modes."""
        stage, cv = place[0], self.variation.jitter_cv
        if stage not in self._clocks:
            self._clocks[stage] = self.variation.clock[self._ranks(stage)]
        clock = self._clocks[stage]
        if isinstance(cv, float) and cv == 0.0:
            return clock.copy()
        entropy = (self.variation.seed, place[0], place[1], _PHASE_NUMBER[place[2]])
        draws = self._draws((*entropy, self.group) if self.group else entropy)
        if self.faster is not None and isinstance(cv, float):
            return self.faster.noisy_clock(cv, draws, clock)
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
        variation = self.variation
        payload_ns, member_ns = self._payload(rank, phase, routed, cost)
        return TransferRows(
            round(cost.launch_s * NS),
            payload_ns,
            member_ns,
            cost,
            self.link_map.uniform(rank, phase, cost) if routed not in self.loads.dropping else None,
            self._even if routed is None else variation.loads[routed],
            self._even if routed is None else variation.node_loads[routed],
        )

    def _payload(self, rank: int, phase: Phase, routed: int | None, cost: TransferCost) -> Payload:
        """Payload in ns of the slowest member and of each member (eq. E2)."""
        nic, scale_up = self.link_map.slowness(rank, phase)
        slow = (
            nic if isinstance(nic, float) else array_key(nic),
            scale_up if isinstance(scale_up, float) else array_key(scale_up),
        )
        load_key = None if routed is None else (self.loads.key, routed)
        least = min(cost.nic_s, cost.scale_up_s, self.loads.least)
        key = (load_key, self.shape, cost.nic_s, cost.scale_up_s, slow)

        def payload() -> Payload:
            load = self._even if routed is None else self.variation.loads[routed]
            node_load = self._even if routed is None else self.variation.node_loads[routed]
            loads = None if routed is None else (node_load, load)
            whole = loads is None or all(a.flags.c_contiguous and a.shape == self.shape for a in loads)
            if self.faster is not None and whole and slow == (1.0, 1.0) and least >= 0.0:
                figures = self.faster.payloads(cost.nic_s, cost.scale_up_s, loads, self.shape)
                if figures is not None:
                    return read_only(figures[0]), read_only(figures[1])
            seconds = payload_seconds((cost.nic_s, node_load), (cost.scale_up_s, load), (nic, scale_up))
            each = np.ascontiguousarray(np.broadcast_to(seconds, self.shape))
            slowest = each.max(axis=1)
            if least < 0.0 or not float(slowest.max(initial=0.0)) <= LONGEST_PHASE_S:
                whole_ns(each)  # says what is wrong with it
            nanoseconds = np.multiply(each, NS, out=self._whole)
            np.rint(nanoseconds, out=nanoseconds)
            return read_only(slowest * NS), read_only(nanoseconds.astype(np.int64))

        return _PAYLOADS.get(key, payload)


def _loads(variation: MemberVariation) -> _Loads:
    loads, node_loads = variation.loads, variation.node_loads
    if not loads.size:
        return _Loads(object(), 0, 1.0, frozenset())
    dropping = np.flatnonzero(loads.mean(axis=2).min(axis=1) < 1.0 - LOAD_TOLERANCE)
    least = float(min(loads.min(), node_loads.min()))
    return _Loads(object(), loads.nbytes + node_loads.nbytes, least, frozenset(dropping.tolist()))
