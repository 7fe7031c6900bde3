"""Lower bounds of step times for arrays of plans; a plan that a bound excludes cannot be the best."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias, TypeVar

import numpy as np

from moesim.hwmodels.arrays import FloatArray
from moesim.hwmodels.errors import InputError
from moesim.simulator.common.processes import PATIENCE_S, without_cyclic_collection
from moesim.simulator.cost.data_parallel import sharded_block
from moesim.simulator.cost.plan_costs import PlanCosts
from moesim.simulator.cost.pricing import framework_copies
from moesim.simulator.layout.gradient_sync import GradientSync
from moesim.simulator.layout.job import resolve
from moesim.simulator.layout.parallel import members_per_program
from moesim.simulator.layout.stages import StageAssignment
from moesim.simulator.model.operator import BlockKind, Phase
from moesim.simulator.model.precision import Precision
from moesim.simulator.model.recompute import Recompute
from moesim.simulator.planner.closed_form import ACTIONS, LayerSplit, action_seconds
from moesim.simulator.planner.expert_loads import ExpertLoads, clock_lag_of
from moesim.simulator.planner.frames import Frame
from moesim.simulator.planner.placements import Placement
from moesim.simulator.planner.replay import Key, Pattern
from moesim.simulator.scenario import Scenario
from moesim.simulator.scenario.parallel import ParallelPlan

T = TypeVar("T")

STANDARD_ERRORS = 3.0
"""Standard errors by which a bound lets the mean of a rank's drawn GPU speeds lie below one."""

ACTIONS_OF: dict[str, tuple[str, ...]] = {
    "F": ("F",), "I": ("I",), "W": ("W",), "B": ("I", "W"), "F&I": ("F", "I"), "F&B": ("F", "I", "W"),
}  # fmt: skip
"""Priced actions of which each action of a schedule consists."""


