"""Finds every plan of a space that is legal and fits, with its memory and its lower bound."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Executor
from functools import lru_cache
from math import inf

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from moesim.hwmodels.arrays import BoolArray, FloatArray, IntArray
from moesim.hwmodels.errors import InputError
from moesim.simulator.cost.plan_costs import PlanCosts
from moesim.simulator.layout.job import ResolvedJob
from moesim.simulator.layout.parallel import hides_experts, repeats_experts
from moesim.simulator.layout.stages import StageAssignment, balanced, blocks_of, from_layers_per_stage
from moesim.simulator.memory.gpu import is_admitted
from moesim.simulator.model.recompute import recompute_label
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.planner.bound import BoundBook
from moesim.simulator.planner.closed_form import LayerSplit
from moesim.simulator.planner.expert_loads import ExpertLoads
from moesim.simulator.planner.frames import Frame, legal_frames
from moesim.simulator.planner.goal import OnProgress, no_progress, scaled
from moesim.simulator.planner.memory import MemoryBook
from moesim.simulator.planner.placements import cost_key, with_placement
from moesim.simulator.planner.plan_arrays import Candidates, FrameGroup, inner_axes
from moesim.simulator.planner.refusals import AT_RISK, FULL, NO_HEADROOM, TOO_SLOW, Refusals
from moesim.simulator.planner.replay import Pattern
from moesim.simulator.planner.space import Space
from moesim.simulator.planner.trainer_limits import TrainerLimits

LAYOUTS = 2
"""Stage layouts tried for each number of stages, those that balance most of the priced plans."""

RESOLUTION = 8
"""Steps into which a layer's weight is divided when the weights of blocks are rounded for a layout."""

COUNTED, PRICED = 0.13, 0.46
"""Shares of the time of finding candidates after which the plans are counted and the splits are priced, as
measured on the home case."""

GIB = 2.0**30


