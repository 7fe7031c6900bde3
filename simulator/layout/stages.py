"""Assigns the blocks of the model to pipeline stages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, groupby
from math import frexp, fsum, ldexp

import numpy as np
from msgspec import Struct

from moesim.hwmodels.arrays import IntArray
from moesim.hwmodels.errors import InputError
from moesim.simulator.model.block import EMBEDDING, HEAD, MTP, is_layer, is_routed_layer
from moesim.simulator.model.operator import BlockKind
from moesim.simulator.model.shape import ModelShape, in_groups

MOST_WITHOUT_LAYERS = 2
"""Balanced stages that may go without a layer: the first, with the embedding, and the last, with the head."""

RESOLUTION_BITS = 40
"""Bits of the integers that weights are rounded to, so that ties do not depend on floating-point errors."""


class Block(Struct, frozen=True):
    """One indivisible piece of a stage.

    `layer` is the layer index. MTP modules count on after the last layer, and the head pass of a module has
    the module's index; embedding and main head have None.
    """

    kind: BlockKind
    layer: int | None = None

    @property
    def is_layer(self) -> bool:
        """Whether it is a layer of the main model."""
        return is_layer(self.kind)

    @property
    def is_embedding(self) -> bool:
        """Whether it is the embedding table."""
        return self.kind == EMBEDDING

    @property
    def is_head(self) -> bool:
        """Whether it is a pass of the output head with its loss."""
        return self.kind == HEAD


class StageAssignment(Struct, frozen=True):
    """The blocks of each stage, stage 0 first."""

    stages: tuple[tuple[Block, ...], ...]

    @property
    def layers_per_stage(self) -> tuple[int, ...]:
        """Transformer layers of each stage, MTP modules left out."""
        return tuple(sum(block.is_layer for block in stage) for stage in self.stages)

    @property
    def stages_with_routed_layers(self) -> tuple[int, ...]:
        """Stages that hold a layer with routed experts, MTP modules left out."""
        return tuple(i for i, stage in enumerate(self.stages) if any(is_routed_layer(b.kind) for b in stage))


def blocks_of(shape: ModelShape) -> tuple[Block, ...]:
    """List the blocks of a model in forward order: embedding, layers, main head, MTP modules with heads.

    Each MTP module runs the shared output head and its own loss (DeepSeek-V3 report, section 2.2).
    """
    layers = [Block(kind, i) for i, kind in enumerate(shape.layer_kinds)]
    deeper = range(shape.n_layers, shape.n_layers + shape.mtp_layers)
    tail = [block for i in deeper for block in (Block(MTP, i), Block(HEAD, i))]
    return (Block(EMBEDDING), *layers, Block(HEAD), *tail)


def balanced(
    blocks: Sequence[Block],
    weights: Sequence[float],
    n_stages: int,
    ends_alone: bool = True,
) -> StageAssignment:
    """Return the contiguous assignment whose heaviest stage is lightest (docs/model.md, eq. S2).

    `weights` are the blocks' costs in any one unit (seconds of forward and backward). The embedding
    stays on the first stage, heads and MTP modules stay on the last, where they share their tables
    (DeepSeek-V3 report, section 3.2.3). Ties go to the smallest sum of squared stage weights, then to the
    smallest stage sizes from the first stage on, so that the result does not depend on the machine.
    Inner stages hold a layer at least; with `ends_alone`, or where layers are too few, the first and the last
    may go without. Raises InputError for illegal weights and
    for more stages than these rules can fill.
    """
    head, body, tail = _split(blocks)
    costs = _integer_costs(blocks, weights)
    _check_stage_count(n_stages, len(body))
    sums = [0, *accumulate(costs[len(head) : len(head) + len(body)])]
    first, last = sum(costs[: len(head)]), sum(costs[len(blocks) - len(tail) :])
    extra = [0] * n_stages
    extra[0] += first
    extra[-1] += last
    least = 0 if ends_alone or n_stages > len(body) else 1
    return from_layers_per_stage(blocks, best_sizes([sums] * n_stages, extra, least_at_ends=least))


def balanced_by_stage(
    blocks: Sequence[Block], weights: Sequence[Sequence[float]], most: Sequence[Sequence[int]] | None = None
) -> StageAssignment:
    """Balance as `balanced` does, with `weights` of the blocks for every stage (docs/model.md, eq. S3).

    `most[stage][start]` is the number of layers that fit on a stage which begins at layer `start`; None sets
    no limit. Raises InputError for too many stages and where no assignment stays within `most`.
    """
    head, body, tail = _split(blocks)
    _check_stage_count(len(weights), len(body))
    shift = max(fsum(own) for own in weights)
    costs = [_integer_costs(blocks, own, shift) for own in weights]
    sums = [[0, *accumulate(own[len(head) : len(head) + len(body)])] for own in costs]
    extra = [0] * len(weights)
    extra[0] += sum(costs[0][: len(head)])
    extra[-1] += sum(costs[-1][len(blocks) - len(tail) :])
    return from_layers_per_stage(blocks, best_sizes(sums, extra, most))


def from_layers_per_stage(
    blocks: Sequence[Block], layers_per_stage: Sequence[int], mtp_stage: int | None = None
) -> StageAssignment:
    """Return the assignment with the given number of transformer layers on each stage.

    The first stage also gets the embedding, the last one the heads and MTP modules. An inner stage without
    layers only passes activations and gradients on. `mtp_stage` holds the MTP modules instead of the last
    stage; a negative number counts from the end. Raises InputError where the numbers do not add up, or the
    modules would come before a layer.
    """
    head, body, tail = _split(blocks)
    if not layers_per_stage or any(n < 0 for n in layers_per_stage) or sum(layers_per_stage) != len(body):
        raise InputError(
            f"layers_per_stage={list(layers_per_stage)} adds up to {sum(layers_per_stage)}; the model has "
            f"{len(body)} layers, and every entry must be 0 or more"
        )
    ends = list(accumulate(layers_per_stage))
    stages = [tuple(body[end - n : end]) for n, end in zip(layers_per_stage, ends, strict=True)]
    stages[0] = (*head, *stages[0])
    place = _mtp_place(tail, layers_per_stage, mtp_stage)
    if place != len(stages) - 1:
        modules = [block for block in tail if not block.is_head]
        stages[place] = (*stages[place], *modules)
        tail = [block for block in tail if block.is_head]
    stages[-1] = (*stages[-1], *tail)
    return StageAssignment(tuple(stages))


def _mtp_place(tail: Sequence[Block], layers_per_stage: Sequence[int], mtp_stage: int | None) -> int:
    """Number of the stage that holds the MTP modules."""
    n = len(layers_per_stage)
    if mtp_stage is None:
        return n - 1
    place = mtp_stage + n if mtp_stage < 0 else mtp_stage
    last_layer = max((i for i, count in enumerate(layers_per_stage) if count), default=0)
    if not last_layer <= place < n:
        raise InputError(
            f"stages.mtp={mtp_stage} is not one of the stages {last_layer} to {n - 1}, from the one with the "
            "last layer to the one with the loss",
            key="stages.mtp",
            nearest=(last_layer, n - 1),
        )
    if all(block.is_head for block in tail):
        raise InputError(f"stages.mtp={mtp_stage}, but the model has no MTP modules: leave the key out")
    return place


def describe(assignment: StageAssignment) -> str:
    """Describe every stage on a line such as `stage 0: embedding + 3 dense + 1 moe`; an empty one is `-`.

    Groups of layers that repeat are written once, such as `9 x (1 moe/sliding + 1 moe/full)`.
    """
    lines = []
    for i, stage in enumerate(assignment.stages):
        parts: list[str] = []
        for layers, run in groupby((block.kind for block in stage), key=is_layer):
            kinds = list(run)
            runs = [(kind, len(list(same))) for kind, same in groupby(kinds)]
            parts += (
                [in_groups(kinds, " + ")]
                if layers
                else [kind if times == 1 else f"{times} {kind}" for kind, times in runs]
            )
        lines.append(f"stage {i}: {' + '.join(parts) or '-'}")
    return "\n".join(lines)


def blocks_with_parameters(stages: StageAssignment, stage: int) -> list[Block]:
    """Blocks of a stage with parameters of their own: further head passes read the table of the first."""
    blocks = stages.stages[stage]
    first_head = next((place for place, block in enumerate(blocks) if block.is_head), None)
    return [block for place, block in enumerate(blocks) if not block.is_head or place == first_head]


def _split(blocks: Sequence[Block]) -> tuple[list[Block], list[Block], list[Block]]:
    """(blocks fixed to the first stage, layers that may move, blocks fixed to the last stage)."""
    head = [b for b in blocks if b.is_embedding]
    body = [b for b in blocks if b.is_layer]
    tail = [b for b in blocks if not (b.is_embedding or b.is_layer)]
    assert [*head, *body, *tail] == list(blocks), "blocks are not in forward order"
    return head, body, tail


def _check_stage_count(n_stages: int, n_layers: int) -> None:
    most = n_layers + MOST_WITHOUT_LAYERS
    if not 1 <= n_stages <= most:
        raise InputError(
            f"{n_stages} pipeline stages: the {n_layers} layers with embedding and head fill from 1 to {most}"
        )


def _integer_costs(
    blocks: Sequence[Block], weights: Sequence[float], total: float | None = None
) -> list[int]:
    """Weights as integers, scaled so that `total` (by default their sum) has RESOLUTION_BITS bits."""
    if len(weights) != len(blocks):
        raise InputError(f"{len(weights)} weights for {len(blocks)} blocks; give one weight a block")
    for block, weight in zip(blocks, weights, strict=True):
        if not 0 <= weight < float("inf"):
            raise InputError(f"weight {weight} of {block.kind} block {block.layer} must be finite and >= 0")
    shift = RESOLUTION_BITS - frexp(fsum(weights) if total is None else total)[1]
    return [round(ldexp(weight, shift)) for weight in weights]


def best_sizes(
    sums: Sequence[Sequence[int]],
    extra: Sequence[int],
    most: Sequence[Sequence[int]] | None = None,
    least_at_ends: int = 0,
) -> list[int]:
    """Choose the numbers of layers on each stage by two passes of dynamic programming.

    The first pass finds the least cost of the heaviest stage, the second the least sum of squares with it.
    `sums[stage][i]` is the cost of the first i layers on that stage and `extra[stage]` that of its other
    blocks; `most` is as in `balanced_by_stage`; `least_at_ends` layers stay on the first and last stage.
    Raises InputError where no sizes respect `most`.
    """
    n, k = len(sums[0]) - 1, len(extra)
    costs: list[
        IntArray
    ] = []  # of a run of layers on each stage, by its first layer and the one after its last
    size = np.arange(n + 1)[None, :] - np.arange(n + 1)[:, None]
    for stage, own in enumerate(sums):
        line = np.array(own, dtype=np.int64)
        legal = size >= (1 if 0 < stage < k - 1 else least_at_ends)
        if most is not None:
            legal &= size <= np.array(most[stage])[:, None]
        costs.append(np.where(legal, line[None, :] - line[:, None] + extra[stage], _NEVER))
    least = [np.full(n + 1, _NEVER)] * k + [np.where(np.arange(n + 1) == n, 0, _NEVER)]
    for stage in range(k - 1, -1, -1):  # first pass: the least maximum from each stage and layer on
        least[stage] = np.maximum(costs[stage], least[stage + 1][None, :]).min(axis=1)
    score = int(least[0][0])
    if score >= _NEVER:
        raise InputError(
            f"the memory of the stages' accelerators leave no way to place {n} layers on {k} stages with at "
            "least one layer on inner ones"
        )
    ends = [{0}]
    choices: list[dict[int, list[int]]] = []
    for stage in range(k):  # the sizes with which no stage exceeds the least maximum, from the first stage on
        good = (costs[stage] <= score) & (least[stage + 1] <= score)[None, :]
        choices.append({start: np.nonzero(good[start])[0].tolist() for start in sorted(ends[-1])})
        ends.append({end for reachable in choices[-1].values() for end in reachable})
    squares: dict[int, tuple[int, int]] = {n: (0, n)}
    sizes_of: list[dict[int, tuple[int, int]]] = []
    for stage in range(k - 1, -1, -1):  # second pass: the least squares, then the smallest size
        squares = {
            start: min((int(costs[stage][start, end]) ** 2 + squares[end][0], end) for end in reachable)
            for start, reachable in choices[stage].items()
            if reachable
        }
        sizes_of.append(squares)
    sizes, start = [], 0
    for squares in reversed(sizes_of):
        sizes.append(squares[start][1] - start)
        start = squares[start][1]
    return sizes


_NEVER = 1 << 62
"""Cost of a run of layers that is not allowed."""
