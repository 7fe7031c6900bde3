"""Collectives as flows between ranks: their plans, and routes over a topology."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
from msgspec import Struct

from moesim.hwmodels.arrays import BoolArray, FloatArray, IntArray
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.topologies import Spreading, Topology

# -- plan --------------------------------------------------------------------------------------------
# The plan of a collective: flows between GPUs that overlap chunk by chunk, and their latency.

Operation = str
"""Name of an operation such as all_reduce; `registry.operations` lists those that some algorithm can run."""
Protocol = Literal["LL", "LL128", "Simple"]
PROTOCOLS: tuple[Protocol, ...] = ("LL", "LL128", "Simple")


class Flows(Struct, frozen=True):
    """Payload `bytes[i]` from global GPU `src[i]` to `dst[i]`; each pair occurs once, in ascending order."""

    src: IntArray
    dst: IntArray
    bytes: FloatArray


class Hops(Struct, frozen=True):
    """Dependent steps on the longest path through a phase, by the kind of link that they cross."""

    scale_up: int
    network: int


class Phase(Struct, frozen=True):
    """Flows that overlap chunk by chunk; the phase lasts as long as its busiest link."""

    flows: Flows
    hops: Hops
    own_bytes: float = 0.0
    """Bytes that the kernel copies inside each GPU without hiding them behind the links."""


class Plan(Struct, frozen=True):
    """The phases of a collective, which run one after the other."""

    operation: Operation
    algorithm: str
    phases: tuple[Phase, ...]


def flows_of(pairs: Iterable[tuple[int, int, float]]) -> Flows:
    """Flows of (source, destination, bytes) triples; equal pairs add up, sends to itself are dropped."""
    total: dict[tuple[int, int], float] = {}
    for src, dst, size in pairs:
        if src != dst and size > 0.0:
            total[src, dst] = total.get((src, dst), 0.0) + size
    keys = sorted(total)
    return Flows(
        np.array([k[0] for k in keys], dtype=np.int64),
        np.array([k[1] for k in keys], dtype=np.int64),
        np.array([total[k] for k in keys], dtype=np.float64),
    )


Group = tuple[tuple[int, ...], ...]
"""Global GPU numbers of the ranks, node by node."""


def group_by_node(ranks: Sequence[int], gpus_per_node: int) -> Group:
    """The ranks of a group by node, both in ascending order.

    Raises InputError for fewer than two ranks and for a repeated rank.
    """
    if len(ranks) < 2 or len(set(ranks)) != len(ranks):
        raise InputError(f"a collective needs at least 2 different ranks; these are {list(ranks)}")
    nodes: dict[int, list[int]] = {}
    for rank in sorted(ranks):
        nodes.setdefault(rank // gpus_per_node, []).append(rank)
    return tuple(tuple(nodes[node]) for node in sorted(nodes))


def size_of(group: Group) -> int:
    """Number of ranks of a group."""
    return sum(len(node) for node in group)


def rails_of(group: Group) -> int:
    """Number of rings, chains or NICs that every node can use at once, set by the smallest node."""
    return min(len(node) for node in group)


# -- network -----------------------------------------------------------------------------------------
# Routes flows over a topology: the bytes that every link carries, and the time of the busiest link.


class Shares(Struct, frozen=True):
    """Shares of nominal link rates that a transport reaches; a payload ceiling caps scale-up links."""

    scale_up: float
    network: float


class LinkLoads(Struct, frozen=True):
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