def find_candidates(
    job: ResolvedJob,
    space: Space,
    fixed_layers: tuple[int, ...] | None = None,
    most_s: float = inf,
    say: OnProgress = no_progress,
    limits: TrainerLimits | None = None,
    pool: Executor | None = None,
) -> Candidates:
    """Enumerate the plans of a space on one cluster, count their memory and compute their lower bounds.

    `fixed_layers`: layers of every stage, None to balance them. Plans that are illegal, do not fit or have a
    lower bound above `most_s` seconds are refused, and with `limits` those that a trainer cannot run. The
    processes of `pool` help with the prices. Raises InputError if the profile prices none of the precisions.
    """
    batch = job.scenario.batch
    say(0.0, "counting legal plans")
    awaited, kernels = job.scenario.software.awaited_sends, job.scenario.communication.kernels
    sizes = (batch.sequences, batch.sequence_length)
    frames, refused = legal_frames(space, job.shape, job.cluster, *sizes, kernels, awaited=awaited)
    if limits is not None:
        frames = limits.frames(frames, space.per_frame, refused)
    say(
        COUNTED,
        f"{len(frames) * space.per_frame:,} of {space.size:,} plans divide GPUs, model, batch and schedule",
    )
    costs: dict[tuple[int, bool], PlanCosts] = {}
    for placement in sorted(space.placement, key=cost_key):
        placed = job.with_scenario(with_placement(job.scenario, placement))
        costs.setdefault(cost_key(placement), PlanCosts(placed))
    least = costs[min(costs)]
    # Precisions that the profile cannot price are left out.
    kept, problem = [], ""
    for precision, recipe in zip(space.precision, space.recipes, strict=True):
        try:
            if frames:
                least.alone(frames[0].plan, recipe, "none")
            kept.append(precision)
        except InputError as error:
            problem = str(error)
            refused.add_error(problem, len(frames) * space.per_frame // len(space.precision), recipe.linear)
    if not kept:
        raise InputError(problem)
    space = replace(space, precision=tuple(kept))
    gathering = _Gathering(job, space, least, most_s, refused, limits)
    layouts = _layouts(
        job.shape, gathering.bounds, frames, fixed_layers, refused, space, scaled(say, COUNTED, PRICED), pool
    )
    by_pattern: dict[int, list[Frame]] = {}
    for frame in frames:
        by_pattern.setdefault(id(frame.pattern), []).append(frame)
    for number, own in enumerate(by_pattern.values()):
        share = PRICED + (1.0 - PRICED) * number / len(by_pattern)
        say(share, f"bounds and memory: {gathering.fitting:,} plans fit")
        group = FrameGroup(own[0].pattern, own, layouts.get(own[0].pattern.n_stages, ()))
        if group.layouts:
            gathering.add(group)
    candidates = gathering.candidates(costs)
    say(1.0, f"{candidates.priced:,} price tables, {candidates.fitting:,} plans fit")
    return candidates


class _Counted(Struct):
    """Arrays over the plans of one group [replicas, frames, precisions, policies, sms, ZeRO stages].

    `bound` and `memory` belong to the layout with the lowest bound among those that fit, and `layout` is its
    position. `least` are the bytes in use, and those reserved at most, in the layout that uses least
    [replicas, 2, ...].
    """

    bound: FloatArray
    memory: FloatArray
    layout: npt.NDArray[np.int8]
    least: FloatArray


class _Gathering:
    """Collects the plans of all groups of frames that are legal, fit and may be fast enough."""

    def __init__(
        self,
        job: ResolvedJob,
        space: Space,
        costs: PlanCosts,
        most_s: float,
        refused: Refusals,
        limits: TrainerLimits | None,
    ) -> None:
        self.space, self.most_s, self.refused, self.limits = space, most_s, refused, limits
        self.loads = ExpertLoads(job.scenario, job.shape)
        self.bounds = BoundBook(
            costs, self.loads, space.recipes, space.recompute, space.sms, space.zero_stage, space.placement
        )
        self.memory = MemoryBook(job.scenario, job.shape, space)
        self.capacity = job.cluster.accelerator.hbm_bytes
        self.replicas = tuple(sorted({cost_key(p)[0] for p in space.placement}))
        self.groups: list[FrameGroup] = []
        self.legal = self.fitting = 0
        self._parts: list[tuple[FloatArray, ...]] = []
        self._least: list[FloatArray] = []
        self._families = 0
        self._nearest: dict[str, tuple[float, str]] = {}
        """The nearest miss of the plans refused for their memory, as (bytes, label) by reason."""

    def add(self, group: FrameGroup) -> None:
        """Count memory and bounds of one group's plans, and keep those that fit and may be fast enough.

        Of several layouts the one with the lowest bound that fits is chosen, for each number of replicas.
        The bound is that of the fewest replicas, which holds with any placement.
        """
        legal = _combinations(group.frames, group.pattern, self.space, self.refused)
        if self.limits is not None:
            legal &= self.limits.combinations(group.frames, self.space, self.refused)
        counted = self._counted(group, legal.shape)
        places = _placed(group.frames, legal, self.space, self.loads, self.replicas, self.refused)
        slow = legal & (counted.bound[0] > self.most_s) & np.isfinite(counted.bound[0])
        usable = np.zeros(legal.shape, dtype=bool)
        for k, counts in enumerate(places):
            often = counts[:, None, None, None, None]
            over = legal & np.isinf(counted.memory[k]) & (often > 0)
            counted.memory[k][over | (often == 0)] = np.inf
            fits = legal & ~over & (often > 0)
            usable |= fits
            self.legal += int((legal * often).sum())
            self.fitting += int(((fits & ~slow) * often).sum())
            # Those that are `over` are out of memory, or lack the head-room.
            used, reserved = counted.least[k]
            full, headroom = used > self.capacity, self.space.headroom
            for reason, refused, needed, verb, limit in (
                (FULL, over & full, used, "needs", self.capacity),
                (AT_RISK, over & ~full, reserved, "may reserve", self.capacity)
                if headroom is None
                else (NO_HEADROOM, over & ~full, used, "needs", self.capacity * (1.0 - headroom)),
            ):
                if not refused.any():
                    continue
                place = np.unravel_index(int(np.where(refused, needed, np.inf).argmin()), refused.shape)
                size = f"{needed[place] / GIB:.2f} of {limit / GIB:.2f} GiB"
                miss = float(needed[place]), f"{group.frames[int(place[0])].label} {verb} {size}"
                self.refused.add(reason, int((refused * often).sum()), miss[1])
                self._nearest[reason] = min(self._nearest.get(reason, miss), miss)
            self._refuse_slow(group.frames, slow & fits, counted.bound[0], often)
        keep = np.nonzero((usable & ~slow).ravel())[0]
        pairs = zip(counted.layout, counted.memory, strict=True)
        self._parts.append(
            (
                np.full(len(keep), len(self.groups), dtype=np.float64),
                keep.astype(np.float64),
                counted.bound[0].ravel()[keep],
                (self._families + keep // self.space.inner).astype(np.float64),
                *(column.ravel()[keep].astype(np.float64) for pair in pairs for column in pair),
            )
        )
        self._least.append(self._of_closed_form(group, counted, keep))
        self._families += len(group.frames)
        self.groups.append(group)

    def _of_closed_form(self, group: FrameGroup, counted: _Counted, keep: IntArray) -> FloatArray:
        """Bounds of the closed forms of the plans that are kept, which matter where a host delays work."""
        bound = counted.bound.reshape(len(self.replicas), -1)[:, keep]
        if self.bounds.costs.scenario.software.host is None or not len(keep):
            return np.asarray(bound[0])
        least = np.full(len(keep), np.inf)
        for k, own in enumerate(bound):  # another number of replicas may have another layout
            layouts = np.where(np.isfinite(own), counted.layout[k].ravel()[keep], -1)
            for n in set(layouts.tolist()) - {-1}:
                mine = np.nonzero(layouts == n)[0]
                frames, place = np.unique(keep[mine] // self.space.inner, return_inverse=True)
                chosen = [group.frames[frame] for frame in frames]
                each = self.bounds.step(chosen, group.pattern, group.layouts[n], of_closed_form=True)
                inner = each[:, :, self.bounds.class_of].reshape(len(frames), -1)
                least[mine] = np.minimum(least[mine], inner[place, keep[mine] % self.space.inner])
        return np.asarray(np.maximum(least, bound[0]))

    def candidates(self, costs: dict[tuple[int, bool], PlanCosts]) -> Candidates:
        """All plans that were kept, as arrays."""
        self.refused.examples.update({reason: label for reason, (_, label) in self._nearest.items()})
        columns = [np.concatenate(column) for column in zip(*self._parts, strict=True)]
        columns = columns or [np.zeros(0)] * (4 + 2 * len(self.replicas))
        return Candidates(
            space=self.space,
            groups=self.groups,
            group=columns[0].astype(np.int32),
            index=columns[1].astype(np.int64),
            layout=np.array(columns[4::2]).astype(np.int8),
            memory=np.min(columns[5::2], axis=0),
            bound=columns[2],
            least_s=np.concatenate([*self._least, np.zeros(0)]),
            family=columns[3].astype(np.int32),
            time_s=np.full(len(columns[0]), np.nan),
            refused=self.refused,
            legal=self.legal,
            fitting=self.fitting,
            costs_of=costs,
            loads=self.loads,
            replicas=self.replicas,
            bytes_of=np.array(columns[5::2]),
            placement=np.zeros(len(columns[0]), dtype=np.int8),
        )

    def _counted(self, group: FrameGroup, shape: tuple[int, ...]) -> _Counted:
        """Memory and bound of every plan in the group's layouts."""
        frames, pattern = group.frames, group.pattern
        whole = (len(self.replicas), *shape)
        best, used = np.full(whole, np.inf), np.full(whole, np.inf)
        least = np.full((len(self.replicas), 2, *shape), np.inf)
        chosen = np.zeros(whole, dtype=np.int8)
        for n, layout in enumerate(group.layouts):
            each = [self.memory.fullest(frames, pattern, layout, more) for more in self.replicas]
            bound = self.bounds.step(frames, pattern, layout)[:, :, self.bounds.class_of]
            for k, fullest in enumerate(each):
                better = is_admitted(*fullest, self.capacity, self.space.headroom) & (bound < best[k])
                best[k] = np.where(better, bound, best[k])
                used[k] = np.where(better, fullest.used, used[k])
                chosen[k][better] = n
                fewer = fullest.used < least[k][0]
                least[k] = np.where(fewer, fullest, least[k])
        return _Counted(best, used, chosen, least)

    def _refuse_slow(
        self, frames: Sequence[Frame], slow: BoolArray, bound: FloatArray, often: IntArray
    ) -> None:
        if not slow.any():
            return
        place = np.unravel_index(int(np.where(slow, bound, np.inf).argmin()), slow.shape)
        text = (
            f"{frames[int(place[0])].label} needs at least {bound[place]:.2f} s a step, "
            f"{self.most_s:.2f} s are allowed"
        )
        self.refused.add(TOO_SLOW, int((slow * often).sum()), text)


def _placed(
    frames: Sequence[Frame],
    legal: BoolArray,
    space: Space,
    loads: ExpertLoads,
    replicas: Sequence[int],
    refused: Refusals,
) -> IntArray:
    """Number of legal placements [replicas, frames]; the other placements are refused."""
    counts = np.zeros((len(replicas), len(frames)), dtype=np.int64)
    plans = legal.reshape(len(frames), -1).sum(axis=1)
    for placement in space.placement:
        k = replicas.index(cost_key(placement)[0])
        for n, frame in enumerate(frames):
            problem = loads.problem(frame.layout, placement)
            if problem is None:
                counts[k, n] += 1
            else:
                refused.add_error(problem, int(plans[n]), frame.label)
    return counts


def _combinations(frames: Sequence[Frame], pattern: Pattern, space: Space, refused: Refusals) -> BoolArray:
    """Whether each plan is legal [frames, precisions, policies, sms, ZeRO stages]."""
    legal = np.ones((len(frames), *inner_axes(space)), dtype=bool)
    if pattern.paired and 3 in space.zero_stage:
        z = space.zero_stage.index(3)
        refused.add(
            "parallel.zero_stage=3 has no slot for its parameter gathers in an overlapped pair",
            int(legal[..., z].sum()) * len(space.placement),
            f"{frames[0].label} zero_stage=3",
        )
        legal[..., z] = False
    repeating = [i for i, policy in enumerate(space.recompute) if repeats_experts(policy)]
    if hides_experts(frames[0].schedule) and repeating:
        refused.add(
            "recompute of whole layers or of experts runs the transfers again that the schedule hides",
            int(legal[:, :, repeating].sum()) * len(space.placement),
            f"{frames[0].label} recompute={recompute_label(space.recompute[repeating[0]])}",
        )
        legal[:, :, repeating] = False
    alone = np.array([f.plan.ep == 1 for f in frames])
    if alone.any() and len(space.sms) > 1:
        spare = legal[alone][:, :, :, 1:]
        refused.add(
            "communication.sms makes no difference without expert parallelism: one value stands for all",
            int(spare.sum()) * len(space.placement),
            f"{frames[int(alone.argmax())].label} sms={space.sms[1]}",
        )
        legal[np.nonzero(alone)[0], :, :, 1:] = False
    return legal


def _layouts(
    shape: ModelShape,
    bounds: BoundBook,
    frames: Sequence[Frame],
    fixed: tuple[int, ...] | None,
    refused: Refusals,
    space: Space,
    say: OnProgress,
    pool: Executor | None,
) -> dict[int, tuple[StageAssignment, ...]]:
    """Layouts by number of stages: the fixed one, or an even one and those that balance the blocks (eq. S2).

    The weights of blocks relative to a layer hardly differ between plans. They are rounded, and the layouts
    that balance most plans are kept.
    """
    blocks = blocks_of(shape)
    counts = sorted({f.pattern.n_stages for f in frames})
    if fixed is not None:
        for n in counts:
            if n != len(fixed):
                many = sum(space.per_frame for f in frames if f.pattern.n_stages == n)
                refused.add(
                    "another number of stages than stages.layers", many, f"{n} stages, not {len(fixed)}"
                )
        return {len(fixed): (from_layers_per_stage(blocks, fixed),)}
    kinds = bounds.costs.kinds
    layer = kinds.index(shape.main_layer_kind)
    cells = {(LayerSplit.of(f.plan), f.pattern.paired): f.plan for f in frames}
    seen: Counter[tuple[int, ...]] = Counter()

    def alive(done: int) -> None:
        say(done / len(cells), f"prices: {done} of {len(cells)} ways to split a layer")

    if pool is not None:
        bounds.compute_with(list({split: plan for (split, _), plan in cells.items()}.values()), pool, alive)
    for done, ((_, paired), plan) in enumerate(cells.items()):
        alive(done)
        for row in bounds.weights(plan, paired).reshape(-1, len(kinds)):
            seen[tuple(round(RESOLUTION * float(value) / float(row[layer])) for value in row)] += 1
    order = sorted(seen, key=lambda weights: (-seen[weights], weights))
    layouts = {}
    for n in counts:
        kept: list[StageAssignment] = []
        for ends_alone in (False, True):  # bidirectional pipelines are faster with a layer on both ends
            distinct: dict[StageAssignment, int] = {}
            for weights in order[: 8 * LAYOUTS]:
                by_kind = dict(zip(kinds, weights, strict=True))
                layout = _balanced(blocks, tuple(float(by_kind[b.kind]) for b in blocks), n, ends_alone)
                distinct[layout] = distinct.get(layout, 0) + seen[weights]
            best = sorted(distinct, key=lambda item: (-distinct[item], item.layers_per_stage))
            kept += best[:LAYOUTS]
        if shape.n_layers % n == 0:
            kept.append(from_layers_per_stage(blocks, (shape.n_layers // n,) * n))
        layouts[n] = tuple(dict.fromkeys(kept))
    return layouts


@lru_cache(maxsize=4096)
def _balanced(
    blocks: tuple[object, ...], weights: tuple[float, ...], n: int, ends_alone: bool
) -> StageAssignment:
    return balanced(blocks, weights, n, ends_alone=ends_alone)  # type: ignore[arg-type]
