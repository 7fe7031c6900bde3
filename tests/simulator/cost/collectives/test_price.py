"""Seconds: closed form and flows agree, the fastest way is taken, bad input is named."""

from __future__ import annotations

import numpy as np
import pytest

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.network import load_network
from moesim.hwmodels.node import load_node
from moesim.hwmodels.provenance import sourced_numbers
from moesim.hwmodels.topologies import Topology, build_topology
from moesim.simulator.cost.collectives import ring
from moesim.simulator.cost.collectives.flows import Hops, Operation, group_by_node, link_loads
from moesim.simulator.cost.collectives.library import CollectiveSpec, Request, Terms, load_library
from moesim.simulator.cost.collectives.registry import (
    COLLECTIVES,
    collective,
    estimate,
    neighbour_sends,
    operations,
)

NCCL = load_library()
H200 = build_topology(load_node("hgx-h200"), 1, load_network("single-node"))
FOUR = build_topology(load_node("hgx-h200"), 4, load_network("mrft-ib-400g"))
A100 = build_topology(load_node("hgx-a100"), 1, load_network("single-node"))


def busbw(operation: Operation, size: float, topology: Topology, *, in_switch: bool = False) -> float:
    n = topology.n_gpus
    factor = {"all_reduce": 2 * (n - 1) / n}.get(operation, (n - 1) / n)
    return factor * size / collective(operation, size, range(n), topology, NCCL, in_switch=in_switch).seconds


@pytest.mark.parametrize("topology", [H200, FOUR])
@pytest.mark.parametrize("operation", ["reduce_scatter", "all_gather"])
@pytest.mark.parametrize("size", [1e5, 1e7, 1e9, 1e11])
def test_flows_and_closed_form_take_the_same_time(
    operation: Operation, topology: Topology, size: float
) -> None:
    found = collective(operation, size, range(topology.n_gpus), topology, NCCL)
    closed = ring.closed_form_seconds(
        operation, size, topology.n_gpus, 8, NCCL,
        scale_up_bytes_per_s=0.824 * 450e9,
        nic_bytes_per_s=NCCL.nic_share.value * 50e9,
        ll_limit_bytes_per_s=NCCL.rate_limit("Hopper", "LL", topology.nodes),
        own_bytes_per_s=NCCL.local_copy_bytes_per_s,
    )  # fmt: skip
    assert found.seconds == pytest.approx(closed, rel=1e-12)


def test_trees_win_where_steps_count_and_rings_where_bytes_do() -> None:
    many = build_topology(load_node("hgx-h200"), 16, load_network("mrft-ib-400g"))
    small, large = (collective("all_reduce", size, range(128), many, NCCL).algorithm for size in (1e5, 1e10))
    assert (small, large) == ("tree", "ring")


def test_reduction_in_the_switch_beats_the_ring_on_eight_gpus() -> None:
    plain, in_switch = (busbw("all_reduce", 8 * 2**30, H200, in_switch=on) for on in (False, True))
    assert plain < 370e9 < 450e9 < in_switch < 500e9
    assert collective("all_reduce", 8e9, range(8), H200, NCCL, in_switch=True).algorithm == "nvls"


@pytest.mark.parametrize(
    ("operation", "topology"), [("all_reduce", A100), ("reduce_scatter", H200), ("all_to_all", H200)]
)
def test_in_switch_reduction_where_there_is_none_is_named(operation: Operation, topology: Topology) -> None:
    architecture = topology.node.accelerator.architecture
    with pytest.raises(InputError, match=f"no in-switch {operation} for architecture '{architecture}'"):
        collective(operation, 1e9, range(8), topology, NCCL, in_switch=True)


def test_an_operation_that_no_algorithm_can_do_is_refused_with_the_nearest() -> None:
    with pytest.raises(InputError, match=r"can do the collective 'all_gathr' \(nearest: 'all_gather'\)"):
        collective("all_gathr", 1e9, range(8), H200, NCCL)


@pytest.mark.parametrize("size", [-1.0, float("nan")])
def test_bytes_are_checked(size: float) -> None:
    with pytest.raises(InputError, match="bytes must be 0 or more"):
        collective("all_gather", size, range(8), H200, NCCL)


def test_a_gpu_that_does_not_exist_is_named() -> None:
    with pytest.raises(InputError, match="there is no GPU 8"):
        collective("all_gather", 1e6, (0, 8), H200, NCCL)


def test_an_unknown_architecture_is_named() -> None:
    with pytest.raises(InputError, match="no figures for architecture 'Volta'; it has Ampere"):
        NCCL.generation("Volta")


def test_a_pipeline_send_is_bound_by_its_link() -> None:
    inside = neighbour_sends(1e9, [(0, 1)], H200, NCCL)
    assert inside.seconds == pytest.approx(8.4e-6 + 3.4e-6 + 1e9 / 370.8e9)
    across = neighbour_sends(1e9, [(i, i + 8) for i in range(8)], FOUR, NCCL)
    assert across.seconds == pytest.approx(8.4e-6 + 14e-6 + 1e9 / (0.969 * 50e9))
    assert neighbour_sends(1e3, [(0, 1)], H200, NCCL).protocol == "LL"


def test_the_bottleneck_is_named() -> None:
    group = group_by_node(range(8), 8)
    plan = ring.plan("all_gather", 1e8, group)
    loads = [link_loads(plan.phases[0].flows, H200)]
    assert estimate(plan, loads, "LL", 1, H200, NCCL, Terms()).bottleneck == "kernel (LL)"
    assert estimate(plan, loads, "Simple", 1, H200, NCCL, Terms()).bottleneck == "gpu:0->nvswitch:0"


def test_steps_across_nodes_cannot_be_shorter_than_posting_a_message() -> None:
    steps = Hops(7, 0)
    assert NCCL.latency_s("ring", "LL", steps, nodes=1) == pytest.approx(6.6e-6 + 7 * 0.6e-6)
    assert NCCL.latency_s("ring", "LL", steps, nodes=2) == pytest.approx(6.6e-6 + 7 * 1e-6)
    assert NCCL.latency_s("tree", "LL", steps, nodes=2) == pytest.approx(6.8e-6 + 7 * 0.6e-6)


def test_every_figure_of_the_library_has_its_source() -> None:
    numbers = list(sourced_numbers(NCCL))
    assert len(numbers) > 15
    assert all(len(n.source) > 20 and n.kind != "assumed" for _, n in numbers)


# -- Every registered algorithm moves what its operation must, and the fastest one is -----------

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


@pytest.mark.parametrize("topology", [H200, FOUR], ids=["node", "four"])
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
