"""Data of a communication library's protocols: latencies, wire efficiency and rates per link."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from importlib import resources
from math import inf
from typing import Literal

from msgspec import Struct

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.frozen import Frozen
from moesim.hwmodels.provenance import (
    DateText,
    Kind,
    Source,
    SourcedBytes,
    SourcedBytesPerSecond,
    SourcedCount,
    SourcedFraction,
    SourcedSeconds,
)
from moesim.hwmodels.units import Seconds
from moesim.hwmodels.validation import validate_model
from moesim.hwmodels.yaml_io import parse_mapping
from moesim.simulator.cost.collectives.flows import PROTOCOLS, Group, Hops, Operation, Plan, Protocol


class StepLatency(Frozen):
    """Seconds of a launch (`base`) and of one dependent step over each kind of link."""

    base: Seconds
    scale_up: Seconds
    network: Seconds


class Latencies(Frozen):
    """Latencies by algorithm family and protocol, from one table of the source."""

    kind: Kind
    source: Source
    date: DateText
    ring: dict[Protocol, StepLatency]
    tree: dict[Protocol, StepLatency]


class Generation(Frozen):
    """Figures of a library that depend on the architecture of the GPU."""

    scale_up_share: SourcedFraction
    """Payload rate of the kernels over the nominal scale-up rate."""
    ll_limit: SourcedBytesPerSecond
    """Largest rate per GPU of protocol LL inside a node."""
    in_switch_share: SourcedFraction | None = None
    """Bytes of a buffer that switches add up and return over the nominal scale-up rate; None: they cannot."""
    nvls_share: SourcedFraction | None = None
    """`scale_up_share` with reduction in the switch; None where the switch cannot reduce."""


class Library(Frozen):
    """Data of one library (`data/collectives/*.yaml`)."""

    name: str
    title: str
    wire_shares: dict[Protocol, SourcedFraction]
    latencies: Latencies
    generations: dict[str, Generation]
    ll_limit_two_nodes: SourcedBytesPerSecond
    ll_limit_more_nodes: SourcedBytesPerSecond
    network_reduction_share: SourcedFraction
    """The same of the switches between nodes, over the rate of a node's NICs."""
    tree_share: SourcedFraction
    nvls_latency: SourcedSeconds
    network_post: SourcedSeconds
    """Time of a proxy for one message; Simple needs three messages (data, credit, flush)."""
    small_message: SourcedBytes
    """Point-to-point messages up to this size use LL."""
    nic_share: SourcedFraction
    channels: SourcedCount
    """CTAs, and so SMs, of a collective kernel on one GPU."""
    local_copy_per_sm: SourcedBytesPerSecond
    exchange_share: SourcedFraction
    """Payload rate over the nominal scale-up rate when every GPU sends to every other."""

    def generation(self, architecture: str) -> Generation:
        """Figures of an architecture; raises InputError where the library has none."""
        if architecture not in self.generations:
            raise InputError(
                f"library {self.name!r} has no figures for architecture {architecture!r}; it has "
                f"{', '.join(self.generations)}"
            )
        return self.generations[architecture]

    def in_switch_share(self, architecture: str) -> float | None:
        """Share of the scale-up rate of all-reduces that switches add up; None where they cannot.

        A later part of a generation ("Blackwell Ultra") has the figures of the generation.
        """
        figures = self.generations.get(architecture) or self.generations.get(architecture.partition(" ")[0])
        return figures.in_switch_share.value if figures and figures.in_switch_share else None

    def latency_s(
        self, family: Literal["ring", "tree"], protocol: Protocol, hops: Hops, *, nodes: int
    ) -> float:
        """Seconds of the launch and the dependent steps of a phase (eq. X12).

        Across nodes every step of a ring also posts its messages, so no step is shorter than posting them.
        """
        step = (self.latencies.ring if family == "ring" else self.latencies.tree)[protocol]
        scale_up = step.scale_up
        if nodes > 1 and family == "ring":
            scale_up = max(scale_up, self.network_post.value * (3 if protocol == "Simple" else 1))
        return step.base + hops.scale_up * scale_up + hops.network * step.network

    def rate_limit(self, architecture: str, protocol: Protocol, nodes: int) -> float:
        """Largest payload rate of a GPU's kernels in bytes/s, independent of the links."""
        if protocol != "LL":
            return inf
        if nodes == 1:
            return self.generation(architecture).ll_limit.value
        return (self.ll_limit_two_nodes if nodes == 2 else self.ll_limit_more_nodes).value

    @property
    def local_copy_bytes_per_s(self) -> float:
        """Rate at which the kernel's SMs copy inside a GPU."""
        return self.channels.n * self.local_copy_per_sm.value


@lru_cache(maxsize=1)
def load_library() -> Library:
    """The shipped figures of NCCL."""
    place = "data/collectives/nccl.yaml"
    text = resources.files("moesim.simulator").joinpath(*place.split("/")).read_text("utf-8")
    return validate_model(Library, parse_mapping(text, place), place)


# -- spec --------------------------------------------------------------------------------------------
# The registration of a collective's algorithm: its operations, its flows, and how a library runs it.


class Request(Struct, frozen=True):
    """One collective that an algorithm may run; `total_bytes` is the whole buffer."""

    operation: Operation
    total_bytes: float
    group: Group
    architecture: str
    """Architecture of the accelerator."""
    library: Library


class Terms(Struct, frozen=True):
    """How a library runs an algorithm: protocols, latencies and the share of link rates it reaches."""

    protocols: tuple[Protocol, ...] = PROTOCOLS
    """Protocols to try."""
    latencies: Literal["ring", "tree"] = "ring"
    """Which of the library's tables of step latencies applies."""
    latency_s: float | None = None
    """Latency of the whole collective where it does not follow from steps."""
    scale_up_share: float | None = None
    """Payload rate over the nominal scale-up rate; None stands for the library's usual share."""
    wire_share: float = 1.0
    """Factor on a protocol's share of the wire."""


class CollectiveSpec(Struct, frozen=True):
    """One algorithm of a collective: its operations, its plan of (operation, bytes, group), and its terms.

    `terms` returns None where the algorithm cannot run a request, such as one over several nodes.
    `in_switch`: the algorithm is tried only where the caller allows reduction in switches; a request that no
    such algorithm can run is then an InputError.
    """

    name: str
    operations: tuple[Operation, ...]
    plan: Callable[[Operation, float, Group], Plan]
    terms: Callable[[Request], Terms | None] = lambda request: Terms()
    in_switch: bool = False
