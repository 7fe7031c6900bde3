"""Flows on a topology: how many bytes every link carries, and how long the busiest one takes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moesim.hwmodels.arrays import BoolArray, FloatArray
from moesim.hwmodels.topologies import Spreading, Topology
from moesim.simulator.cost.collectives.plan import Flows


@dataclass(frozen=True, slots=True)
class Shares:
    """What a transport reaches of nominal link rates; a scale-up link never more than its payload ceiling."""

    scale_up: float
    network: float


@dataclass(frozen=True, slots=True)
class LinkLoads:
    """Payload bytes on every link that a set of flows uses, [links], with the links' kinds and rates.

    `payload_bytes_per_s` is the ceiling of any transport, `nominal_bytes_per_s` the data-sheet rate.
    """

    ids: tuple[str, ...]
    kinds: tuple[str, ...]
    bytes: FloatArray
    payload_bytes_per_s: FloatArray
    nominal_bytes_per_s: FloatArray
    scale_up: BoolArray
    """Which of them belong to the inside of a node or scale-up domain."""

    def seconds(self, shares: Shares) -> FloatArray:
        """Time of every link alone: bytes over the rate that the transport reaches on it."""
        inside = np.minimum(shares.scale_up * self.nominal_bytes_per_s, self.payload_bytes_per_s)
        return np.asarray(
            self.bytes / np.where(self.scale_up, inside, shares.network * self.nominal_bytes_per_s)
        )

    def busiest(self, shares: Shares) -> tuple[str, float]:
        """Id of the link that takes longest, with its seconds; "" and 0 for no flows."""
        if not self.ids:
            return "", 0.0
        seconds = self.seconds(shares)
        worst = int(np.argmax(seconds))
        return self.ids[worst], float(seconds[worst])

    def of_kind(self, kind: str) -> dict[str, float]:
        """Bytes by link id, for one kind of link."""
        sizes = zip(self.ids, self.kinds, self.bytes.tolist(), strict=True)
        return {link: size for link, of, size in sizes if of == kind}


def link_loads(flows: Flows, topology: Topology, spreading: Spreading = "modulo", seed: int = 0) -> LinkLoads:
    """Sum of the flows over the links of their routes; rates are what faults left of them.

    The only place that asks the topology for routes. Raises InputError for a GPU that does not exist.
    """
    routes, table = topology.routes(flows.src, flows.dst, spreading, seed), topology.links()
    carried = routes.share * np.repeat(flows.bytes, np.diff(routes.indptr))
    total: FloatArray = np.bincount(routes.links, carried, minlength=len(table.ids)).astype(np.float64)
    used = np.unique(routes.links)
    return LinkLoads(
        tuple(table.ids[link] for link in used.tolist()),
        tuple(table.kinds[link] for link in used.tolist()),
        total[used],
        table.bytes_per_s[used],
        topology.left_bytes_per_s()[used],
        table.scale_up[used],
    )


def largest_by_gpu(flows: Flows) -> float:
    """Most payload bytes that one GPU sends; what its communication SMs must move."""
    if len(flows.src) == 0:
        return 0.0
    return float(np.bincount(flows.src, flows.bytes).max())
