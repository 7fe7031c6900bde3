"""Shares of a chip's rate that torus links allow, by block of chips (docs/model.md, eq. H3)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod

import numpy as np

from moesim.hwmodels.arrays import IntArray
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.scale_up_shares import ScaleUpShares


@dataclass(frozen=True, slots=True)
class TorusShares(ScaleUpShares):
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
