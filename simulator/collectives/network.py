"""Flows on a topology: how many bytes every link carries, and how long the busiest one takes."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np

from moesim.hwmodels.topologies import Link, Topology
from moesim.simulator.collectives.plan import FloatArray, Flows


@dataclass(frozen=True, slots=True)
class Shares:
    """What a transport reaches of nominal link rates; a scale-up link never more than its payload ceiling."""

    scale_up: float
    network: float


@dataclass(frozen=True, slots=True)
class LinkLoads:
    """Payload bytes on every link that a set of flows uses, in order of first use."""

    links: tuple[Link, ...]
    bytes: FloatArray

    def seconds(self, shares: Shares) -> FloatArray:
        """Time of every link alone: bytes over the rate that the transport reaches on it."""
        rates = np.array([rate(link, shares) for link in self.links])
        return np.asarray(self.bytes / rates)

    def busiest(self, shares: Shares) -> tuple[Link | None, float]:
        """The link that takes longest, with its seconds; nothing for no flows."""
        if not self.links:
            return None, 0.0
        seconds = self.seconds(shares)
        worst = int(np.argmax(seconds))
        return self.links[worst], float(seconds[worst])

    def of_kind(self, kind: str) -> dict[str, float]:
        """Bytes by link id, for one kind of link."""
        return {
            link.id: float(size)
            for link, size in zip(self.links, self.bytes, strict=True)
            if link.kind == kind
        }


def rate(link: Link, shares: Shares) -> float:
    """Payload bytes/s that a transport reaches on a link."""
    if link.kind == "nvlink":
        return min(shares.scale_up * link.nominal_bytes_per_s, link.bytes_per_s)
    return shares.network * link.nominal_bytes_per_s


def link_loads(flows: Flows, topology: Topology) -> LinkLoads:
    """Sum of the flows over the links of their routes.

    The only place that asks the topology for routes. Raises InputError for a GPU that does not exist.
    """
    place: dict[str, int] = {}
    links: list[Link] = []
    total: list[float] = []
    for src, dst, size in zip(flows.src.tolist(), flows.dst.tolist(), flows.bytes.tolist(), strict=True):
        for link in topology.route(src, dst):
            index = place.setdefault(link.id, len(links))
            if index == len(links):
                links.append(link)
                total.append(0.0)
            total[index] += size
    return LinkLoads(tuple(links), np.array(total, dtype=np.float64))


def largest_by_gpu(flows: Flows) -> float:
    """Most payload bytes that one GPU sends; what its communication SMs must move."""
    if len(flows.src) == 0:
        return 0.0
    return float(np.bincount(flows.src, flows.bytes).max())


def over(size: float, bytes_per_s: float) -> float:
    """Seconds at a rate that may be infinite (no limit)."""
    return 0.0 if bytes_per_s == inf else size / bytes_per_s
