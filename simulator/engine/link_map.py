"""The bytes of a transfer on links, and link maps: what differs between folded and full resolution."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field
from math import isfinite
from typing import Self

import numpy as np

from moesim.hwmodels.arrays import FloatArray, IntArray
from moesim.simulator.common.bounded_cache import read_only
from moesim.simulator.cost.table import NO_SLOW_SENDS, SlowSends, TransferCost
from moesim.simulator.model.operator import Phase

# -- demand ----------------------------------------------------------------------------------------

Pairs = tuple[tuple[int, float], ...]
"""(link, bytes) of every link of a transfer."""


@dataclass(frozen=True, slots=True, eq=False)
class Demand:
    """The bytes that one transfer puts on the links it crosses: `bytes[i]` on link `links[i]`.

    Links without bytes are dropped and the bytes of a repeated link are added. Raises ValueError for lengths
    that differ and for bytes that are negative or not finite.
    """

    links: IntArray
    bytes: FloatArray
    _pairs: Pairs | None = field(init=False, default=None, repr=False)

    def __post_init__(self) -> None:
        """Check both vectors, drop links without bytes and merge repeated links."""
        links, amounts = np.asarray(self.links, np.int64), np.asarray(self.bytes, np.float64)
        if links.shape != amounts.shape or links.ndim != 1:
            raise ValueError(f"{links.shape} links for {amounts.shape} byte counts")
        if not np.isfinite(amounts).all() or (amounts < 0.0).any():
            raise ValueError("bytes of a transfer must be finite and not negative")
        if not amounts.all():
            links, amounts = links[amounts > 0.0], amounts[amounts > 0.0]
        if not bool((links[1:] > links[:-1]).all()):  # links in order do not repeat
            unique, place = np.unique(links, return_inverse=True)
            if len(unique) < len(links):
                links, amounts = unique, np.bincount(place, amounts).astype(np.float64)
        object.__setattr__(self, "links", links)
        object.__setattr__(self, "bytes", amounts)

    @classmethod
    def of(cls, pairs: Iterable[tuple[int, float]]) -> Demand:
        """The demand of (link, bytes) pairs."""
        rows = list(pairs)
        return cls(np.array([link for link, _ in rows], np.int64), np.array([b for _, b in rows]))

    @classmethod
    def on_distinct(cls, links: tuple[int, ...], amounts: tuple[float, ...]) -> Demand:
        """The demand of positive, finite bytes on links that differ, without checking them again."""
        demand = object.__new__(cls)
        object.__setattr__(demand, "links", read_only(np.array(links, np.int64)))
        object.__setattr__(demand, "bytes", read_only(np.array(amounts, np.float64)))
        object.__setattr__(demand, "_pairs", tuple(zip(links, amounts, strict=True)))
        return demand

    @property
    def pairs(self) -> Pairs:
        """(link, bytes) pairs as plain Python numbers."""
        if self._pairs is None:
            pairs = tuple(zip(self.links.tolist(), self.bytes.tolist(), strict=True))
            object.__setattr__(self, "_pairs", pairs)
            return pairs
        return self._pairs


# -- link maps -------------------------------------------------------------------------------------

PORTS_PER_GPU = 4
"""Links of one GPU in the folded cluster, in this order: NIC out and in, scale-up port out and in."""

TO_EXPERTS: frozenset[Phase] = frozenset({"dispatch F", "combine B"})
"""Transfers that carry tokens to the experts; the other ones bring them back over the same pairs."""


class LinkMap(ABC):
    """The links of one group of members, and the bytes that its transfers put on them.

    A map states what differs from a healthy cluster; here every member is healthy.
    """

    _capacity: FloatArray

    @property
    def capacity_bytes_per_ns(self) -> FloatArray:
        """Nominal capacity of every link of the cluster, by link number."""
        return self._capacity

    @property
    @abstractmethod
    def gpus_per_rank(self) -> int:
        """GPUs that have links of their own on each pipeline rank."""

    @abstractmethod
    def transfer(
        self, rank: int, phase: Phase, cost: TransferCost, load: FloatArray, node_load: FloatArray
    ) -> Demand:
        """Demand of a transfer of a pipeline rank's members, with each member's relative rows."""

    @abstractmethod
    def uniform(self, rank: int, phase: Phase, cost: TransferCost) -> Demand | None:
        """Demand of a transfer that does not depend on the load; None where it does."""

    @abstractmethod
    def send(self, source: int, target: int, size: float) -> Demand:
        """Demand of a send of `size` bytes from every member to the same member of another rank."""

    @abstractmethod
    def ports(self, rank: int) -> tuple[IntArray, IntArray]:
        """Link numbers of the members' outgoing ports: (NICs, scale-up ports)."""

    def slowness(self, rank: int, phase: Phase) -> tuple[FloatArray | float, FloatArray | float]:
        """(NIC, scale-up) time of a transfer over that in a healthy cluster, for every member."""
        return 1.0, 1.0

    def send_slowness(self, source: int, target: int) -> FloatArray | float:
        """Time of a send between two pipeline ranks over that in a healthy cluster."""
        return 1.0

    def sync_slowness(self, rank: int) -> float:
        """Time of a ring through all members of a pipeline rank over that in a healthy cluster."""
        return 1.0

    def never_full(self) -> Self:
        """The same links without limits, so that flows do not slow each other down; dead links stay dead."""
        result = copy(self)
        result._capacity = np.where(self._capacity > 0.0, np.inf, 0.0)
        return result


