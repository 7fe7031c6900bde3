"""Every registered algorithm moves what its operation must, and the fastest one is taken."""

from __future__ import annotations

import numpy as np
import pytest

from moesim.hwmodels import Topology, build_topology, load_network, load_node
from moesim.simulator.cost.collectives.flows import group_by_node, link_loads
from moesim.simulator.cost.collectives.library import CollectiveSpec, Request, load_library
from moesim.simulator.cost.collectives.registry import COLLECTIVES, collective, estimate, operations

NCCL = load_library()
NODE = build_topology(load_node("hgx-h200"), 1, load_network("single-node"))
FOUR = build_topology(load_node("hgx-h200"), 4, load_network("mrft-ib-400g"))
SIZE = 1e8
LEAST = {"all_reduce": 1.0, "reduce_scatter": 7 / 8, "all_gather": 7 / 8, "all_to_all": 7 / 8}
"""Part of the buffer that every one of eight ranks must send at least."""


def test_operations_are_those_of_the_algorithms() -> None:
    assert set(operations()) == set(LEAST)
    assert all(set(spec.operations) <= set(operations()) and spec.operations for spec in COLLECTIVES.values())


@pytest.mark.parametrize("spec", COLLECTIVES.values(), ids=lambda spec: spec.name)
def test_an_algorithm_moves_what_its_operation_must(spec: CollectiveSpec) -> None:
    for operation in spec.operations:
        plan = spec.plan(operation, SIZE, group_by_node(range(8), 8))
        assert (plan.operation, plan.algorithm) == (operation, spec.name)
        sent = np.zeros(8)
        for phase in plan.phases:
            np.add.at(sent, phase.flows.src, phase.flows.bytes)
        assert (sent >= LEAST[operation] * SIZE * (1 - 1e-12)).sum() >= 7


@pytest.mark.parametrize("topology", [NODE, FOUR], ids=["node", "four"])
@pytest.mark.parametrize("size", [1e4, 1e7, 1e10])
def test_the_fastest_way_of_all_algorithms_is_taken(topology: Topology, size: float) -> None:
    for operation in operations():
        group = group_by_node(range(topology.n_gpus), 8)
        request = Request(operation, size, group, "Hopper", NCCL)
        seconds = []
        for spec in COLLECTIVES.values():
            terms = spec.terms(request)
            if operation not in spec.operations or spec.in_switch or terms is None:
                continue
            plan = spec.plan(operation, size, group)
            loads = [link_loads(phase.flows, topology) for phase in plan.phases]
            seconds += [
                estimate(plan, loads, protocol, len(group), topology, NCCL, terms).seconds
                for protocol in terms.protocols
            ]
        assert collective(operation, size, range(topology.n_gpus), topology, NCCL).seconds == min(seconds)
