"""What an algorithm of a collective registers: its operations, its flows, and how a library runs it."""

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
    """Of the accelerator."""
    library: Library


@dataclass(frozen=True, slots=True)
class Terms:
    """How a library runs an algorithm: what it reaches of link rates, with which protocols and latencies."""

    protocols: tuple[Protocol, ...] = PROTOCOLS
    """Those that are tried."""
    latencies: Literal["ring", "tree"] = "ring"
    """The library's table of step latencies."""
    latency_s: float | None = None
    """Latency of the whole collective where it does not follow from steps."""
    scale_up_share: float | None = None
    """Payload over the nominal scale-up rate; None for that of the library's copies on this accelerator."""
    wire_share: float = 1.0
    """What is left of a protocol's share of the wire."""


def usual_terms(request: Request) -> Terms:
    """Every protocol, step latencies and link rates as those of a ring."""
    del request
    return Terms()


@dataclass(frozen=True, slots=True)
class CollectiveSpec:
    """One algorithm: which operations it can do, its plan of (operation, bytes, group), and its terms.

    `terms` is None where the algorithm does not run a request, such as one over several nodes. `in_switch`:
    only tried where a caller says that switches reduce; then a request that it cannot run is an InputError.
    """

    name: str
    operations: tuple[Operation, ...]
    plan: Callable[[Operation, float, Group], Plan]
    terms: Callable[[Request], Terms | None] = usual_terms
    in_switch: bool = False
