"""Dispatch and combine as flows against the closed form that the pricer uses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lab.writers.link_loads import (
    TOKENS_PER_DRAW,
    RowTraffic,
    dispatch_flows,
    dispatch_loads,
    group_loads,
    load_by_kind,
    sampled,
    sampled_traffic,
    uniform_traffic,
)

from moesim.hwmodels.calibration import load_profile
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.network import load_network
from moesim.hwmodels.node import load_node
from moesim.hwmodels.topologies import Topology, build_topology
from moesim.simulator.cost.collectives.flows import Shares, link_loads
from moesim.simulator.cost.transfers import dispatcher_transfer
from moesim.simulator.dispatchers.protocol import Call, Links, transfer_bytes
from moesim.simulator.dispatchers.registry import dispatcher
from moesim.simulator.layout.routing import Gate, expected_targets

SPREAD = Gate(64, 4)
V3 = Gate(256, 8, 8, 4, "top2-sum")
ROW = 7392.0
TOKENS = 4096


def topology(nodes: int, network: str = "mpft-ib-400g") -> Topology:
    return build_topology(load_node("hgx-h800"), nodes, load_network(network if nodes > 1 else "single-node"))


PLACE = topology(2)


def outgoing(topology: Topology, flows_bytes: dict[str, float], gpu: int) -> float:
    return sum(size for link, size in flows_bytes.items() if link.startswith(f"gpu:{gpu}->"))


@pytest.mark.parametrize("ep", [8, 16, 32, 64])
def test_uniform_load_puts_the_bytes_of_the_closed_form_on_every_link(ep: int) -> None:
    nodes = ep // 8
    targets = expected_targets(V3, ep, 8)
    expected = transfer_bytes(targets, TOKENS, ROW)
    place = topology(nodes)
    loads = group_loads(uniform_traffic(targets, TOKENS), ROW, range(ep), place)
    nvlink = loads.of_kind("nvlink")
    assert len(nvlink) == 2 * ep
    assert list(nvlink.values()) == pytest.approx([expected.nvlink_bytes] * 2 * ep, rel=1e-9)
    nic = loads.of_kind("nic")
    assert len(nic) == (2 * ep if nodes > 1 else 0)
    assert list(nic.values()) == pytest.approx([expected.ib_bytes] * len(nic), rel=1e-9)


@pytest.mark.parametrize("operation", ["dispatch", "combine"])
@pytest.mark.parametrize("ep", [16, 64])
def test_the_busiest_link_takes_as_long_as_the_transfer_of_the_pricer(ep: int, operation: str) -> None:
    profile, node = load_profile("hopper-communication"), load_node("hgx-h800")
    targets = expected_targets(V3, ep, 8)
    traffic = uniform_traffic(targets, TOKENS)
    row = ROW if operation == "dispatch" else 14336.0
    # A combine is the dispatch backwards.
    way = traffic if operation == "dispatch" else RowTraffic(traffic.network.T, traffic.scale_up.T)
    flows = dispatch_flows(way, row, range(ep))
    links = Links(200e9, 0.0, 50e9, 0.0, 8)
    # 24 SMs move more than the links carry, so the links decide.
    call = Call(ep, ep // 8, 24, phase="dispatch F" if operation == "dispatch" else "combine F")
    moved = transfer_bytes(targets, TOKENS, row)
    time = dispatcher_transfer(dispatcher("deepep-2025-02"), call, moved, links, profile)
    share = profile.curve(f"ep.{operation}.scale_up_fraction.deepep").curve.at(24).value
    loads = link_loads(flows, topology(ep // 8))
    assert node.scale_up_bytes_per_s == 200e9
    assert loads.busiest(Shares(share, 0.8))[1] == pytest.approx(time.payload_s, rel=1e-9)


def test_sampled_loads_spread_around_the_uniform_ones() -> None:
    traffic = sampled(sampled_traffic(V3, 64, 8, 512, seed=1))
    place = topology(8)
    even = load_by_kind(group_loads(uniform_traffic(expected_targets(V3, 64, 8), 512), ROW, range(64), place))
    drawn = load_by_kind(group_loads(traffic, ROW, range(64), place))
    for level, noisy in zip(even, drawn, strict=True):
        assert (level.kind, level.links) == (noisy.kind, noisy.links)
        assert level.largest_bytes == pytest.approx(level.mean_bytes, rel=1e-9)
        assert noisy.mean_bytes == pytest.approx(level.mean_bytes, rel=0.01)
        assert 1.0 < noisy.largest_bytes / noisy.mean_bytes < 1.2


def test_rows_reach_all_their_targets() -> None:
    drawn = sampled_traffic(V3, 32, 8, 100, seed=5)
    traffic = sampled(drawn)
    arrived = traffic.scale_up.sum(axis=0)
    # What a rank gets comes from the forwarders of its node, but for what the one of its own index keeps.
    same_index = np.arange(32)[:, None] % 8 == np.arange(32)[None, :] % 8
    assert arrived == pytest.approx(np.where(same_index, 0, drawn.rows).sum(axis=0))


def test_a_group_needs_as_many_gpus_as_ranks() -> None:
    with pytest.raises(InputError, match="4 GPUs given for an expert-parallel group of 8"):
        dispatch_flows(uniform_traffic(expected_targets(Gate(64, 4), 8, 8), 10), ROW, range(4))


def test_even_routing_loads_links_evenly_and_a_sample_nearly() -> None:
    tokens = TOKENS_PER_DRAW + 100
    rows = {(r.routing, r.load.kind): r for r in dispatch_loads(SPREAD, tokens, 1000.0, range(16), PLACE)}
    for kind in ("nvlink", "nic"):
        assert rows["even", kind].largest_over_mean == pytest.approx(1.0, rel=1e-9)
        assert 1.0 < rows["sampled", kind].largest_over_mean < 1.15
        assert rows["sampled", kind].load.mean_bytes == pytest.approx(
            rows["even", kind].load.mean_bytes, rel=0.02
        )


def test_the_same_seed_draws_the_same_loads() -> None:
    first, again, other = (dispatch_loads(SPREAD, 300, 1.0, range(16), PLACE, seed) for seed in (1, 1, 2))
    assert first == again != other


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from([Gate(64, 6), Gate(64, 6, 8, 3, "best"), Gate(64, 6, 8, 3, "top2-sum")]),
    st.sampled_from([(4, 2), (16, 8), (8, 8)]),
    st.integers(0, 99),
)
def test_sampled_traffic_is_conserved(gate: Gate, shape: tuple[int, int], seed: int) -> None:
    ep, per_node = shape
    tokens = 40
    traffic = sampled_traffic(gate, ep, per_node, tokens, seed)
    nodes = np.arange(ep) // per_node
    same_node, same_index = (
        nodes[:, None] == nodes,
        (np.arange(ep) % per_node)[:, None] == np.arange(ep) % per_node,
    )
    # IB only between GPUs of the same index on different nodes, NVLink only inside a node
    assert not traffic.ib[same_node | ~same_index].any()
    assert not traffic.nvlink[~same_node].any()
    # whatever a rank receives came over NVLink, or is a local copy at the GPU that took it in
    copies = (traffic.rows * same_index).sum(axis=0)
    assert np.array_equal(traffic.nvlink.sum(axis=0) + copies, traffic.rows.sum(axis=0))
    # every token that crosses IB reaches from one to all GPUs of the node behind it
    by_node = traffic.rows.reshape(ep, -1, per_node).sum(axis=2)
    crossed = traffic.ib.reshape(ep, -1, per_node).sum(axis=2)
    remote = crossed > 0
    assert (crossed <= by_node)[remote].all()
    assert (by_node <= per_node * crossed)[remote].all()
    assert tokens <= traffic.rows.sum(axis=1).min()
    assert traffic.rows.sum(axis=1).max() <= tokens * min(gate.top_k, ep)
