"""Reports how evenly one expert-parallel group loads its links, for even and for sampled routing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from moesim.hwmodels.topologies import Topology
from moesim.simulator.cost.collectives.expert_parallel import (
    KindLoad,
    RowTraffic,
    group_loads,
    load_by_kind,
    sampled,
    uniform_traffic,
)
from moesim.simulator.layout.loads import sampled_traffic
from moesim.simulator.layout.routing import Gate, expected_targets

TOKENS_PER_DRAW = 512
"""Tokens of a rank drawn at once, which bounds the memory of their scores."""


@dataclass(frozen=True, slots=True)
class LinkLoadRow:
    """One kind of link under one dispatch."""

    routing: Literal["even", "sampled"]
    load: KindLoad

    @property
    def largest_over_mean(self) -> float:
        """Largest over mean bytes; 1 where every link carries the same."""
        return self.load.largest_bytes / self.load.mean_bytes


def dispatch_loads(
    gate: Gate, tokens: int, bytes_per_row: float, ranks: Sequence[int], topology: Topology, seed: int = 0
) -> list[LinkLoadRow]:
    """Link loads of one dispatch of `tokens` tokens a rank over the GPUs `ranks` (eq. X1), by kind of link.

    Raises InputError for ranks that do not fill nodes or divide the experts.
    """
    ep, per_node = len(ranks), topology.gpus_per_node
    even = uniform_traffic(expected_targets(gate, ep, min(ep, per_node)), tokens)
    drawn = _drawn(gate, tokens, ep, per_node, seed)
    cases: tuple[tuple[Literal["even", "sampled"], RowTraffic], ...] = (("even", even), ("sampled", drawn))
    return [
        LinkLoadRow(name, load)
        for name, traffic in cases
        for load in load_by_kind(group_loads(traffic, bytes_per_row, ranks, topology))
    ]


def _drawn(gate: Gate, tokens: int, ep: int, per_node: int, seed: int) -> RowTraffic:
    """Sampled traffic, drawn in independent parts with consecutive seeds and summed."""
    sizes = [TOKENS_PER_DRAW] * (tokens // TOKENS_PER_DRAW) + (
        [tokens % TOKENS_PER_DRAW] if tokens % TOKENS_PER_DRAW else []
    )
    parts = [sampled(sampled_traffic(gate, ep, per_node, size, seed + i)) for i, size in enumerate(sizes)]
    return RowTraffic(
        np.sum([part.network for part in parts], axis=0), np.sum([part.scale_up for part in parts], axis=0)
    )
