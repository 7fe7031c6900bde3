"""What a topology is: GPUs by global rank, links between them, and routes that need no search."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.node import Node

if TYPE_CHECKING:
    import networkx

LinkKind = Literal["nvlink", "nic", "leaf-spine"]


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of one cable (links are full duplex: the way back is another Link).

    `bytes_per_s` is the payload bandwidth that traffic gets, `nominal_bytes_per_s` the data-sheet one.
    `latency_s` is this link's share of the end-to-end latency of a route.
    """

    id: str
    kind: LinkKind
    tail: str
    head: str
    bytes_per_s: float
    nominal_bytes_per_s: float
    latency_s: float


Route = tuple[Link, ...]


def route_latency_s(route: Sequence[Link]) -> float:
    """End-to-end latency of a route: the sum over its links; 0 for the empty route of a GPU to itself."""
    return sum(link.latency_s for link in route)


def route_bytes_per_s(route: Sequence[Link]) -> float:
    """Payload bandwidth of an otherwise idle route: its narrowest link; infinite for the empty route."""
    return min((link.bytes_per_s for link in route), default=float("inf"))


def gpu_name(gpu: int) -> str:
    """Name of a GPU in graphs and links, by its global number (node-major)."""
    return f"gpu:{gpu}"


class Topology(ABC):
    """`nodes` equal servers and what joins them; GPU g is local GPU g % n of server g // n."""

    kind: str

    def __init__(self, node: Node, nodes: int) -> None:
        """Raises InputError where the nodes do not fit the network (in subclasses)."""
        self.node = node
        self.nodes = nodes
        self.gpus_per_node = node.n_gpus
        self.n_gpus = nodes * node.n_gpus

    @abstractmethod
    def graph(self) -> networkx.Graph:
        """The whole network for people and checks; edges carry kind, cables and bytes_per_s (a direction)."""

    @abstractmethod
    def route(self, src_gpu: int, dst_gpu: int) -> Route:
        """The links from one GPU to another, in order; empty for a GPU to itself.

        Raises InputError for a GPU that does not exist.
        """

    def node_of(self, gpu: int) -> int:
        """The server of a GPU."""
        return gpu // self.gpus_per_node

    def local_of(self, gpu: int) -> int:
        """The GPU's number inside its server."""
        return gpu % self.gpus_per_node

    def check_gpu(self, gpu: int) -> None:
        """Raise InputError unless this GPU exists."""
        if not 0 <= gpu < self.n_gpus:
            raise InputError(f"there is no GPU {gpu}: the topology has GPUs 0 to {self.n_gpus - 1}")
