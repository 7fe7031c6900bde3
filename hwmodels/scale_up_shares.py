"""Shares of a GPU's scale-up rate that a group can use, from the wiring alone."""

from __future__ import annotations

from dataclasses import dataclass

from moesim.hwmodels.arrays import IntArray


@dataclass(frozen=True, slots=True)
class ScaleUpShares:
    """Shares of the nominal rate of one GPU and direction, by communication pattern (docs/model.md, eq. H3).

    This class describes a non-blocking switch, where every GPU reaches every other at its full rate. A
    topology whose links limit the rate has a subclass beside it.
    """

    @property
    def links_are_shared(self) -> bool:
        """Whether messages of several GPUs share links between GPUs."""
        return False

    def all_to_all(self, group: int) -> float:
        """Share of a uniform all-to-all of `group` GPUs."""
        del group
        return 1.0

    def pair(self) -> float:
        """Share that two neighbours can use between them."""
        return 1.0

    def ring(self, group: int) -> float:
        """Share of a reduce-scatter or all-gather of `group` GPUs."""
        del group
        return 1.0

    def groups(self, group: int, gpus: int) -> IntArray | None:
        """GPUs of every expert-parallel group [groups, members]; None where placement makes no difference.

        Raises InputError where no group of this size can be placed.
        """
        del group, gpus
        return None

    def busiest_link(self, source: IntArray, target: IntArray) -> int:
        """Number of messages from `source` to `target` GPUs [n] on the busiest link, at least one."""
        del source, target
        return 1


SWITCHED = ScaleUpShares()
"""Every GPU reaches every other at its full rate."""
