"""Computes step times in closed form for arrays of plans, along the longest path of their schedule."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import fsum

import numpy as np
from msgspec import Struct, field

from moesim.hwmodels.arrays import FloatArray
from moesim.simulator.cost.formulas import (
    SyncParts,
    blended,
    busy_share,
    compute_seconds,
    end_of_step,
    payload_seconds,
)
from moesim.simulator.cost.plan_costs import PlanCosts
from moesim.simulator.cost.table import PHASES_OF, CostTable, Mode, PhaseCost, SyncCost
from moesim.simulator.layout.stages import StageAssignment
from moesim.simulator.model.operator import BlockKind, Phase
from moesim.simulator.model.precision import Precision
from moesim.simulator.model.recompute import Recompute
from moesim.simulator.planner.expert_loads import MemberLag
from moesim.simulator.planner.frames import Frame
from moesim.simulator.planner.replay import ActionTimes, Key, Pattern, replay
from moesim.simulator.scenario.parallel import ParallelPlan
from moesim.simulator.schedules.template import (
    EP_PHASES,
    SHARDING_PHASES,
    ActionKind,
    OverlapOrder,
    Task,
    Template,
    build_template,
)

# -- action times ------------------------------------------------------------------------------------
# Computes the seconds of schedule actions for arrays of plans, in one walk through the action's tasks.

ROUTED_PHASES: frozenset[Phase] = frozenset({"mlp F", "mlp I", "mlp W"})
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


class _Collective(Struct):
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


class ActionBook(Struct):
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
        times = self._times.get((kind, sides))
        if times is None:
            times = self._times[kind, sides] = self._walk(kind, self._template(kind, sides), sides)
        return times

    def _template(self, kind: ActionKind, sides: tuple[Sequence[BlockKind], Sequence[BlockKind]]) -> Template:
        forward, backward = (tuple(self._phases_of(k) for k in side) for side in sides)
        scatters_wait, gathers_wait = self.tables[0].scatters_wait, self.tables[0].gathers_wait
        key = (kind, forward, backward, scatters_wait, gathers_wait)
        if key not in self.templates:
            self.templates[key] = build_template(
                kind,
                forward,
                backward,
                self.order,
                scatters_wait=scatters_wait,
                gathers_wait=gathers_wait,
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
        beside: list[_Collective] = []  # those of the sharding stream that are not over, in order
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
                    while beside and (beside[0].end <= meet).all():
                        del beside[0]  # transfers of this stream are in order: none meets it again
                    took = self._share(meet, took, (block, task.phase), beside, mode)
                    for other in beside:
                        ends[other.number] = other.end[None]
                    if beside:
                        free["sharding"] = ends[beside[-1].number]
                end = (meet + took)[None]
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
        routed = dict.fromkeys((t.side, t.block) for t in template.tasks if t.phase in ROUTED_PHASES)
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


CLOSED_FORM_ERROR = 0.03
"""Relative error against the engine that 95 of 100 closed forms keep (lab/benchmarks/planner.py)."""

MOST_BYTES = 64_000_000
"""Largest table of times of one replay; plans that need more are replayed in several parts."""


class CostedPlan(Struct, frozen=True):
    """A plan with all the costs that its replay needs."""

    microbatches: int
    stages: StageAssignment
    table: CostTable
    spread: MemberLag
    send_s: tuple[float, float]
    """Seconds of a pipeline send alone, and of two that leave together (eq. E7)."""
    sync: tuple[SyncCost, ...]
    ports: tuple[float, float]
    """Bytes/s of a GPU's ports, scale-out and scale-up."""

    @classmethod
    def of(
        cls,
        costs: PlanCosts,
        frame: Frame,
        plan: ParallelPlan,
        choice: tuple[Precision, Recompute, int],
        spread: MemberLag,
        stages: StageAssignment,
    ) -> CostedPlan:
        """A plan of a frame; `plan` is the frame's with its ZeRO stage.

        `choice`: precision recipe, recompute and communication SMs.
        """
        schedule, (recipe, recompute, sms) = frame.pattern.samples[0], choice
        return cls(
            frame.microbatches,
            stages,
            costs.table(plan, recipe, recompute, sms, schedule),
            spread,
            costs.send_s(plan, schedule),
            costs.sync(plan, recipe, recompute, schedule, stages, sms),
            costs.ports,
        )