class FoldedLinkMap(LinkMap):
    """Folded link map: full-duplex NIC and scale-up port of one GPU for each pipeline rank.

    Source: docs/model.md, eq. E3.
    """

    def __init__(
        self,
        pp: int,
        nic_bytes_per_s: float,
        scale_up_bytes_per_s: float,
        sends_cross_nodes: bool,
        slow_sends: SlowSends = NO_SLOW_SENDS,
    ) -> None:
        """Rates are per GPU and direction; the borders that sends cross follow the ports as further links."""
        self._slow_sends = slow_sends
        per_gpu = (nic_bytes_per_s, nic_bytes_per_s, scale_up_bytes_per_s, scale_up_bytes_per_s)
        self._first_border = PORTS_PER_GPU * pp
        self._capacity = np.array([*(per_gpu * pp), *slow_sends.bytes_per_s]) / 1e9
        self._sends_cross_nodes = sends_cross_nodes
        self._known: dict[tuple[int, float, float], Demand] = {}
        self._is_joined = False

    @classmethod
    def joined(cls, owners: Sequence[LinkMap], sends_cross_nodes: bool) -> FoldedLinkMap:
        """Link map of a pipeline over several kinds of cluster; rank r takes its links from `owners[r]`."""
        result = cls(len(owners), 1.0, 1.0, sends_cross_nodes)
        parts = [
            link_map.capacity_bytes_per_ns[PORTS_PER_GPU * rank : PORTS_PER_GPU * (rank + 1)]
            for rank, link_map in enumerate(owners)
        ]
        result._capacity, result._is_joined = np.concatenate(parts), True
        return result

    @property
    def gpus_per_rank(self) -> int:
        """One: the links of a single GPU are simulated."""
        return 1

    def uniform(self, rank: int, phase: Phase, cost: TransferCost) -> Demand:
        """Demand of a member that receives the mean number of rows."""
        return self._once(rank, cost.nic_bytes, cost.scale_up_bytes)

    def _once(self, rank: int, nic_bytes: float, scale_up_bytes: float) -> Demand:
        key = rank, nic_bytes, scale_up_bytes
        demand = self._known.get(key)
        if demand is None:
            demand = self._known[key] = _on_ports(*key)
        return demand

    def transfer(
        self, rank: int, phase: Phase, cost: TransferCost, load: FloatArray, node_load: FloatArray
    ) -> Demand:
        """As `uniform`, scaled by the mean load, because rows that capacity dropped are not sent."""
        rows, node_rows = (float(np.add.reduce(rows)) / len(rows) for rows in (load, node_load))
        return self._once(rank, cost.nic_bytes * node_rows, cost.scale_up_bytes * rows)

    def send(self, source: int, target: int, size: float) -> Demand:
        """Demand on the NICs where the pipeline crosses nodes, else on the scale-up ports, and on borders."""
        first = 0 if self._sends_cross_nodes else 2
        ports = (PORTS_PER_GPU * source + first, size), (PORTS_PER_GPU * target + first + 1, size)
        crossing = self._slow_sends.crossing.get((source, target), ())
        return Demand.of([*ports, *((self._first_border + b, size * senders) for b, senders in crossing)])

    def sends_like(self, other: LinkMap) -> bool:
        """Whether sends put their bytes on the same links as in another map of one kind of cluster."""
        return (
            isinstance(other, FoldedLinkMap)
            and not (self._is_joined or other._is_joined)
            and self._sends_cross_nodes == other._sends_cross_nodes
            and self._slow_sends.crossing == other._slow_sends.crossing
        )

    def send_slowness(self, source: int, target: int) -> FloatArray | float:
        """Time of a send over that inside a domain of the network (eq. N6)."""
        return self._slow_sends.alone.get((source, target), 1.0)

    def ports(self, rank: int) -> tuple[IntArray, IntArray]:
        """The outgoing ports of the one GPU."""
        return np.array([PORTS_PER_GPU * rank]), np.array([PORTS_PER_GPU * rank + 2])


def _on_ports(rank: int, nic_bytes: float, scale_up_bytes: float) -> Demand:
    """Demand on the NIC and the scale-up port of a pipeline rank, in both directions."""
    amounts = (nic_bytes, nic_bytes, scale_up_bytes, scale_up_bytes)
    used = [(PORTS_PER_GPU * rank + port, amount) for port, amount in enumerate(amounts) if amount > 0.0]
    if not isfinite(nic_bytes + scale_up_bytes):
        return Demand.of(used)  # raises
    return Demand.on_distinct(tuple(link for link, _ in used), tuple(float(amount) for _, amount in used))
