"""Which links a transfer uses: the one thing that folded and full resolution see differently."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from moesim.hwmodels.arrays import FloatArray, IntArray
from moesim.simulator.cost.table import TransferCost
from moesim.simulator.engine.demand import Demand
from moesim.simulator.model.operator import Phase

PORTS = 4
"""Links of one GPU in the folded cluster: NIC out and in, scale-up port out and in."""

OUTWARD: frozenset[Phase] = frozenset({"dispatch F", "combine B"})
"""Transfers that carry tokens to the experts; the others bring them back the same way."""


class LinkMap(Protocol):
    """The links of one group of members, and what its transfers put on them (bytes)."""

    @property
    def capacity_bytes_per_ns(self) -> FloatArray:
        """Capacity of every link of the cluster, by link number."""

    @property
    def gpus_per_rank(self) -> int:
        """GPUs that have links of their own on each pipeline rank."""

    def transfer(
        self, rank: int, phase: Phase, cost: TransferCost, load: FloatArray, node_load: FloatArray
    ) -> Demand:
        """Links of a transfer of the members of a pipeline rank, with each member's relative rows."""

    def uniform(self, rank: int, phase: Phase, cost: TransferCost) -> Demand | None:
        """The same where it does not depend on the load; None where it does."""

    def send(self, source: int, target: int, size: float) -> Demand:
        """Links of a send of `size` bytes from every member of one pipeline rank to its like on another."""

    def slowness(self, rank: int, phase: Phase) -> tuple[FloatArray | float, FloatArray | float]:
        """(NIC, scale-up): how many times as long as in a healthy cluster, for every member."""

    def send_slowness(self, source: int, target: int) -> FloatArray | float:
        """The same for a send between two pipeline ranks."""

    def sync_slowness(self, rank: int) -> float:
        """The same for a ring through all members of a pipeline rank."""

    def ports(self, rank: int) -> tuple[IntArray, IntArray]:
        """(NIC out, scale-up out): link numbers of the members' ports."""


class FoldedLinkMap:
    """One GPU stands for all members of a pipeline rank: its NIC and its scale-up port, full duplex.

    Source: docs/model.md, eq. E3.
    """

    def __init__(
        self, pp: int, nic_bytes_per_s: float, scale_up_bytes_per_s: float, sends_cross_nodes: bool
    ) -> None:
        """Rates are per GPU and direction."""
        per_gpu = (nic_bytes_per_s, nic_bytes_per_s, scale_up_bytes_per_s, scale_up_bytes_per_s)
        self._capacity = np.array(per_gpu * pp) / 1e9
        self._sends_cross_nodes = sends_cross_nodes

    @classmethod
    def joined(cls, owners: Sequence[LinkMap], sends_cross_nodes: bool) -> FoldedLinkMap:
        """Pipeline ranks of several kinds of cluster: rank r has the links that it has in `owners[r]`."""
        result = cls(len(owners), 1.0, 1.0, sends_cross_nodes)
        parts = [
            link_map.capacity_bytes_per_ns[PORTS * rank : PORTS * (rank + 1)]
            for rank, link_map in enumerate(owners)
        ]
        result._capacity = np.concatenate(parts)
        return result

    @property
    def capacity_bytes_per_ns(self) -> FloatArray:
        """Four links a pipeline rank."""
        return self._capacity

    @property
    def gpus_per_rank(self) -> int:
        """One GPU stands for all."""
        return 1

    def uniform(self, rank: int, phase: Phase, cost: TransferCost) -> Demand:
        """Bytes of a member that receives the mean rows, whichever member gets more."""
        amounts = (cost.nic_bytes, cost.nic_bytes, cost.scale_up_bytes, cost.scale_up_bytes)
        used = [(PORTS * rank + port, amount) for port, amount in enumerate(amounts) if amount > 0.0]
        return Demand.of(used)

    def transfer(
        self, rank: int, phase: Phase, cost: TransferCost, load: FloatArray, node_load: FloatArray
    ) -> Demand:
        """As `uniform`, with the mean of the loads: rows that were dropped do not travel."""
        rows, node_rows = float(load.mean()), float(node_load.mean())
        return self.uniform(
            rank,
            phase,
            replace(cost, nic_bytes=cost.nic_bytes * node_rows, scale_up_bytes=cost.scale_up_bytes * rows),
        )

    def send(self, source: int, target: int, size: float) -> Demand:
        """NICs where the pipeline crosses nodes, else scale-up ports."""
        first = 0 if self._sends_cross_nodes else 2
        return Demand.of([(PORTS * source + first, size), (PORTS * target + first + 1, size)])

    def slowness(self, rank: int, phase: Phase) -> tuple[float, float]:
        """Every member is healthy."""
        return 1.0, 1.0

    def send_slowness(self, source: int, target: int) -> float:
        """Every member is healthy."""
        return 1.0

    def sync_slowness(self, rank: int) -> float:
        """Every member is healthy."""
        return 1.0

    def ports(self, rank: int) -> tuple[IntArray, IntArray]:
        """The ports of the one GPU."""
        return np.array([PORTS * rank]), np.array([PORTS * rank + 2])
