"""Routes flows over a topology: the bytes that every link carries, and the time of the busiest link."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moesim.hwmodels.arrays import BoolArray, FloatArray
from moesim.hwmodels.topologies import Spreading, Topology
from moesim.simulator.cost.collectives.plan import Flows


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of nominal link rates that a transport reaches; a payload ceiling caps scale-up links."""

    scale_up: float
    network: float


@dataclass(frozen=True, slots=True)
class LinkLoads:
    """Payload bytes on every link that a set of flows uses [links], with the links' kinds and rates.

    `payload_bytes_per_s` is the ceiling of any transport, `nominal_bytes_per_s` the data-sheet rate.
    """

    ids: tuple[str, ...]
    kinds: tuple[str, ...]
    bytes: FloatArray
    payload_bytes_per_s: FloatArray
    nominal_bytes_per_s: FloatArray
    scale_up: BoolArray
    """Whether each link is inside a node or scale-up domain."""

    def seconds(self, shares: Shares) -> FloatArray:
        """Seconds of every link alone, its bytes over the rate that the transport reaches on it."""
        inside = np.minimum(shares.scale_up * self.nominal_bytes_per_s, self.payload_bytes_per_s)
        return np.asarray(
            self.bytes / np.where(self.scale_up, inside, shares.network * self.nominal_bytes_per_s)
        )

    def busiest(self, shares: Shares) -> tuple[str, float]:
        """Id of the link that takes longest, and its seconds; "" and 0 without flows."""
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
    """Sum of the flows over the links of their routes, at the rates that faults left.

    This is the only function of the package that asks the topology for routes. Raises InputError for a GPU
    that does not exist.
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
        topology.remaining_bytes_per_s()[used],
        table.scale_up[used],
    )


def most_bytes_sent(flows: Flows) -> float:
    """Most payload bytes that one GPU sends, which its communication SMs must move."""
    if len(flows.src) == 0:
        return 0.0
    return float(np.bincount(flows.src, flows.bytes).max())
