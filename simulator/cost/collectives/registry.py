"""All algorithms of collectives; a new algorithm is one file and one line here."""

from __future__ import annotations

from collections.abc import Mapping

from moesim.hwmodels.validation import registry
from moesim.simulator.cost.collectives.exchange import DIRECT
from moesim.simulator.cost.collectives.library import CollectiveSpec
from moesim.simulator.cost.collectives.nvls import NVLS
from moesim.simulator.cost.collectives.ring import RING
from moesim.simulator.cost.collectives.tree import TREE

COLLECTIVES: Mapping[str, CollectiveSpec] = registry(
    RING,
    TREE,
    NVLS,
    DIRECT,
)
"""Algorithms by name; the fastest one that can run an operation is taken, of equally fast ones the first."""


def operations() -> tuple[str, ...]:
    """Every operation that some algorithm can run."""
    return tuple(dict.fromkeys(name for spec in COLLECTIVES.values() for name in spec.operations))