ReplayKey = tuple[object, ...]
"""What decides a replay: tables and lag of every pool, stages and number of micro-batches."""


class Replays(Struct):
    """Replays of one pattern that plans share, kept from one call to the next.

    Plans that differ only in ZeRO stages 0 to 2, or in policies of equal arithmetic, share a replay.
    """

    done: dict[ReplayKey, FloatArray] = field(default_factory=dict)
    """Seconds at which every rank ends its last action [ranks]."""
    ends: dict[int, tuple[tuple[SyncCost, ...], FloatArray]] = field(default_factory=dict)
    """Costs of the end of the step, and the same as an array [ranks, parts]; by the id of the former."""
    templates: dict[object, Template] = field(default_factory=dict)
    """Templates of the actions, by action and phases."""
    _kept: list[Sequence[CostedPlan]] = field(default_factory=list)
    """A plan of every replay: its objects must stay alive while their ids are keys."""

    def add(self, key: ReplayKey, plans: Sequence[CostedPlan], done: FloatArray) -> None:
        """Keep a replay; `plans`: one of its plans at the prices of every pool."""
        self.done[key] = done
        self._kept.append(plans)

    def end(self, sync: tuple[SyncCost, ...]) -> FloatArray:
        """Costs of the end of the step [ranks, (reduction, norm, optimizer, gather)]."""
        known = self.ends.get(id(sync))
        if known is None:
            costs = np.array([(s.reduce_s, s.norm_s, s.optimizer_s, s.gather_s) for s in sync])
            known = self.ends[id(sync)] = sync, costs
        return known[1]


def step_seconds(
    plans: Sequence[CostedPlan], pattern: Pattern, order: OverlapOrder, replays: Replays | None = None
) -> FloatArray:
    """Step time of every plan, in seconds (docs/model.md, eq. P2).

    The plans share the schedule. The longest path through a schedule of a few pipeline fills covers warm-up,
    steady state and drain; it is extrapolated to more micro-batches. `replays`: those of earlier calls with
    the same pattern and order, to which new ones are added.
    """
    return step_seconds_by_rank([plans], [0] * pattern.pp, pattern, order, replays)


