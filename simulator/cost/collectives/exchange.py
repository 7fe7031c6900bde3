"""The all-to-all, and sends between pairs of ranks such as pipeline neighbours."""

from __future__ import annotations

from collections.abc import Sequence

from moesim.simulator.cost.collectives.flows import (
    Group,
    Hops,
    Operation,
    Phase,
    Plan,
    flows_of,
    size_of,
)
from moesim.simulator.cost.collectives.library import CollectiveSpec, Library, Request, Terms


def all_to_all(operation: Operation, total_bytes: float, group: Group) -> Plan:
    """Every rank sends 1/n of its `total_bytes` to each other rank (eq. X11).

    A part for another node first crosses the scale-up link to the local member with the receiver's place,
    then that member's NIC, so that it stays on its rail. Source: NVIDIA/nccl src/transport/net.cc (PXN).
    """
    part = total_bytes / size_of(group)
    edges: list[tuple[int, int, float]] = []
    for home, members in enumerate(group):
        for src in members:
            for there, targets in enumerate(group):
                for place, dst in enumerate(targets):
                    relay = src if there == home or place >= len(members) else members[place]
                    edges += [(src, relay, part), (relay, dst, part)]
    across = len(group) > 1
    hops = Hops(1, 1 if across else 0)
    return Plan(operation, "direct", (Phase(flows_of(edges), hops),))


def sends(total_bytes: float, pairs: Sequence[tuple[int, int]], *, across_nodes: bool) -> Plan:
    """Simultaneous sends of `total_bytes` from the first to the second rank of every pair (eq. X4)."""
    edges = [(a, b, total_bytes) for a, b in pairs]
    hops = Hops(0, 1) if across_nodes else Hops(1, 0)
    return Plan("send", "direct", (Phase(flows_of(edges), hops),))


def message_terms(message_bytes: float, library: Library, scale_up_share: float | None = None) -> Terms:
    """Terms of point-to-point messages, which use LL up to the library's limit and Simple above it."""
    small = message_bytes <= library.small_message.value
    return Terms(protocols=("LL" if small else "Simple",), scale_up_share=scale_up_share)


def _terms(request: Request) -> Terms:
    share = request.library.exchange_share.value
    return message_terms(request.total_bytes / size_of(request.group), request.library, share)


DIRECT = CollectiveSpec("direct", ("all_to_all",), all_to_all, _terms)
