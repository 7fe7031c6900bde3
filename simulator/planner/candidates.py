"""Every plan of a space that is legal and fits, with its memory and its lower bound."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from moesim.hwmodels.arrays import BoolArray, FloatArray, IntArray
from moesim.hwmodels.calibration import CalibrationProfile
from moesim.hwmodels.cluster import Cluster
from moesim.hwmodels.errors import InputError
from moesim.simulator.layout.stages import StageAssignment, balanced, blocks_of, from_layers_per_stage
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.planner.bound import BoundBook
from moesim.simulator.planner.expert_loads import ExpertLoads
from moesim.simulator.planner.found import Candidates, Group, inner_axes
from moesim.simulator.planner.frames import Frame, legal_frames
from moesim.simulator.planner.memory import MemoryBook
from moesim.simulator.planner.pattern import Pattern
from moesim.simulator.planner.placements import price_key, with_placement
from moesim.simulator.planner.prices import Cell, PriceBook
from moesim.simulator.planner.progress import Say, part
from moesim.simulator.planner.refusals import Refusals
from moesim.simulator.planner.space import Space
from moesim.simulator.scenario import Scenario

LAYOUTS = 2
"""Stage layouts tried for each number of stages: those that suit most of the priced plans."""

RESOLUTION = 8
"""Weights of blocks relative to a layer are told apart to one in so many when layouts are chosen."""

GIB = 2.0**30


@dataclass(slots=True)
class _Gathered:
    """What the groups add to the arrays."""

    parts: list[tuple[FloatArray, ...]] = field(default_factory=list)
    legal: int = 0
    fitting: int = 0
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
    say(0.0, "counting legal plans")
    frames, refused = legal_frames(space, shape, cluster, batch.sequences, batch.sequence_length)
    say(
        0.2,
        f"{len(frames) * space.per_frame:,} of {space.size:,} plans divide GPUs, model, batch and schedule",
    )
    books: dict[tuple[int, bool], PriceBook] = {}
    for placement in sorted(space.placement, key=price_key):
        placed = with_placement(scenario, placement)
        books.setdefault(price_key(placement), PriceBook(placed, shape, cluster, profile))
    book = books[min(books)]
    loads = ExpertLoads(scenario, shape)
    space = _priceable(book, frames, space, refused)
    bounds = BoundBook(
        book, space.recipes, space.recompute, space.sms, space.zero_stage, loads, space.placement
    )
    memory = MemoryBook(scenario, shape, space)
    by_pattern: dict[int, list[Frame]] = {}
    for frame in frames:
        by_pattern.setdefault(id(frame.pattern), []).append(frame)
    layouts = _layouts(shape, bounds, frames, fixed_layers, refused, space, part(say, 0.2, 0.5))
    capacity = cluster.accelerator.hbm_bytes * (1.0 - space.headroom)
    replicas = tuple(sorted({price_key(p)[0] for p in space.placement}))
    gathered = _Gathered()
    groups: list[Group] = []
    for number, own in enumerate(by_pattern.values()):
        say(0.5 + 0.5 * number / len(by_pattern), f"bounds and memory: {gathered.fitting:,} plans fit")
        group = Group(own[0].pattern, own, layouts.get(own[0].pattern.n_stages, ()))
        if group.layouts:
            _add(
                gathered,
                len(groups),
                group,
                space,
                memory,
                bounds,
                loads,
                replicas,
                capacity,
                most_s,
                refused,
            )
            groups.append(group)
    if gathered.nearest[1] and "out of memory" in refused.counts:
        refused.examples["out of memory"] = gathered.nearest[1]
    width = 4 + 2 * len(replicas)
    columns = (
        [np.concatenate(column) for column in zip(*gathered.parts, strict=True)] if gathered.parts else []
    )
    columns = columns or [np.zeros(0)] * width
    say(1.0, f"{sum(b.priced for b in books.values()):,} price tables, {gathered.fitting:,} plans fit")
    return Candidates(
        space,
        groups,
        columns[0].astype(np.int32),
        columns[1].astype(np.int64),
        np.array(columns[4::2]).astype(np.int8),
        np.min(columns[5::2], axis=0),
        columns[2],
        columns[3].astype(np.int32),
        np.full(len(columns[0]), np.nan),
        refused,
        gathered.legal,
        gathered.fitting,
        books,
        loads,
        replicas,
        np.array(columns[5::2]),
        np.zeros(len(columns[0]), dtype=np.int8),
    )


def _add(
    gathered: _Gathered,
    number: int,
    group: Group,
    space: Space,
    memory: MemoryBook,
    bounds: BoundBook,
    loads: ExpertLoads,
    replicas: Sequence[int],
    capacity: float,
    most_s: float,
    refused: Refusals,
) -> None:
    """Memory and bound of one group's plans; of several layouts the one with the lowest bound that fits.

    The bound is that of the fewest replicas and holds with any placement; memory is counted with each
    number of replicas, in the layout that is chosen with them.
    """
    frames, pattern = group.frames, group.pattern
    legal = _combinations(frames, pattern, space, refused)
    places = _placed(frames, legal, space, loads, replicas, refused)  # [numbers of replicas, frames]
    best = np.full((len(replicas), *legal.shape), np.inf)
    used, chosen = np.full(best.shape, np.inf), np.zeros(best.shape, dtype=np.int8)
    least = np.full(best.shape, np.inf)
    for n, layout in enumerate(group.layouts):
        each = [memory.total(frames, pattern, layout, more) for more in replicas]
        bound = bounds.step(frames, pattern, layout)[:, :, bounds.class_of]
        if 3 in space.zero_stage and not pattern.paired:
            z = space.zero_stage.index(3)
            moved = bounds.sharded(frames, pattern, layout)[:, :, None, :]
            bound[..., z] = np.maximum(bound[..., z], moved)
        for k, bytes_ in enumerate(each):
            better = (bytes_ <= capacity) & (bound < best[k])
            best[k] = np.where(better, bound, best[k])
            used[k] = np.where(better, bytes_, used[k])
            chosen[k][better] = n
            least[k] = np.minimum(least[k], bytes_)
    slow = legal & (best[0] > most_s) & np.isfinite(best[0])
    usable = np.zeros(legal.shape, dtype=bool)
    for k, counts in enumerate(places):
        often = counts[:, None, None, None, None]
        over = legal & (used[k] > capacity) & (often > 0)
        used[k][over | (often == 0)] = np.inf
        fits = legal & ~over & (often > 0)
        usable |= fits
        gathered.legal += int((legal * often).sum())
        gathered.fitting += int(((fits & ~slow) * often).sum())
        if over.any():
            place = np.unravel_index(int(np.where(over, least[k], np.inf).argmin()), over.shape)
            label = f"{frames[place[0]].label} needs {least[k][place] / GIB:.2f} of {capacity / GIB:.2f} GiB"
            refused.add("out of memory", int((over * often).sum()), label)
            gathered.nearest = min(gathered.nearest, (float(least[k][place]), label))
        if (slow & fits).any():
            place = np.unravel_index(int(np.where(slow & fits, best[0], np.inf).argmin()), slow.shape)
            text = (
                f"{frames[place[0]].label} needs at least {best[0][place]:.2f} s a step, "
                f"{most_s:.2f} s are allowed"
            )
            reason = "too slow for the deadline or budget, whatever else"
            refused.add(reason, int(((slow & fits) * often).sum()), text)
    keep = np.nonzero((usable & ~slow).ravel())[0]
    frame = keep // space.inner
    gathered.parts.append(
        (
            np.full(len(keep), number, dtype=np.float64),
            keep.astype(np.float64),
            best[0].ravel()[keep],
            (gathered.families + frame).astype(np.float64),
            *(
                column.ravel()[keep].astype(np.float64)
                for pair in zip(chosen, used, strict=True)
                for column in pair
            ),
        )
    )
    gathered.families += len(frames)


def _placed(
    frames: Sequence[Frame],
    legal: BoolArray,
    space: Space,
    loads: ExpertLoads,
    replicas: Sequence[int],
    refused: Refusals,
) -> IntArray:
    """How many placements with each number of replicas every frame can have; the others are refused."""
    counts = np.zeros((len(replicas), len(frames)), dtype=np.int64)
    plans = legal.reshape(len(frames), -1).sum(axis=1)
    for placement in space.placement:
        k = replicas.index(price_key(placement)[0])
        for n, frame in enumerate(frames):
            problem = loads.problem(frame.layout, placement)
            if problem is None:
                counts[k, n] += 1
            else:
                refused.add_error(problem, int(plans[n]), frame.label)
    return counts


def _combinations(frames: Sequence[Frame], pattern: Pattern, space: Space, refused: Refusals) -> BoolArray:
    """What frame, precision, policy, SMs and ZeRO stage together allow."""
    legal = np.ones((len(frames), *inner_axes(space)), dtype=bool)
    if pattern.paired and 3 in space.zero_stage:
        z = space.zero_stage.index(3)
        refused.add(
            "parallel.zero_stage=3 has no slot for its parameter gathers in an overlapped pair",
            int(legal[..., z].sum()) * len(space.placement),
            f"{frames[0].label} zero_stage=3",
        )
        legal[..., z] = False
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
    say: Say,
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
                many = sum(space.per_frame for f in frames if f.pattern.n_stages == n)
                refused.add(
                    "another number of stages than stages.layers", many, f"{n} stages, not {len(fixed)}"
                )
        return {len(fixed): (from_layers_per_stage(blocks, fixed),)}
    kinds = bounds.book.kinds
    layer = kinds.index(shape.main_layer_kind)
    seen: Counter[tuple[int, ...]] = Counter()
    cells = {Cell.of(f.plan): f.plan for f in frames}
    for done, plan in enumerate(cells.values()):
        say(done / len(cells), f"prices: {done} of {len(cells)} ways to split a layer")
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
            refused.add_error(problem, len(frames) * space.per_frame // len(space.precision), recipe.linear)
    if not kept:
        raise InputError(problem)
    return replace(space, precision=tuple(kept))
