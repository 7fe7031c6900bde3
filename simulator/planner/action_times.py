"""Computes the seconds of schedule actions for arrays of plans, in one walk through the action's tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from moesim.hwmodels.arrays import FloatArray
from moesim.simulator.cost.formulas import blended, busy_share, compute_seconds, payload_seconds
from moesim.simulator.cost.table import CostTable, Mode, PhaseCost
from moesim.simulator.model.operator import BlockKind, Phase
from moesim.simulator.planner.member_lag import MemberLag
from moesim.simulator.planner.replay import ActionTimes, Key
from moesim.simulator.schedules.template import (
    SHARDING_PHASES,
    ActionKind,
    OverlapOrder,
    Task,
    Template,
    build_template,
)

ROUTED: frozenset[Phase] = frozenset({"mlp F", "mlp I", "mlp W"})
"""Phases whose compute grows with the received rows."""

_NOTHING = PhaseCost(0.0)


def _slowed(own: tuple[FloatArray, FloatArray], other: tuple[FloatArray, FloatArray]) -> FloatArray:
    """Time of a transfer over its time alone, beside another one [plans].

    Both are (shares of the ports that it fills alone, bytes/s of its fuller port alone), as in `_filled`. On
    a port that cannot carry both, they move the same bytes/s on their fuller ports, or one gets what the
    other leaves where that is more: max-min fair rates of two flows (eq. E3).
    """
    (filled, rate), (others, its_rate) = own, other
    level = filled + others * (rate / np.where(its_rate > 0.0, its_rate, np.inf))
    left = filled / np.maximum(1e-9, 1.0 - others)
    return np.asarray(np.maximum(1.0, np.where(filled > 0.0, np.minimum(level, left), 0.0).max(axis=0)))


@dataclass(slots=True)
class _Collective:
    """A collective of the sharding stream: its place among the tasks, and when it is on the links [plans]."""

    number: int
    block: BlockKind
    phase: Phase
    start: FloatArray
    took: FloatArray

    @property
    def end(self) -> FloatArray:
        """Seconds from the start of the action."""
        return self.start + self.took


@dataclass(slots=True)
class ActionBook:
    """Action times of plans whose blocks have the same phases.

    `tables` and `spreads` have one entry for each plan.
    """

    tables: Sequence[CostTable]
    spreads: Sequence[MemberLag]
    order: OverlapOrder | None
    ports: tuple[float, float]
    """Bytes/s of a GPU's ports, scale-out and scale-up, which concurrent transfers share."""
    templates: dict[object, Template] = field(default_factory=dict)
    """Templates by action and phases; books of one order may share them."""
    _times: dict[object, ActionTimes] = field(default_factory=dict)
    _read: dict[object, tuple[FloatArray, FloatArray]] = field(default_factory=dict)
    _computed: dict[object, tuple[FloatArray, FloatArray, FloatArray]] = field(default_factory=dict)
    _phases: dict[BlockKind, frozenset[Phase]] = field(default_factory=dict)
    _spread: dict[str, FloatArray] = field(default_factory=dict)

    def times(self, key: Key, blocks: Sequence[Sequence[BlockKind]]) -> ActionTimes:
        """Times of an action; `blocks[stage]` are the block kinds of each stage in forward order."""
        kind, forward, backward = key
        sides = (
            tuple(blocks[forward]) if forward >= 0 else (),
            tuple(blocks[backward]) if backward >= 0 else (),
        )
        found = self._times.get((kind, sides))
        if found is None:
            found = self._times[kind, sides] = self._walk(kind, self._template(kind, sides), sides)
        return found

    def _template(self, kind: ActionKind, sides: tuple[Sequence[BlockKind], Sequence[BlockKind]]) -> Template:
        forward, backward = (tuple(self._phases_of(k) for k in side) for side in sides)
        key = (kind, forward, backward, self.tables[0].scatters_wait)
        if key not in self.templates:
            self.templates[key] = build_template(
                kind, forward, backward, self.order, scatters_wait=self.tables[0].scatters_wait
            )
        return self.templates[key]

    def _walk(
        self, kind: ActionKind, template: Template, sides: tuple[Sequence[BlockKind], Sequence[BlockKind]]
    ) -> ActionTimes:
        """Walk all streams in order; every transfer waits for all of its group (eqs. E1, E2, P3 and P5).

        Times are [members, plans]. The first member is the mean one. If load lasts, one more member for each
        block has the most rows there and falls behind in all its compute.
        """
        mode: Mode = "overlapped" if template.on_two_streams else "alone"
        shares = self._busy_shares(template, sides) if template.by_duration else {}
        hot = self._hot_members(template)
        zero = np.zeros((1 + len(hot), len(self.tables)))
        free = {"compute": zero, "communication": zero, "sharding": zero}
        ends: list[FloatArray] = []
        lags: list[FloatArray] = []
        beside: list[_Collective] = []  # those of the sharding stream, in order
        # Lags of each side and block since its last barrier: (squares of run lags, row lags), summed.
        late: dict[tuple[int, int], tuple[FloatArray, FloatArray]] = {}
        for task in template.tasks:
            block, place = sides[task.side][task.block], (task.side, task.block)
            own, from_run, from_rows = self._compute(block, task, shares.get(task.layer_pair))
            if place in hot:
                own = np.repeat(own[None], len(zero), axis=0)
                own[hot[place]] += from_rows
                from_rows = zero[0]
            ready = free[task.stream]
            if not self._moves(block, task.phase, mode):
                for dep in task.deps:
                    ready = np.maximum(ready, ends[dep])
                end = ready + own
                # Runs differ from phase to phase; a block has the same rows in all of its phases.
                before = late.get(place, (zero[0], zero[0]))
                late[place] = before[0] + from_run * from_run, before[1] + from_rows
                lag = np.sqrt(late[place][0] + late[place][1] * late[place][1])
            else:
                for dep in task.deps:
                    ready = np.maximum(ready, ends[dep] + lags[dep])
                lag = np.sqrt(from_run * from_run + from_rows * from_rows)
                meet = (ready + own + lag).max(axis=0)
                took = self._transfer(block, task.phase, mode)
                if task.stream == "sharding":
                    beside.append(_Collective(len(ends), block, task.phase, meet, took))
                elif beside:
                    took = self._share(meet, took, (block, task.phase), beside, mode)
                    for other in beside:
                        ends[other.number] = np.broadcast_to(other.end, zero.shape)
                    free["sharding"] = ends[beside[-1].number]
                end = np.broadcast_to(meet + took, zero.shape)
                lag, late[place] = zero[0], (zero[0], zero[0])
            free[task.stream] = end
            ends.append(end)
            lags.append(lag)
        whole = np.maximum(np.maximum(free["compute"], free["communication"]), free["sharding"])
        out = [whole if n is None else ends[n] for n in (template.forward_out, template.backward_out)]
        return ActionTimes(whole.max(axis=0), out[0].max(axis=0), out[1].max(axis=0))

    def _share(
        self,
        meet: FloatArray,
        took: FloatArray,
        transfer: tuple[BlockKind, Phase],
        beside: Sequence[_Collective],
        mode: Mode,
    ) -> FloatArray:
        """Seconds of a transfer from `meet` on beside the collectives of the sharding stream (eq. P2).

        They slow each other down while both are on the links. Collectives that it delays take longer, and
        those behind them start later.
        """
        for place, other in enumerate(beside):
            both = np.maximum(meet, other.start)
            rest, left = meet + took - both, other.end - both
            if not ((rest > 0.0) & (left > 0.0)).any():
                continue
            mine, theirs = (self._filled(*one, mode) for one in (transfer, (other.block, other.phase)))
            slow, slows = _slowed(mine, theirs), _slowed(theirs, mine)
            shared = np.maximum(0.0, np.minimum(rest * slow, left * slows))
            took = took + (shared - shared / slow)
            other.took = other.took + (shared - shared / slows)
            for before, later in pairwise(beside[place:]):
                later.start = np.maximum(later.start, before.end)
        return took

    def _filled(self, kind: BlockKind, phase: Phase, mode: Mode) -> tuple[FloatArray, FloatArray]:
        """What a transfer that has the ports to itself fills of them, and how fast its fuller port moves.

        Beside compute (`mode`) it takes longer and so fills less. The results are shares of the scale-out and
        the scale-up port [ports, plans], and bytes/s on the port with more bytes [plans].
        """
        key = (kind, phase, mode, "ports filled")
        if key not in self._read:
            costs = [table.transfer[kind, phase, mode] for table in self.tables]
            sizes = np.array(
                [(c.nic_bytes, c.scale_up_bytes) if c.payload_s else (0.0, 0.0) for c in costs]
            ).T
            rates = sizes / np.array([c.payload_s or 1.0 for c in costs])
            ports = np.array([rate or np.inf for rate in self.ports])
            self._read[key] = rates / ports[:, None], rates.max(axis=0)
        return self._read[key]

    def _hot_members(self, template: Template) -> dict[tuple[int, int], int]:
        """Member with the most rows of each routed (side, block); empty if load does not last."""
        if not self.spreads[0].lasting:
            return {}
        routed = dict.fromkeys((t.side, t.block) for t in template.tasks if t.phase in ROUTED)
        return {place: 1 + n for n, place in enumerate(routed)}

    def _phases_of(self, kind: BlockKind) -> frozenset[Phase]:
        if kind not in self._phases:
            self._phases[kind] = self.tables[0].phases(kind)
        return self._phases[kind]

    def _spread_of(self, name: str) -> FloatArray:
        if name not in self._spread:
            self._spread[name] = np.array([getattr(spread, name) for spread in self.spreads])
        return self._spread[name]

    def _busy_shares(
        self, template: Template, sides: tuple[Sequence[BlockKind], Sequence[BlockKind]]
    ) -> dict[int, FloatArray]:
        """Share of each layer pair's compute beside busy communication SMs [plans] (eq. E20)."""
        moved: dict[int, FloatArray] = {}
        computed: dict[int, FloatArray] = {}
        zero = np.zeros(len(self.tables))
        for task in template.tasks:
            block, pair = sides[task.side][task.block], task.layer_pair
            if task.phase in SHARDING_PHASES:
                continue  # a library's collectives run on SMs of their own
            if self._moves(block, task.phase, "overlapped"):
                costs = [table.transfer[block, task.phase, "overlapped"] for table in self.tables]
                before = sum(self._price(block, task.phase, "overlapped"))
                moved[pair] = moved.get(pair, zero) + np.array([c.payload_s for c in costs]) + before
            else:
                computed[pair] = computed.get(pair, zero) + sum(self._price(block, task.phase, "overlapped"))
        pairs = {task.layer_pair for task in template.tasks}
        return {n: busy_share(moved.get(n, zero), computed.get(n, zero)) for n in pairs}

    def _compute(
        self, kind: BlockKind, task: Task, by_duration: FloatArray | None
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Seconds of a task's compute at the pace of the slowest GPU, and its two lags.

        The lags are those of the slowest run and of the member with the most rows. In an overlapped pair a
        share of the compute runs while the communication SMs are busy (eq. E6, or `by_duration` of eq. E20).
        """
        share = task.overlapped_share if by_duration is None else by_duration
        key = (kind, task.phase, share.tobytes() if isinstance(share, np.ndarray) else share)
        if key not in self._computed:
            if share is None:
                fixed, row = self._price(kind, task.phase, "alone")
            else:
                sms_reserved, busy = (
                    self._price(kind, task.phase, mode) for mode in ("sms_reserved", "overlapped")
                )
                fixed, row = (blended(q, b, share) for q, b in zip(sms_reserved, busy, strict=True))
            kept = compute_seconds(fixed, row, self._spread_of("kept") + self._spread_of("hot"))
            own = kept * (1.0 + self._spread_of("clock"))
            self._computed[key] = own, kept * self._spread_of("jitter"), row * self._spread_of("rows")
        return self._computed[key]

    def _price(self, kind: BlockKind, phase: Phase, mode: str) -> tuple[FloatArray, FloatArray]:
        """Seconds of a phase that are fixed, and that grow with received rows; 0 if it is absent."""
        key = (kind, phase, mode, "price")
        if key not in self._read:
            costs = [table.compute.get((kind, phase, mode), _NOTHING) for table in self.tables]  # type: ignore[arg-type]
            self._read[key] = np.array([c.fixed_s for c in costs]), np.array([c.row_s for c in costs])
        return self._read[key]

    def _moves(self, kind: BlockKind, phase: Phase, mode: Mode) -> bool:
        return (kind, phase, mode) in self.tables[0].transfer

    def _transfer(self, kind: BlockKind, phase: Phase, mode: Mode) -> FloatArray:
        """Seconds of a transfer: launch, and the payload of the slowest member alone on its links."""
        key = (kind, phase, mode)
        if key not in self._read:
            costs = [table.transfer[kind, phase, mode] for table in self.tables]
            routed = phase not in SHARDING_PHASES
            rows = self._spread_of("kept") if routed else 1.0
            payload = payload_seconds(
                (np.array([c.nic_s for c in costs]), rows + routed * self._spread_of("node_payload")),
                (np.array([c.scale_up_s for c in costs]), rows + routed * self._spread_of("payload")),
            )
            total = np.array([c.launch_s for c in costs]) + payload
            self._read[key] = total, total
        return self._read[key][0]
