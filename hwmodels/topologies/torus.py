"""A torus, and the shares of its links that groups of neighbours can use."""

from __future__ import annotations

import itertools
import math
from itertools import product
from math import prod
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import model_validator

from moesim.hwmodels import ranges
from moesim.hwmodels.arrays import IntArray
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.provenance import SourcedBytesPerSecond, SourcedCount, SourcedSeconds
from moesim.hwmodels.topologies.description import NodeFigures, ScaleUpFabric, ScaleUpShares
from moesim.hwmodels.topologies.part import ScaleUpPart, ScaleUpSpec
from moesim.hwmodels.topologies.wiring import Wiring

# -- shares ----------------------------------------------------------------------------------------


class TorusShares(ScaleUpShares, frozen=True):
    """Shares in a torus of `sizes` (3 and more wrap); `link` is a link's nominal rate over a chip's."""

    link: float
    sizes: tuple[int, ...]

    @property
    def links_are_shared(self) -> bool:
        """True, since messages of several chips share links."""
        return True

    def all_to_all(self, group: int) -> float:
        """Share of a uniform all-to-all of `group` chips.

        The chips form the most compact block, and its narrowest cut limits the rate. Raises InputError where
        no block of the torus has so many chips.
        """
        if group <= 1:
            return 1.0
        return min(1.0, self.link * (group - 1) / (group * self._crossing(self.block(group))))

    def block(self, group: int) -> tuple[int, ...]:
        """Sides of the block of a torus in which an all-to-all of a group is fastest.

        Raises InputError where no block of the torus has so many chips.
        """
        blocks = self._blocks(group)
        if not blocks:
            sizes = "x".join(map(str, self.sizes))
            raise InputError(
                f"a group of {group} chips is no block of the {sizes} torus: use a number that is a "
                f"product of divisors of {', '.join(map(str, self.sizes))}"
            )
        return min(blocks, key=self._crossing)

    def _crossing(self, block: tuple[int, ...]) -> float:
        """Bytes over the busiest link in an all-to-all of a block, per byte that one chip sends."""
        return max(self._load(n, size) for n, size in self._pairs(block))

    def groups(self, group: int, gpus: int) -> IntArray | None:
        """Chips of every block [blocks, chips], where chip x + X (y + Y z) is at (x, y, z)."""
        sides = self.block(group)
        grid = [
            part
            for size, side in zip(self.sizes[::-1], sides[::-1], strict=True)
            for part in (size // side, side)
        ]
        chips = np.arange(gpus, dtype=np.int64).reshape(-1, *grid)
        outer = range(1, chips.ndim, 2)
        return chips.transpose(0, *outer, *(axis + 1 for axis in outer)).reshape(-1, group)

    def busiest_link(self, source: IntArray, target: IntArray) -> int:
        """Number of messages from `source` to `target` chips [n] on the busiest link, at least one.

        Routes go along one dimension after the other, the short way around, and upwards on a tie.
        """
        sizes = np.array(self.sizes)
        steps = np.cumprod([1, *self.sizes[:-1]])
        chips = int(sizes.prod())
        at, end = (number[:, None] % chips // steps % sizes for number in (source, target))
        most = 1
        for axis, size in enumerate(self.sizes):
            ahead = (end - at)[:, axis] % size
            left = np.where(2 * ahead > size, ahead - size, ahead) if size > 2 else (end - at)[:, axis]
            for up in (1, -1):
                crossed = np.zeros(chips, dtype=np.int64)
                here, togo = at.copy(), np.maximum(left * up, 0)
                while togo.any():
                    going = togo > 0
                    np.add.at(crossed, (here[going] * steps).sum(axis=1), 1)
                    here[going, axis] = (here[going, axis] + up) % size
                    togo = np.maximum(togo - 1, 0)
                most = max(most, int(crossed.max()))
            at[:, axis] = end[:, axis]
        return most

    def pair(self) -> float:
        """Share of two neighbours, which is one link."""
        return self.link

    def ring(self, group: int) -> float:
        """Share of a reduce-scatter or all-gather of `group` chips.

        A block uses the links along the dimensions that it spans, both ways where it closes a ring. A group
        that is no block uses one link.
        """
        if group <= 1:
            return 1.0
        ways = [sum(self._ways(n, size) for n, size in self._pairs(b) if n > 1) for b in self._blocks(group)]
        return min(1.0, self.link * max(ways, default=1))

    def _blocks(self, group: int) -> list[tuple[int, ...]]:
        sides = [[n for n in range(1, size + 1) if size % n == 0] for size in self.sizes]
        return [block for block in product(*sides) if prod(block) == group]

    def _pairs(self, block: tuple[int, ...]) -> list[tuple[int, int]]:
        return list(zip(block, self.sizes, strict=True))

    @staticmethod
    def _load(n: int, size: int) -> float:
        """Bytes over the middle link of a row of n chips, per byte that one chip sends."""
        half = n // 2
        return half * (n - half) / n / TorusShares._ways(n, size)

    @staticmethod
    def _ways(n: int, size: int) -> int:
        """Directions in which traffic can pass a row of n chips, two where the row closes a ring."""
        return 2 if n == size and n >= 3 else 1


# -- torus -----------------------------------------------------------------------------------------


class TorusFabric(ScaleUpFabric):
    """A torus of 1 to 3 dimensions; a dimension of 3 or more wraps around (TPU).

    Bandwidths are of one link to one neighbour and direction.
    """

    kind: Literal["torus"]
    dimensions: tuple[SourcedCount, ...]
    link_bandwidth: SourcedBytesPerSecond
    link_bandwidth_effective: SourcedBytesPerSecond
    latency_per_hop: Annotated[SourcedSeconds, ranges.LATENCY]

    @model_validator(mode="after")
    def _plausible(self) -> Self:
        sizes = [dimension.n for dimension in self.dimensions]
        if not 1 <= len(sizes) <= 3 or min(sizes) < 1:
            raise ValueError(f"dimensions={sizes}: a torus has 1 to 3 dimensions of at least 1")
        return self

    def shares(self, node: NodeFigures) -> ScaleUpShares:
        """Shares that the links of its compact blocks allow."""
        link = self.link_bandwidth.value / node.scale_up_bytes_per_s
        return TorusShares(link, tuple(dimension.n for dimension in self.dimensions))


class Torus(ScaleUpPart):
    """Chip x + X (y + Y z) has links to its neighbours in every dimension; sizes of 3 and more wrap around.

    The equally good paths are every order of the dimensions, with both ways around where they are equally
    long. Destination-modulo routing is dimension order here (x, y, z; the upward way on a tie). Detours go
    through a third chip, the nearest first.
    """

    def __init__(self, node: NodeFigures, nodes: int, fabric: TorusFabric) -> None:
        """Raises InputError where the dimensions do not multiply to the GPUs of the node."""
        super().__init__(node, nodes)
        self.fabric = fabric
        self.sizes = np.array([dimension.n for dimension in fabric.dimensions])
        chips = math.prod(self.sizes.tolist())
        if chips != self.per_node:
            raise InputError(
                f"dimensions {'x'.join(map(str, self.sizes))} are {chips} chips, but "
                f"node {node.name!r} has {self.per_node}"
            )
        self.steps = np.concatenate([[1], np.cumprod(self.sizes)[:-1]])
        self.orders = np.array(list(itertools.permutations(range(len(self.sizes)))))

    def wire(self, wiring: Wiring) -> None:
        """Add, by dimension, the upward cable of every chip that has one."""
        chips = np.arange(self.n_gpus)
        place = self._place(chips)
        self.cable = np.full((len(self.sizes), self.n_gpus), -1)
        rates = (self.fabric.link_bandwidth_effective.value, self.fabric.link_bandwidth.value)
        for axis, size in enumerate(self.sizes.tolist()):
            has = np.ones(self.n_gpus, bool) if size > 2 else (place[:, axis] < size - 1)
            tails = chips[has]
            first = wiring.add_cables(
                "torus", tails, self._moved(tails, axis, 1), rates, self.fabric.latency_per_hop.value
            )
            self.cable[axis, has] = first + np.arange(len(tails))

    def size(self) -> tuple[int, int]:
        """(0, cables), one per chip and dimension, less one per line that does not wrap around."""
        sizes = self.sizes.tolist()
        return 0, sum(self.n_gpus if size > 2 else self.n_gpus // size * (size - 1) for size in sizes)

    def _place(self, chips: IntArray) -> IntArray:
        """[n, dimensions] coordinates inside the node."""
        place: IntArray = (chips[:, None] % self.per_node) // self.steps % self.sizes
        return place

    def _moved(self, chips: IntArray, axis: int | IntArray, by: int | IntArray) -> IntArray:
        """The neighbours of chips along an axis, up (`by` 1) or down (-1), around the ring."""
        size, step = self.sizes[axis], self.steps[axis]
        at = chips % self.per_node // step % size
        moved: IntArray = chips + ((at + by) % size - at) * step
        return moved

    def fanout(self, src: IntArray, dst: IntArray) -> IntArray:
        """Number of orders of the dimensions times ways around; paths that coincide count more than once."""
        return np.full(len(src), len(self.orders) * 2 ** len(self.sizes))

    def paths(self, src: IntArray, dst: IntArray, choice: IntArray) -> IntArray:
        """Links of each path, hop by hop in the chosen order of dimensions."""
        n = len(src)
        order = self.orders[choice % len(self.orders)]
        ties = choice // len(self.orders)
        ahead = (self._place(dst) - self._place(src)) % self.sizes
        behind = ahead - self.sizes
        tie_back = (ties[:, None] >> np.arange(len(self.sizes))) & 1
        down = (ahead > -behind) | ((ahead == -behind) & (tie_back == 1) & (self.sizes > 2))
        # A dimension of 2 or less does not wrap, so the only way is along the line.
        line = self._place(dst) - self._place(src)
        move = np.where(self.sizes > 2, np.where(down, behind, ahead), line)
        rows, at, hops = np.arange(n), src.copy(), []
        for slot in range(len(self.sizes)):
            axis = order[:, slot]
            left = move[rows, axis]
            for _ in range(int(max(1, self.sizes.max() // 2))):
                going, up = left != 0, left > 0
                after = self._moved(at, axis, np.where(up, 1, -1))
                cable = self.cable[axis, np.where(up, at, after)]
                hops.append(np.where(going, np.where(up, 2 * cable, 2 * cable + 1), -1))
                at = np.where(going, after, at)
                left = left - np.sign(left)
        return np.stack(hops, axis=1)

    def detours(self) -> int:
        """One detour through every other chip."""
        return self.per_node - 1

    def detour_paths(self, src: IntArray, dst: IntArray, number: int) -> IntArray:
        """Paths through the chip that is `number`-th nearest to src."""
        via = src // self.per_node * self.per_node + self._near(src, number)
        zero = np.zeros(len(src), np.int64)
        return np.hstack([self.paths(src, via, zero), self.paths(via, dst, zero)])

    def _near(self, src: IntArray, number: int) -> IntArray:
        offsets = self._place(np.arange(self.per_node))
        away = np.minimum(offsets, self.sizes - offsets).sum(axis=1)
        nearest_first = np.argsort(away, kind="stable")[1:]
        there = (self._place(src) + offsets[nearest_first[number]]) % self.sizes
        near: IntArray = (there * self.steps).sum(axis=1)
        return near


TORUS = ScaleUpSpec("torus", TorusFabric, Torus, "tpu-v5p-8x8x8")
