"""What part of a GPU's scale-up rate a group can use, from the wiring alone."""

from __future__ import annotations

from dataclasses import dataclass

from moesim.hwmodels.arrays import IntArray


@dataclass(frozen=True, slots=True)
class ScaleUpShares:
    """Shares of the nominal rate of one GPU and direction, by who talks to whom (docs/model.md, eq. H3).

    This class is a switch that does not block: every GPU reaches every other at its full rate. A topology
    whose links decide has a subclass beside it.
    """

    @property
    def links_are_shared(self) -> bool:
        """Whether messages of several GPUs meet on the links between them."""
        return False

    def all_to_all(self, group: int) -> float:
        """Share of a uniform all-to-all of `group` GPUs."""
        del group
        return 1.0

    def pair(self) -> float:
        """Share of two neighbours."""
        return 1.0

    def ring(self, group: int) -> float:
        """Share of a reduce-scatter or all-gather of `group` GPUs."""
        del group
        return 1.0

    def groups(self, group: int, gpus: int) -> IntArray | None:
        """GPUs of every expert-parallel group [groups, members]; None where neighbours are as good as any.

        Raises InputError where no group of this size can be placed.
        """
        del group, gpus
        return None

    def busiest_link(self, source: IntArray, target: IntArray) -> int:
        """Messages from GPU to GPU [n] that cross the busiest link between them, at least one."""
        del source, target
        return 1


SWITCHED = ScaleUpShares()
"""Every GPU reaches every other at its full rate."""