@dataclass(slots=True)
class BoundBook:
    """Bounds of plans by precision, recompute arithmetic, communication SMs and ZeRO stage."""

    costs: PlanCosts
    loads: ExpertLoads
    recipes: Sequence[Precision]
    policies: Sequence[Recompute]
    sms: Sequence[int]
    zero_stages: Sequence[int]
    placements: Sequence[Placement]
    _compute: dict[tuple[LayerSplit, float], FloatArray] = field(init=False, default_factory=dict)
    _transfer: dict[tuple[LayerSplit, float], FloatArray] = field(init=False, default_factory=dict)
    _sharded: dict[tuple[object, ...], tuple[float, float, float]] = field(init=False, default_factory=dict)
    _frames: Sequence[Frame] = field(init=False, default=())
    """Frames that were asked for last, whose layouts share `_of_frames`."""
    _of_frames: dict[object, Any] = field(init=False, default_factory=dict)
    _plans: dict[tuple[int, int], tuple[ParallelPlan, ParallelPlan]] = field(init=False, default_factory=dict)

    @property
    def classes(self) -> tuple[Recompute, ...]:
        """One policy of each class of recompute policies with equal arithmetic."""
        return tuple(dict.fromkeys(self.costs.arithmetic(p) for p in self.policies))

    @property
    def class_of(self) -> list[int]:
        """Position of each policy's class in `classes`."""
        return [self.classes.index(self.costs.arithmetic(p)) for p in self.policies]

    def least_kept(self, frame: Frame) -> float:
        """Least share of the routed rows that capacity keeps, over all placements of the experts."""
        return self.loads.least_kept(frame, self.placements)

    def compute(self, plan: ParallelPlan, kept: float = 1.0) -> FloatArray:
        """Seconds of a block alone [precisions, classes, block kinds, F I W host, compute or small kernels].

        In the place of the host stand the least seconds of the forward and of the whole backward, those of
        its calls. `kept`: share of the routed rows that are computed. The least over ZeRO stages counts.
        """
        cell = LayerSplit.of(plan), kept
        if cell not in self._compute:
            job = self.costs.job
            stages = (self._staged(plan, stage) for stage in self.zero_stages)
            alike = {framework_copies(one, job): one for one in stages}  # a stage may write more than another
            each = [self._seconds(one, kept) for one in alike.values()]
            self._compute[cell] = np.minimum.reduce(each)
        return self._compute[cell]

    def _seconds(self, plan: ParallelPlan, kept: float) -> FloatArray:
        rows = []
        for recipe in self.recipes:
            tables = [
                self.costs.alone(plan, recipe, policy, self._fastest(plan, recipe, policy))
                for policy in self.classes
            ]
            rows.append(
                [
                    [
                        [*_actions(action_seconds(t, k, kept)), host]
                        for k, host in zip(
                            self.costs.kinds, self.costs.least_host_s(plan, recipe, policy), strict=True
                        )
                    ]
                    for t, policy in zip(tables, self.classes, strict=True)
                ]
            )
        return np.array(rows)

    def compute_with(
        self, plans: Sequence[ParallelPlan], pool: Executor, alive: Callable[[int], None]
    ) -> None:
        """Do `compute` of some plans in this process and in those of a pool, and keep the seconds.

        `alive` is called with the number of plans that are done, at least every 0.1 s while others compute;
        what it raises ends the search. Plans that cannot be computed are left out, and raise where they are
        used. Which process computes a plan changes no number.
        """
        alike: dict[object, list[ParallelPlan]] = {}
        for plan in plans:  # plans of a part share the costs of their attention
            alike.setdefault((plan.tp, plan.microbatch, plan.cp), []).append(plan)
        axes = self.recipes, self.policies, self.sms, self.zero_stages, self.placements
        task = partial(_computed, self.costs.scenario, tuple(self.costs.recipes), axes)
        running = [(part, pool.submit(task, tuple(part))) for part in alike.values()]
        elsewhere: list[tuple[list[ParallelPlan], Future[_Computed | None]]] = []
        done = 0
        try:
            while running:
                part, future = running.pop()
                if not future.cancel():  # a worker has it
                    elsewhere.append((part, future))
                    continue
                for plan in part:
                    alive(done)
                    self.compute(plan)
                    done += 1
            for part, future in elsewhere:
                while not wait([future], PATIENCE_S).done:
                    alive(done)
                computed = future.result()
                if computed is not None:
                    seconds, keys = computed
                    self._compute |= {(LayerSplit.of(p), 1.0): s for p, s in zip(part, seconds, strict=True)}
                    self.costs.elsewhere |= keys
                done += len(part)
        except InputError:
            return  # raised again where all plans are read in order
        finally:
            for _, future in running:
                future.cancel()

    def _fastest(self, plan: ParallelPlan, recipe: Precision, policy: Recompute) -> int | None:
        """The number of SMs with the fastest transfers, where the recompute repeats transfers."""
        if not self.costs.repeats_transfers(plan, policy):
            return None
        return min(self.sms, key=lambda sms: self.costs.transfer_s(plan, recipe, sms)[0])

    def transfer(self, plan: ParallelPlan, kept: float = 1.0) -> FloatArray:
        """Seconds of the transfers of a MoE block that runs alone [precisions, sms, F or I].

        None count where shared experts run beside them, which leaves a lower bound.
        """
        cell = LayerSplit.of(plan), kept
        if cell not in self._transfer:
            counted = not self.costs.scenario.communication.overlap_shared_experts
            self._transfer[cell] = counted * np.array(
                [
                    [self.costs.transfer_s(plan, recipe, sms, kept) for sms in self.sms]
                    for recipe in self.recipes
                ]
            )
        return self._transfer[cell]

    def weights(self, plan: ParallelPlan, paired: bool) -> FloatArray:
        """Seconds of a block for its stage [precisions, classes, block kinds] (eq. S1), with even loads.

        `paired`: whether the schedule runs pairs, in which the transfers of experts hide behind the compute.
        """
        each = self.compute(plan)
        # The order of the sum is fixed, as NumPy's own sums may differ in the last bit between machines.
        own = sum((each[..., a, part] for a in range(len(ACTIONS)) for part in (0, 1)), np.zeros(()))
        moved = self.transfer(plan)
        fastest = (moved[..., 0] + moved[..., 1]).min(axis=1)[:, None, None]
        sent = fastest * np.array([kind in self.costs.routed for kind in self.costs.kinds])
        return np.asarray(np.maximum(own, sent) if paired else own + sent)

    def _once_for(self, frames: Sequence[Frame], about: object, make: Callable[[], T]) -> T:
        """What `make` gives for a list of frames, which nothing changes, once for all of their layouts."""
        if self._frames is not frames:
            self._frames, self._of_frames = frames, {}
        if about not in self._of_frames:
            self._of_frames[about] = make()
        value: T = self._of_frames[about]
        return value

    def _inputs(
        self, frames: Sequence[Frame]
    ) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray, FloatArray]:
        """Compute, transfers, numbers of micro-batches, least clock and closed-form lag of frames."""
        kept = [self.least_kept(f) for f in frames]
        compute = np.array([self.compute(f.plan, k) for f, k in zip(frames, kept, strict=True)])
        transfer = np.array([self.transfer(f.plan, k) for f, k in zip(frames, kept, strict=True)])
        cv = self.costs.scenario.variation.clock_cv.value
        slow = [1.0 - STANDARD_ERRORS * cv / np.sqrt(members_per_program(f.layout)) for f in frames]
        count = np.array([f.microbatches for f in frames], dtype=np.float64)
        lag = np.array([1.0 + clock_lag_of(self.costs.scenario, f) for f in frames])[
            :, None, None, None, None, None
        ]
        return compute, transfer, count, np.maximum(slow, 0.0)[:, None, None, None], lag

    def step(
        self,
        frames: Sequence[Frame],
        pattern: Pattern,
        assignment: StageAssignment,
        *,
        of_closed_form: bool = False,
    ) -> FloatArray:
        """Least seconds of a step [frames, precisions, classes, sms, ZeRO stages] (eq. P1).

        The bound is the longest time of a few ranks. Each adds up the forwards before its first action, its
        own work alone on all SMs with even loads and without dropped rows, the input gradients after its
        last one, and the end of the step. An overlapped pair takes the longer of its compute and its
        transfers. Sends, skew and interference only add to that. Collectives over replicas inside the step
        are a second bound. `of_closed_form`: least seconds of the closed form only, in which GPUs lag as
        much as is expected, and no action is shorter than its host's calls.
        """
        compute, transfer, count, least, lag = self._once_for(frames, "inputs", partial(self._inputs, frames))
        if of_closed_form:
            compute, least = (
                np.concatenate([compute[..., :-1, :] * lag, compute[..., -1:, :]], -2),
                np.ones(()),
            )
        order = self.costs.scenario.communication.order_of(pattern.name)
        streams = pattern.paired and order.lone_backward == "streams"
        stages = _Stages(self.costs, assignment, compute, transfer, streams, of_closed_form)
        reduce, update = self._ends(frames, pattern, assignment)
        best: FloatArray | None = None
        for rank in sorted({0, 1, pattern.pp // 2, pattern.pp - 2, pattern.pp - 1} & set(range(pattern.pp))):
            head, busy, trailing, tail = _parts(pattern, rank, count, stages)
            done = (head + np.maximum(busy, busy - trailing + tail)) * least
            one = done[..., None] + (reduce[..., rank] + update)[:, :, None, None, :]
            best = one if best is None else np.maximum(best, one)
        assert best is not None
        for z, stage in enumerate(self.zero_stages):
            if self._inside_step(frames, stage) and not (pattern.paired and stage == 3):
                moved = self.sharded(frames, pattern, assignment, stage)[:, :, None, :]
                best[..., z] = np.maximum(best[..., z], moved)
        return best

    def _ends(
        self, frames: Sequence[Frame], pattern: Pattern, assignment: StageAssignment
    ) -> tuple[FloatArray, FloatArray]:
        """Least seconds of the end of the step, in two parts.

        The first is the reduction [frames, precisions, ZeRO stages, ranks]; the second is norm, optimizer
        and gather of the slowest rank. Without ZeRO the gradients are all-reduced. ZeRO-3 costs 0 s here, and
        sharded gradients have no reduction here, as their traffic is inside the step (`sharded`). Collectives
        that hide behind the passes count as hidden whole, so recompute and micro-batch do not matter.
        """
        hidden = self.costs.scenario.software.overlap_data_parallel
        seen: dict[tuple[int, ...], tuple[FloatArray, FloatArray]] = {}
        keys = [(f.plan.tp, f.plan.ep, f.plan.expert_tp, f.microbatches > 1) for f in frames]
        for key, frame in zip(keys, frames, strict=True):
            if key not in seen:
                reduce, update = np.zeros((2, len(self.recipes), len(self.zero_stages), pattern.pp))
                for s, zero in enumerate(self.zero_stages):
                    if zero == 3:
                        continue
                    plan = self._staged(frame.plan, zero)
                    for r, recipe in enumerate(self.recipes):
                        if hidden:
                            update[r, s] = self.costs.update_s(plan, recipe, pattern.samples[0], assignment)
                            continue
                        end = self.costs.sync(
                            plan, recipe, "none", pattern.samples[0], assignment, self.sms[0]
                        )
                        reduce[r, s] = [cost.reduce_s for cost in end]
                        update[r, s] = [cost.norm_s + cost.optimizer_s + cost.gather_s for cost in end]
                seen[key] = reduce, update.max(axis=-1)
        return np.array([seen[key][0] for key in keys]), np.array([seen[key][1] for key in keys])

    def _inside_step(self, frames: Sequence[Frame], zero_stage: int) -> bool:
        """Whether collectives over replicas run inside the step of any of the frames."""
        software = self.costs.scenario.software
        synced = (GradientSync.of(self._staged(f.plan, zero_stage), software, f.microbatches) for f in frames)
        return self._once_for(frames, zero_stage, lambda: any(sync.inside_step for sync in synced))

    def _staged(self, plan: ParallelPlan, zero_stage: int) -> ParallelPlan:
        """The plan at a ZeRO stage."""
        key = id(plan), zero_stage
        if key not in self._plans:  # the entry keeps the plan alive, and so its id
            self._plans[key] = plan, plan.model_copy(update={"zero_stage": zero_stage})
        return self._plans[key][1]

    def _sharded_s(
        self, plan: ParallelPlan, recipe: Precision, kind: BlockKind
    ) -> tuple[float, float, float]:
        """Seconds of a block's gather before F, gather before the backward pass, and gradient scatter."""
        sync = self.costs.gradient_sync(plan)
        degrees = plan.tp, plan.ep, plan.expert_tp, plan.pp
        key = (plan.zero_stage, sync, *degrees, self.costs.number(recipe), kind)
        if key not in self._sharded:
            moved = sharded_block(self.costs.pricer(plan, recipe, "none"), kind).transfers
            phases: tuple[Phase, ...] = ("gather F", "gather B", "scatter W")
            first, second, third = (moved[p].payload_s if p in moved else 0.0 for p in phases)
            self._sharded[key] = first, second, third
        return self._sharded[key]

    def _sharded_prices(self, frames: Sequence[Frame], zero_stage: int) -> FloatArray:
        """`_sharded_s` of frames of one schedule [frames, precisions, block kinds, collectives]."""
        of_frames = [(f.plan.tp, f.plan.ep, f.plan.expert_tp, f.microbatches > 1) for f in frames]
        plans = {key: self._staged(f.plan, zero_stage) for key, f in zip(of_frames, frames, strict=True)}
        each = {
            key: np.array([[self._sharded_s(plan, r, k) for k in self.costs.kinds] for r in self.recipes])
            for key, plan in plans.items()
        }
        return np.array([each[key] for key in of_frames])

    def sharded(
        self, frames: Sequence[Frame], pattern: Pattern, assignment: StageAssignment, zero_stage: int
    ) -> FloatArray:
        """Least seconds of the gathers and scatters inside the step [frames, precisions, sms].

        They run one after the other on a stream of their own.
        """
        kinds = self.costs.kinds
        price = self._once_for(
            frames, ("sharded", zero_stage), partial(self._sharded_prices, frames, zero_stage)
        )
        count = np.array([f.microbatches for f in frames], dtype=np.float64)
        most = np.zeros((len(frames), len(self.recipes), len(self.sms)))
        for first, last in zip(pattern.counts[0], pattern.counts[-1], strict=True):
            total = np.zeros(most.shape)
            for kind, forward, backward in sorted({*first, *last}):
                key = (kind, forward, backward)
                often = pattern.along(first.get(key, 0), last.get(key, 0), count)[:, None, None]
                for use in ACTIONS_OF[kind]:
                    stage = forward if use == "F" else backward
                    own = [block.kind for block in assignment.stages[stage]]
                    one = (price[:, :, kinds.index(k), ACTIONS.index(use)] for k in own)
                    moved = sum(one, np.zeros(price.shape[:2]))
                    total = total + often * moved[:, :, None]
            most = np.maximum(most, total)
        return most


def _actions(seconds: Mapping[str, tuple[float, float]]) -> list[tuple[float, float]]:
    return [seconds[action] for action in ACTIONS]


_Computed: TypeAlias = tuple[list[FloatArray], frozenset[tuple[object, ...]]]
"""`BoundBook.compute` of some plans, and the keys of the costs behind it."""


def _computed(
    scenario: Scenario,
    recipes: Sequence[Precision],
    axes: tuple[Sequence[Any], ...],
    plans: Sequence[ParallelPlan],
) -> _Computed | None:
    """Compute plans in a worker process; None if one of them cannot be.

    `recipes` in the order of their numbers, so that keys of costs are those of the process that asks; `axes`:
    recipes, policies, communication SMs, ZeRO stages and placements of the bounds.
    """
    with without_cyclic_collection():
        job = resolve(scenario)
        costs = PlanCosts(job, recipes={recipe: n for n, recipe in enumerate(recipes)})
        bounds = BoundBook(costs, ExpertLoads(scenario, job.shape), *axes)
        try:
            return [bounds.compute(plan) for plan in plans], costs.keys
        except InputError:
            return None  # the process that searches raises it


class _Stages:
    """Seconds of the actions of each stage, computed once for all stages with the same blocks."""

    def __init__(
        self,
        costs: PlanCosts,
        assignment: StageAssignment,
        compute: FloatArray,
        transfer: FloatArray,
        lone_on_streams: bool,
        host: bool,
    ) -> None:
        self.compute, self.transfer, self.lone_on_streams = compute, transfer, lone_on_streams
        self.host = host
        kinds = costs.kinds
        self.counts = np.array(
            [[sum(b.kind == kind for b in stage) for kind in kinds] for stage in assignment.stages],
            dtype=np.float64,
        )
        self.routed = np.array([kind in costs.routed for kind in kinds], dtype=np.float64)
        self._seconds: dict[object, FloatArray] = {}

    def action(self, kind: str, stage: int) -> FloatArray:
        """Seconds of an action outside overlapped pairs, whose transfers run in series.

        A backward alone takes those of its busier stream where the schedule runs it on two.
        """
        key = (kind, tuple(self.counts[stage]))
        if key not in self._seconds:
            total = sum(self._work(use, stage, 0) + self._work(use, stage, 1) for use in ACTIONS_OF[kind])
            moved = sum(self._moved(use, stage) for use in ACTIONS_OF[kind] if use != "W")
            beside = kind == "B" and self.lone_on_streams
            join = np.maximum if beside else np.add
            seconds = join(np.asarray(total)[:, :, :, None], np.asarray(moved))
            if self.host:  # transfers hide launches of their own pass, also where compute runs beside them
                least = self._host(kind, stage) - np.asarray(moved) * beside
                seconds = np.maximum(seconds, least)
            self._seconds[key] = seconds
        return self._seconds[key]

    def pair(self, weights: bool, forward: int, backward: int) -> FloatArray:
        """Seconds of an overlapped pair, those of the busier of its two streams."""
        key = (weights, tuple(self.counts[forward]), tuple(self.counts[backward]))
        if key not in self._seconds:
            uses = [("F", forward), ("I", backward), *([("W", backward)] if weights else [])]
            work = sum(self._work(use, stage, 0) for use, stage in uses)
            small = sum(self._work(use, stage, 1) for use, stage in uses)
            moved = sum(self._moved(use, stage) for use, stage in uses if use != "W")
            streams = np.asarray(work)[:, :, :, None], np.asarray(small)[:, :, :, None] + np.asarray(moved)
            self._seconds[key] = np.maximum(*streams)
            if self.host:
                least = self._host("F", forward) + self._host("B", backward) * weights
                self._seconds[key] = np.maximum(self._seconds[key], least)
        return self._seconds[key]

    def _host(self, action: str, stage: int) -> FloatArray:
        """Least seconds of an action by the calls of the host [frames, precisions, classes, 1].

        0 for the parts of a split backward, over which it depends on the trainer how its calls are spread.
        """
        if action not in ("F", "B"):
            return np.zeros(())
        each = self.compute[:, :, :, :, len(ACTIONS), ("F", "B").index(action)]
        return self._of_stage(each, stage)[..., None]

    def _work(self, action: str, stage: int, part: int) -> FloatArray:
        """Seconds of compute (part 0) or transfers' small kernels (part 1) [frames, precisions, classes]."""
        return self._of_stage(self.compute[:, :, :, :, ACTIONS.index(action), part], stage)

    def _of_stage(self, each: FloatArray, stage: int) -> FloatArray:
        """The sum over the blocks of a stage [frames, precisions, classes] of seconds of each kind."""
        counts = self.counts[stage]
        by_kind = (each[..., k] * counts[k] for k in range(len(counts)) if counts[k])
        return sum(by_kind, np.zeros(each.shape[:-1]))

    def _moved(self, action: str, stage: int) -> FloatArray:
        blocks = float((self.counts[stage] * self.routed).sum())
        return np.asarray(self.transfer[:, :, None, :, ACTIONS.index(action)] * blocks)


def _parts(
    pattern: Pattern, rank: int, count: FloatArray, stages: _Stages
) -> tuple[FloatArray | float, FloatArray, FloatArray | float, FloatArray | float]:
    """Seconds of one rank's step in four parts.

    They are (forwards before its first action, own work, trailing weight gradients, input gradients of
    other stages after its last one).
    """
    first, last = pattern.counts[0][rank], pattern.counts[-1][rank]
    busy: FloatArray | float = 0.0
    for key in sorted({*first, *last}):
        often = pattern.along(first.get(key, 0), last.get(key, 0), count)
        busy = busy + often[:, None, None, None] * _seconds(key, stages)
    keys = pattern.ends[rank]
    head = sum(stages.action("F", stage) for stage in range(keys.first_stage))
    trailing = sum(stages.action("W", stage) for stage in keys.trailing_weights)
    step = "B" if not pattern.split else "I"
    tail = sum(stages.action(step, stage) for stage in range(keys.last_stage))
    return head, np.asarray(busy), trailing, tail


def _seconds(key: Key, stages: _Stages) -> FloatArray:
    kind, forward, backward = key
    if kind in ("F&B", "F&I"):
        return stages.pair(kind == "F&B", forward, backward)
    return stages.action(kind, max(forward, backward))
