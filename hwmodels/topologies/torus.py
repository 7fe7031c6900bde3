"""The torus (TPU), where links join neighbours and routes go the short way in dimension order."""

from __future__ import annotations

import itertools
import math
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import model_validator

from moesim.hwmodels import ranges
from moesim.hwmodels.arrays import IntArray
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.provenance import SourcedBytesPerSecond, SourcedCount, SourcedSeconds
from moesim.hwmodels.scale_up_shares import ScaleUpShares
from moesim.hwmodels.topologies.description import NodeFigures, ScaleUpFabric
from moesim.hwmodels.topologies.part import ScaleUpPart
from moesim.hwmodels.topologies.spec import ScaleUpSpec
from moesim.hwmodels.topologies.torus_shares import TorusShares
from moesim.hwmodels.topologies.wiring import Wiring


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
