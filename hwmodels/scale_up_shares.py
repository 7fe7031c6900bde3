"""What part of a GPU's scale-up rate a group can use, from the wiring alone: switch, full mesh or torus."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod

import numpy as np

from moesim.hwmodels.arrays import IntArray
from moesim.hwmodels.errors import InputError


@dataclass(frozen=True, slots=True)
class ScaleUpShares:
    """Shares of the nominal rate of one GPU and direction, by who talks to whom (docs/model.md, eq. H3).

    `link` is the nominal rate of one link over that of the GPU. `mesh`: GPUs of a node in which every pair
    has a link (0: none). `torus`: sizes of the dimensions (empty: none), of which 3 and more wrap around.
    Neither: a switch that does not block.
    """

    link: float = 1.0
    mesh: int = 0
    torus: tuple[int, ...] = ()

    def all_to_all(self, group: int) -> float:
        """Share of a uniform all-to-all of `group` GPUs.

        Mesh: the links to the other members. Torus: the most compact block, whose narrowest cut decides.
        Raises InputError where no block of the torus has so many chips.
        """
        if group <= 1:
            return 1.0
        if self.mesh:
            return (group - 1) / (self.mesh - 1)
        if not self.torus:
            return 1.0
        return min(1.0, self.link * (group - 1) / (group * self._crossing(self.block(group))))

    def block(self, group: int) -> tuple[int, ...]:
        """Sides of the block of a torus in which a group of chips exchanges fastest.

        Raises InputError where no block of the torus has so many chips.
        """
        blocks = self._blocks(group)
        if not blocks:
            sizes = "x".join(map(str, self.torus))
            raise InputError(
                f"a group of {group} chips is no block of the {sizes} torus: use a number that is a "
                f"product of divisors of {', '.join(map(str, self.torus))}"
            )
        return min(blocks, key=self._crossing)

    def _crossing(self, block: tuple[int, ...]) -> float:
        """Bytes over the busiest link of a block in which all exchange, in units of what one chip sends."""
        return max(self._load(n, size) for n, size in self._pairs(block))

    def busiest_link(self, source: IntArray, target: IntArray) -> int:
        """Messages from chip to chip of a torus that cross its busiest link, at least one.

        Routes go along one dimension after the other, each the short way around, upwards where both are.
        """
        sizes = np.array(self.torus)
        steps = np.cumprod([1, *self.torus[:-1]])
        chips = int(sizes.prod())
        at, end = (number[:, None] % chips // steps % sizes for number in (source, target))
        most = 1
        for axis, size in enumerate(self.torus):
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
        """Share of a reduce-scatter or all-gather of `group` GPUs.

        Mesh: rings over all links between the members. Torus: the links along the dimensions that the
        block spans, both ways where it closes a ring; one link where it is no block.
        """
        if group <= 1:
            return 1.0
        if self.mesh:
            return (group - 1) / (self.mesh - 1)
        if not self.torus:
            return 1.0
        ways = [sum(self._ways(n, size) for n, size in self._pairs(b) if n > 1) for b in self._blocks(group)]
        return min(1.0, self.link * max(ways, default=1))

    def _blocks(self, group: int) -> list[tuple[int, ...]]:
        sides = [[n for n in range(1, size + 1) if size % n == 0] for size in self.torus]
        return [block for block in product(*sides) if prod(block) == group]

    def _pairs(self, block: tuple[int, ...]) -> list[tuple[int, int]]:
        return list(zip(block, self.torus, strict=True))

    @staticmethod
    def _load(n: int, size: int) -> float:
        """Bytes over the middle link of a row of n, in units of what one chip sends; a ring has two ways."""
        half = n // 2
        return half * (n - half) / n / ScaleUpShares._ways(n, size)

    @staticmethod
    def _ways(n: int, size: int) -> int:
        """Directions that a row of n chips can be gone around: two where it closes a ring."""
        return 2 if n == size and n >= 3 else 1


SWITCHED = ScaleUpShares()
"""Every GPU reaches every other at its full rate."""