def step_seconds_by_rank(
    pools: Sequence[Sequence[CostedPlan]],
    owners: Sequence[int],
    pattern: Pattern,
    order: OverlapOrder,
    replays: Replays | None = None,
) -> FloatArray:
    """Step time of every plan, in seconds, where pipeline rank r pays the prices of pool `owners[r]`.

    `pools[p][i]` is plan i with the prices of pool p. Every hop takes as long as on the slowest pool.
    """
    replays = Replays() if replays is None else replays
    plans = list(zip(*pools, strict=True))
    keys = [_replay_key(plan) for plan in plans]
    missing = {key: plan for key, plan in zip(keys, plans, strict=True) if key not in replays.done}
    todo = list(missing.items())
    width = max(1, MOST_BYTES // (8 * max(o.rows for o in pattern.orders)))
    for first in range(0, len(todo), width):
        part = todo[first : first + width]
        done = _done([plan for _, plan in part], owners, pattern, order, replays.templates)
        for (key, plan), column in zip(part, done, strict=True):
            replays.add(key, plan, column)
    ends: dict[int, int] = {}
    columns: list[FloatArray] = []
    which = np.empty((len(pools), len(plans)), dtype=np.int64)
    for n, plan in enumerate(plans):
        for pool, priced in enumerate(plan):
            place = ends.setdefault(id(priced.sync), len(columns))
            if place == len(columns):
                columns.append(replays.end(priced.sync))
            which[pool, n] = place
    costs = np.array(columns)
    by_rank = [costs[which[owner], rank] for rank, owner in enumerate(owners)]
    return _finished(np.array([replays.done[key] for key in keys]).T, pattern, by_rank)


def _replay_key(plan: Sequence[CostedPlan]) -> ReplayKey:
    first = plan[0]
    return (*(id(p.table) for p in plan), *(p.spread for p in plan), id(first.stages), first.microbatches)


def _done(
    plans: Sequence[Sequence[CostedPlan]],
    owners: Sequence[int],
    pattern: Pattern,
    order: OverlapOrder,
    templates: dict[object, Template],
) -> FloatArray:
    """Seconds at which every rank ends its last action [plans, ranks]; `plans[i][p]` is plan i in pool p."""
    alike: dict[tuple[int, frozenset[object]], list[int]] = {}
    for n, plan in enumerate(plans):
        alike.setdefault((id(plan[0].stages), frozenset(plan[0].table.transfer)), []).append(n)
    used = order if pattern.paired else None
    parts = [_Part([plans[n] for n in numbers], used, templates) for numbers in alike.values()]
    sorted_ = [n for numbers in alike.values() for n in numbers]

    def times(pool: int, key: Key) -> ActionTimes:
        each = [part.times(pool, key) for part in parts]
        if len(each) == 1:
            return each[0]
        names = ("whole", "forward_out", "backward_out")
        return ActionTimes(*(np.concatenate([getattr(one, name) for one in each]) for name in names))

    chosen = [plans[n] for n in sorted_]
    send = np.array([np.max([priced.send_s for priced in plan], axis=0) for plan in chosen]).T
    pool_of_rank = np.array(owners, dtype=np.int64)
    ends = [replay(sample, times, pool_of_rank, send) for sample in pattern.orders]
    count = np.array([plan[0].microbatches for plan in chosen], dtype=np.float64)
    done = np.empty((len(plans), pattern.pp))
    by_rank = zip(ends[0], ends[-1], strict=True)
    done[sorted_] = np.array([pattern.along(short, long, count) for short, long in by_rank]).T
    return done


class _Part:
    """Action times of plans whose stages and phases are the same, by pool."""

    def __init__(
        self,
        plans: Sequence[Sequence[CostedPlan]],
        order: OverlapOrder | None,
        templates: dict[object, Template],
    ) -> None:
        self._books = []
        for priced in zip(*plans, strict=True):
            tables, spreads = [p.table for p in priced], [p.spread for p in priced]
            self._books.append(ActionBook(tables, spreads, order, priced[0].ports, templates))
        self._blocks = [[block.kind for block in stage] for stage in plans[0][0].stages.stages]

    def times(self, pool: int, key: Key) -> ActionTimes:
        return self._books[pool].times(key, self._blocks)


def _finished(done: FloatArray, pattern: Pattern, costs: Sequence[FloatArray]) -> FloatArray:
    """Add the end of the step (eq. E5): reduction with the mirror rank, norm barrier, optimizer, gather.

    `done`: [ranks, plans]; `costs`: those of the end of the step on each rank [plans, parts].
    """
    parts = [SyncParts(*own.T) for own in costs]
    times = end_of_step(list(done), pattern.holders, parts, np.maximum.reduce)
    return np.asarray(np.max([time.gathered for time in times], axis=0))


# -- block seconds -----------------------------------------------------------------------------------
# Seconds of one block's actions, and the part of a plan that decides them.

ACTIONS = ("F", "I", "W")


class LayerSplit(Struct, frozen=True):
    """The part of a plan that decides the operators of one GPU, apart from precision and recompute."""

    tp: int
    cp: int
    ep: int
    expert_tp: int
    microbatch: int

    @classmethod
    def of(cls, plan: ParallelPlan) -> LayerSplit:
        """The layer split of a plan."""
        return cls(plan.tp, plan.cp, plan.ep, plan.expert_tp, plan.microbatch)


def action_seconds(table: CostTable, kind: BlockKind, kept: float = 1.0) -> dict[str, tuple[float, float]]:
    """Seconds (compute, small kernels of transfers) of a block's F, I and W on all SMs, without transfers.

    `kept`: share of the routed rows that are computed.
    """
    by_action = {}
    for action in ACTIONS:
        costs = [(phase, table.compute.get((kind, phase, "alone"))) for phase in PHASES_OF[action]]
        by_action[action] = tuple(
            fsum(
                c.fixed_s + kept * c.row_s
                for phase, c in costs
                if c is not None and (phase in EP_PHASES) == small
            )
            for small in (False, True)
        )
    return by_action  # type: ignore[return-value]
