"""The all-reduce with reduction in the switch (NVLink SHARP), inside one scale-up domain."""

from __future__ import annotations

from moesim.hwmodels.errors import InputError
from moesim.simulator.cost.collectives.flows import Group, Hops, Operation, Phase, Plan, flows_of, size_of
from moesim.simulator.cost.collectives.library import CollectiveSpec, Request, Terms


def plan(operation: Operation, total_bytes: float, group: Group) -> Plan:
    """Every GPU sends (1 + 1/n) of the buffer to the switch and receives as much (eq. X10).

    Each rank owns 1/n of the buffer. The switch reads that part from all ranks, reduces it and sends it to
    its owner; the owner stores it once and the switch multicasts it to all ranks. On a star, traffic between
    a GPU and the switch loads the same links as a flow to its neighbour, so the plan contains such flows.
    Raises InputError for a group on more than one node.
    """
    if len(group) != 1:
        raise InputError(
            f"in-switch reduction needs all ranks on one switch; this group spans {len(group)} nodes: use a "
            "ring or a tree"
        )
    members, n = group[0], size_of(group)
    each = total_bytes * (1.0 + 1.0 / n)
    edges = [(a, b, each) for a, b in zip(members, (*members[1:], members[0]), strict=True)]
    return Plan(operation, "nvls", (Phase(flows_of(edges), Hops(1, 0)),))


def _terms(request: Request) -> Terms | None:
    figures = request.library.generation(request.architecture)
    if figures.nvls_share is None:
        return None
    return Terms(
        protocols=("Simple",),
        latency_s=request.library.nvls_latency.value,
        scale_up_share=figures.scale_up_share.value * figures.nvls_share.value,
    )


NVLS = CollectiveSpec("nvls", ("all_reduce",), plan, _terms, in_switch=True)
