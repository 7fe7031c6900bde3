"""What the links of a torus carry, by the blocks of chips that exchange (docs/model.md, eq. H3)."""

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
    """`link`: the nominal rate of one link over a chip's; `sizes` of the dimensions: 3 and more wrap."""

    link: float
    sizes: tuple[int, ...]

    @property
    def links_are_shared(self) -> bool:
        """Messages of several chips meet on the links between them."""
        return True

    def all_to_all(self, group: int) -> float:
        """Share of a uniform all-to-all of `group` chips.

        They sit in the most compact block, whose narrowest cut decides.
        Raises InputError where no block of the torus has so many chips.
        """
        if group <= 1:
            return 1.0
        return min(1.0, self.link * (group - 1) / (group * self._crossing(self.block(group))))

    def block(self, group: int) -> tuple[int, ...]:
        """Sides of the block of a torus in which a group of chips exchanges fastest.

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
        """Bytes over the busiest link of a block in which all exchange, in units of what one chip sends."""
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
        """Messages from chip to chip of a torus that cross its busiest link, at least one.

        Routes go along one dimension after the other, each the short way around, upwards where both are.
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
        """Share of two neighbours: one link."""
        return self.link

    def ring(self, group: int) -> float:
        """Share of a reduce-scatter or all-gather of `group` chips.

        The links along the dimensions that the block spans count, both ways where it closes a ring; one link
        where it is no block.
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
        """Bytes over the middle link of a row of n, in units of what one chip sends; a ring has two ways."""
        half = n // 2
        return half * (n - half) / n / TorusShares._ways(n, size)

    @staticmethod
    def _ways(n: int, size: int) -> int:
        """Directions that a row of n chips can be gone around: two where it closes a ring."""
        return 2 if n == size and n >= 3 else 1
