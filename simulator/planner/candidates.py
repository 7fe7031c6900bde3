"""Every plan of a space that is legal and fits, with its memory and its lower bound."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from moesim.hwmodels.calibration import CalibrationProfile
from moesim.hwmodels.cluster import Cluster
from moesim.hwmodels.errors import InputError
from moesim.simulator.layout.stages import StageAssignment, balanced, blocks_of, from_layers_per_stage
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.planner.bound import BoundBook
from moesim.simulator.planner.frames import Frame, legal_frames
from moesim.simulator.planner.memory import MemoryBook
from moesim.simulator.planner.pattern import Pattern
from moesim.simulator.planner.prices import Cell, PriceBook
from moesim.simulator.planner.refusals import Refusals
from moesim.simulator.planner.space import Space
from moesim.simulator.scenario import Scenario

LAYOUTS = 2
"""Stage layouts tried for each number of stages: those that suit most of the priced plans."""

RESOLUTION = 8
"""Weights of blocks relative to a layer are told apart to one in so many when layouts are chosen."""

Array = npt.NDArray[np.float64]
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Group:
    """Frames that share one schedule pattern, with the layouts tried for it."""

    pattern: Pattern
    frames: list[Frame]
    layouts: tuple[StageAssignment, ...]


@dataclass(slots=True)
class Candidates:
    """Plans that are legal and fit: one entry each in the arrays.

    `index` counts within the group over (frame, precision, policy, sms, ZeRO stage); `time_s` is filled
    by the search, NaN before.
    """

    space: Space
    groups: list[Group]
    group: npt.NDArray[np.int32]
    index: npt.NDArray[np.int64]
    layout: npt.NDArray[np.int8]
    memory: Array
    bound: Array
    family: npt.NDArray[np.int32]
    time_s: Array
    refused: Refusals
    legal: int
    book: PriceBook

    def axes(self, number: int) -> tuple[Frame, int, int, int, int]:
        """Frame and positions in the lists of precisions, policies, SMs and ZeRO stages."""
        group = self.groups[int(self.group[number])]
        place = np.unravel_index(int(self.index[number]), (len(group.frames), *_inner(self.space)))
        return (group.frames[int(place[0])], *(int(n) for n in place[1:]))  # type: ignore[return-value]

    def assignment(self, number: int) -> StageAssignment:
        """Its stage layout."""
        return self.groups[int(self.group[number])].layouts[int(self.layout[number])]


def _inner(space: Space) -> tuple[int, int, int, int]:
    return len(space.precision), len(space.recompute), len(space.sms), len(space.zero_stage)


@dataclass(slots=True)
class _Gathered:
    """What the groups add to the arrays."""

    parts: list[tuple[Array, ...]] = field(default_factory=list)
    legal: int = 0
    families: int = 0
    nearest: tuple[float, str] = (float("inf"), "")


def find_candidates(
    scenario: Scenario,
    shape: ModelShape,
    cluster: Cluster,
    profile: CalibrationProfile,
    space: Space,
    fixed_layers: tuple[int, ...] | None,
    most_s: float,
    say: Say,
) -> Candidates:
    """Enumerate, refuse, count memory and bound every plan of a space on one cluster.

    Plans whose lower bound is above `most_s` seconds are refused. Raises InputError where the profile
    prices none of the precisions.
    """
    batch = scenario.batch
    frames, refused = legal_frames(space, shape, cluster, batch.sequences, batch.sequence_length)
    say(f"{len(frames) * space.inner:,} of {space.size:,} plans divide GPUs, model, batch and schedule")
    book = PriceBook(scenario, shape, cluster, profile)
    space = _priceable(book, frames, space, refused)
    bounds = BoundBook(book, space.recipes, space.recompute, space.sms, space.zero_stage)
    memory = MemoryBook(
        shape,
        batch.sequence_length,
        space.recipes,
        space.recompute,
        space.sms,
        space.zero_stage,
        scenario.routing.redundant_experts,
        scenario.software,
    )
    by_pattern: dict[int, list[Frame]] = {}
    for frame in frames:
        by_pattern.setdefault(id(frame.pattern), []).append(frame)
    layouts = _layouts(shape, bounds, frames, fixed_layers, refused, space)
    capacity = cluster.accelerator.hbm_bytes * (1.0 - space.headroom)
    gathered = _Gathered()
    groups: list[Group] = []
    for own in by_pattern.values():
        group = Group(own[0].pattern, own, layouts.get(own[0].pattern.n_stages, ()))
        if group.layouts:
            _add(gathered, len(groups), group, space, memory, bounds, capacity, most_s, refused)
            groups.append(group)
    if gathered.nearest[1] and "out of memory" in refused.counts:
        refused.examples["out of memory"] = gathered.nearest[1]
    columns = (
        [np.concatenate(column) for column in zip(*gathered.parts, strict=True)] if gathered.parts else []
    )
    columns = columns or [np.zeros(0)] * 6
    say(f"{book.priced:,} price tables, {len(columns[0]):,} plans fit")
    return Candidates(
        space,
        groups,
        columns[0].astype(np.int32),
        columns[1].astype(np.int64),
        columns[2].astype(np.int8),
        columns[3],
        columns[4],
        columns[5].astype(np.int32),
        np.full(len(columns[0]), np.nan),
        refused,
        gathered.legal,
        book,
    )


def _add(
    gathered: _Gathered,
    number: int,
    group: Group,
    space: Space,
    memory: MemoryBook,
    bounds: BoundBook,
    capacity: float,
    most_s: float,
    refused: Refusals,
) -> None:
    """Memory and bound of one group's plans; of several layouts the one with the lowest bound that fits."""
    frames, pattern = group.frames, group.pattern
    legal = _combinations(frames, pattern, space, refused)
    best = np.full(legal.shape, np.inf)
    used, chosen = np.full(legal.shape, np.inf), np.zeros(legal.shape, dtype=np.int8)
    least = np.full(legal.shape, np.inf)
    for n, layout in enumerate(group.layouts):
        bytes_ = memory.total(frames, pattern, layout)
        bound = bounds.step(frames, pattern, layout)[:, :, bounds.class_of]
        if 3 in space.zero_stage and not pattern.paired:
            z = space.zero_stage.index(3)
            moved = bounds.sharded(frames, pattern, layout)[:, :, None, :]
            bound[..., z] = np.maximum(bound[..., z], moved)
        better = (bytes_ <= capacity) & (bound < best)
        best = np.where(better, bound, best)
        used = np.where(better, bytes_, used)
        chosen[better] = n
        least = np.minimum(least, bytes_)
    gathered.legal += int(legal.sum())
    over = legal & np.isinf(best)
    if over.any():
        place = np.unravel_index(int(np.where(over, least, np.inf).argmin()), over.shape)
        label = f"{frames[place[0]].label} needs {least[place] / 1e9:.1f} of {capacity / 1e9:.1f} GB"
        refused.add("out of memory", int(over.sum()), label)
        gathered.nearest = min(gathered.nearest, (float(least[place]), label))
    slow = legal & ~over & (best > most_s)
    if slow.any():
        place = np.unravel_index(int(np.where(slow, best, np.inf).argmin()), slow.shape)
        text = (
            f"{frames[place[0]].label} needs at least {best[place]:.2f} s a step, {most_s:.2f} s are allowed"
        )
        refused.add("too slow for the deadline or budget, whatever else", int(slow.sum()), text)
    keep = np.nonzero((legal & ~over & ~slow).ravel())[0]
    frame = keep // space.inner
    gathered.parts.append(
        (
            np.full(len(keep), number, dtype=np.float64),
            keep.astype(np.float64),
            chosen.ravel()[keep].astype(np.float64),
            used.ravel()[keep],
            best.ravel()[keep],
            (gathered.families + frame).astype(np.float64),
        )
    )
    gathered.families += len(frames)


