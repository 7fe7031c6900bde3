"""The registration of a collective's algorithm: its operations, its flows, and how a library runs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from moesim.simulator.cost.collectives.library import Library
from moesim.simulator.cost.collectives.plan import PROTOCOLS, Group, Operation, Plan, Protocol


@dataclass(frozen=True, slots=True)
class Request:
    """One collective that an algorithm may run; `total_bytes` is the whole buffer."""

    operation: Operation
    total_bytes: float
    group: Group
    architecture: str
    """Architecture of the accelerator."""
    library: Library


@dataclass(frozen=True, slots=True)
class Terms:
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


def usual_terms(request: Request) -> Terms:
    """Terms of a ring: every protocol, with the ring's step latencies and link rates."""
    del request
    return Terms()


@dataclass(frozen=True, slots=True)
class CollectiveSpec:
    """One algorithm of a collective: its operations, its plan of (operation, bytes, group), and its terms.

    `terms` returns None where the algorithm cannot run a request, such as one over several nodes.
    `in_switch`: the algorithm is tried only where the caller allows reduction in switches; a request that no
    such algorithm can run is then an InputError.
    """

    name: str
    operations: tuple[Operation, ...]
    plan: Callable[[Operation, float, Group], Plan]
    terms: Callable[[Request], Terms | None] = usual_terms
    in_switch: bool = False