def _combinations(
    frames: Sequence[Frame], pattern: Pattern, space: Space, refused: Refusals
) -> npt.NDArray[np.bool_]:
    """What frame, precision, policy, SMs and ZeRO stage together allow."""
    legal = np.ones((len(frames), *_inner(space)), dtype=bool)
    if pattern.paired and 3 in space.zero_stage:
        z = space.zero_stage.index(3)
        refused.add(
            "parallel.zero_stage=3 has no slot for its parameter gathers in an overlapped pair",
            int(legal[..., z].sum()),
            f"{frames[0].label} zero_stage=3",
        )
        legal[..., z] = False
    alone = np.array([f.plan.ep == 1 for f in frames])
    if alone.any() and len(space.sms) > 1:
        spare = legal[alone][:, :, :, 1:]
        refused.add(
            "communication.sms makes no difference without expert parallelism: one value stands for all",
            int(spare.sum()),
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
) -> dict[int, tuple[StageAssignment, ...]]:
    """Layouts by number of stages: fixed, or by dynamic programming over the blocks' compute (eq. S2).

    The balance differs from plan to plan, but not by much: weights relative to a layer are rounded, and
    the layouts that suit most plans are tried.
    """
    blocks = blocks_of(shape)
    counts = sorted({f.pattern.n_stages for f in frames})
    if fixed is not None:
        for n in counts:
            if n != len(fixed):
                many = sum(space.inner for f in frames if f.pattern.n_stages == n)
                refused.add(
                    "another number of stages than stages.layers", many, f"{n} stages, not {len(fixed)}"
                )
        return {len(fixed): (from_layers_per_stage(blocks, fixed),)}
    kinds = bounds.book.kinds
    layer = kinds.index("moe" if "moe" in kinds else "dense")
    seen: Counter[tuple[int, ...]] = Counter()
    for plan in {Cell.of(f.plan): f.plan for f in frames}.values():
        for row in bounds.weights(plan).reshape(-1, len(kinds)):
            seen[tuple(round(RESOLUTION * float(value) / float(row[layer])) for value in row)] += 1
    order = sorted(seen, key=lambda weights: (-seen[weights], weights))
    found = {}
    for n in counts:
        distinct: dict[StageAssignment, int] = {}
        for weights in order[: 8 * LAYOUTS]:
            by_kind = dict(zip(kinds, weights, strict=True))
            layout = _balanced(blocks, tuple(float(by_kind[b.kind]) for b in blocks), n)
            distinct[layout] = distinct.get(layout, 0) + seen[weights]
        best = sorted(distinct, key=lambda item: (-distinct[item], item.layers_per_stage))
        found[n] = tuple(best[:LAYOUTS])
    return found


@lru_cache(maxsize=4096)
def _balanced(blocks: tuple[object, ...], weights: tuple[float, ...], n: int) -> StageAssignment:
    return balanced(blocks, weights, n)  # type: ignore[arg-type]


def _priceable(book: PriceBook, frames: Sequence[Frame], space: Space, refused: Refusals) -> Space:
    """The space without the precisions that cannot be priced here; InputError if none is left."""
    kept, problem = [], ""
    for precision, recipe in zip(space.precision, space.recipes, strict=True):
        try:
            if frames:
                book.alone(frames[0].plan, recipe, "none")
            kept.append(precision)
        except InputError as error:
            problem = str(error)
            refused.add_error(problem, len(frames) * space.inner // len(space.precision), recipe.linear)
    if not kept:
        raise InputError(problem)
    return replace(space, precision=tuple(kept))
