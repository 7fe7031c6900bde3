"""Topologies as published: counts, costs, latencies; their sizes, kinds and pictures."""

from __future__ import annotations

import functools
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from topology_cases import SHIPPED, cases, network, node

from moesim.hwmodels import (
    InputError,
    Network,
    ScaleUp,
    build_topology,
    list_networks,
    list_scale_ups,
    load_cluster,
    load_network,
    load_node,
    load_scale_up,
    route_bytes_per_s,
    route_latency_s,
)
from moesim.hwmodels.cluster import (
    ComparedFigure,
    compare_networks,
    published_table,
    slim_fly_counts,
)
from moesim.hwmodels.topologies import Topology
from moesim.hwmodels.topologies.base import MOST_PER_LAYER, picture
from moesim.hwmodels.topologies.description import ScaleUpFabric
from moesim.hwmodels.topologies.fat_tree import Trees
from moesim.hwmodels.topologies.part import ScaleUpSpec, TopologySpec, any_fabric, kind_rows
from moesim.hwmodels.topologies.registry import SCALE_OUT, SCALE_UP
from moesim.hwmodels.topologies.scale_up_parts import NVSWITCH, NvswitchFabric, NvswitchNode
from moesim.hwmodels.units import in_unit
from moesim.hwmodels.validation import registry

CASES = [("mpft-ib-400g", 256), ("mpft-ib-400g", 33), ("mrft-ib-400g", 256), ("single-node", 1)]


@functools.cache
def topology(network: str, nodes: int) -> Topology:
    return build_topology(load_node("hgx-h800"), nodes, load_network(network))


@given(st.sampled_from(CASES), st.data())
def test_latency_and_bandwidth_of_routes(case: tuple[str, int], data: st.DataObject) -> None:
    topo = topology(*case)
    src, dst = (data.draw(st.integers(0, topo.n_gpus - 1)) for _ in range(2))
    route = topo.route(src, dst)
    kinds = [link.kind for link in route]
    network_s = (3.7e-6 if "leaf-spine" in kinds else 2.8e-6) if "nic" in kinds else 0.0
    inside_s = 3.33e-6 if "nvlink" in kinds else 0.0
    assert route_latency_s(route) == pytest.approx(network_s + inside_s)
    if topo.node_of(src) != topo.node_of(dst):
        assert route_bytes_per_s(route) == 40e9
        assert kinds.count("nic") == 2
    elif src != dst:
        assert kinds == ["nvlink", "nvlink"]
        assert route_bytes_per_s(route) == 160e9


@given(st.integers(0, 2047), st.integers(0, 2047))
def test_planes_meet_only_inside_nodes(src: int, dst: int) -> None:
    topo = topology("mpft-ib-400g", 256)
    route = topo.route(src, dst)
    names = [name for link in route for name in (link.tail, link.head)]
    planes = {name.split(".")[0] for name in names if name.startswith("plane")}
    if topo.node_of(src) == topo.node_of(dst):
        assert planes == set()
        return
    assert planes == {f"plane{dst % 8}"}
    forwards = [link for link in route if link.kind == "nvlink"]
    assert bool(forwards) == (src % 8 != dst % 8)
    if forwards:
        assert route[:2] == tuple(forwards)
        assert forwards[-1].head == f"gpu:{src // 8 * 8 + dst % 8}"


def test_the_home_case_has_eight_planes_of_eight_leaves_and_four_spines() -> None:
    counted = topology("mpft-ib-400g", 256).inventory()
    assert counted.switches == {"nvswitch": 256, "leaf": 64, "spine": 32}
    assert counted.inter_switch_links == 8 * 256


def test_rails_share_leaves_in_the_single_plane() -> None:
    topo = topology("mrft-ib-400g", 256)
    assert [link.kind for link in topo.route(0, 8)] == ["nic", "nic"]
    assert [link.kind for link in topo.route(0, 9)] == ["nic", "leaf-spine", "leaf-spine", "nic"]


@given(st.integers(1, 64), st.sampled_from([4, 8, 40, 64]))
def test_trees_are_non_blocking_and_fit_their_ports(leaves: int, ports: int) -> None:
    if leaves > ports:
        with pytest.raises(InputError, match=f"at most {ports} leaves"):
            Trees.for_leaves(1, leaves, ports)
        return
    tree = Trees.for_leaves(1, leaves, ports)
    if leaves == 1:
        assert tree.spines == 0
        return
    assert tree.spines * tree.bundle == ports // 2
    assert leaves * tree.bundle <= ports


# -- arXiv 2505.09343, Table 3 -----------------------------------------------------------------------


@functools.cache
def cells() -> dict[tuple[str, str], ComparedFigure]:
    return {(cell.network, cell.figure): cell for cell in compare_networks()}


@pytest.mark.parametrize("name", ["FT2", "MPFT", "FT3", "SF", "DF"])
def test_counts_are_those_of_the_table(name: str) -> None:
    for figure in ("endpoints", "switches", "links"):
        assert cells()[name, figure].ours == cells()[name, figure].published


ERRORS = {
    ("FT2", "cost_musd"): -0.0335, ("FT2", "cost_kusd_per_endpoint"): -0.0325,
    ("MPFT", "cost_musd"): -0.0335, ("MPFT", "cost_kusd_per_endpoint"): -0.0325,
    ("FT3", "cost_musd"): -0.1121, ("FT3", "cost_kusd_per_endpoint"): -0.1130,
    ("SF", "cost_musd"): -0.0360, ("SF", "cost_kusd_per_endpoint"): -0.0287,
    ("DF", "cost_musd"): -0.0700, ("DF", "cost_kusd_per_endpoint"): -0.0672,
}  # fmt: skip
"""What an independent price list misses the published costs by (nothing is fitted)."""


@pytest.mark.parametrize("key", sorted(ERRORS))
def test_costs_and_their_errors(key: tuple[str, str]) -> None:
    assert cells()[key].relative_error == pytest.approx(ERRORS[key], abs=5e-4)


def test_every_cell_of_the_table_is_compared() -> None:
    assert len(cells()) == 5 * len(published_table().rows) == 25
    # The printed total and the printed cost of an endpoint agree to the digits they have.
    for row in published_table().rows:
        per_endpoint = 1e3 * row.cost_musd / row.endpoints
        assert per_endpoint == pytest.approx(row.cost_kusd_per_endpoint, rel=0.015)


def test_slim_fly_formula() -> None:
    assert slim_fly_counts(5) == (200, 50, 175)  # the Hoffman-Singleton graph, degree 7
    with pytest.raises(InputError, match="q=6"):
        slim_fly_counts(6)


# -- sizes and kinds ---------------------------------------------------------------------------------


def test_the_size_is_what_is_wired() -> None:
    shipped = [build_topology(node(), 200, load_network(name)) for name in SHIPPED]
    for topology in [*cases().values(), *shipped]:
        wiring = topology.wiring
        assert topology.size() == (wiring.n_vertices - topology.n_gpus, wiring.n_cables)


def test_too_many_parts_are_refused_with_the_number_that_fits() -> None:
    huge = build_topology(node(), 2_000_000, network("fat-tree", switch_ports="1024", layers="3"))
    with pytest.raises(
        InputError, match=r"cluster.nodes=2,000,000: 16,000,000 GPUs, .* more than the 20,000,000"
    ):
        _ = huge.wiring


SPECS: list[TopologySpec] = [*SCALE_UP.values(), *SCALE_OUT.values()]


def test_every_shipped_file_is_of_a_registered_kind_and_every_example_of_its_own() -> None:
    assert {load_network(name).kind for name in list_networks()} <= set(SCALE_OUT)
    assert {load_scale_up(name).kind for name in list_scale_ups()} <= set(SCALE_UP)
    assert all(load_scale_up(spec.example).kind == spec.kind for spec in SCALE_UP.values())
    assert all(load_network(spec.example).kind == spec.kind for spec in SCALE_OUT.values() if spec.example)


def test_the_property_tests_run_on_every_kind() -> None:
    inside = {topo.node.scale_up.kind for topo in cases().values() if topo.node.scale_up is not None}
    assert inside | {NVSWITCH.kind} >= set(SCALE_UP)
    assert {topo.kind for topo in cases().values()} >= set(SCALE_OUT)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.kind)
def test_a_kind_says_what_it_is(spec: TopologySpec) -> None:
    assert spec.what.endswith(".") and "kind" not in spec.keys
    assert bool(spec.keys) == (spec.fabric is not None)


@pytest.mark.parametrize(("model", "specs"), [(Network, SCALE_OUT), (ScaleUp, SCALE_UP)])
def test_the_schema_of_a_file_holds_the_keys_of_every_kind(
    model: type[Network] | type[ScaleUp], specs: dict[str, TopologySpec]
) -> None:
    described = model.model_json_schema()["$defs"]
    for spec in specs.values():
        if spec.fabric is not None:
            assert set(spec.keys) <= set(described[spec.fabric.__name__]["properties"])


def test_a_fabric_of_another_kind_and_a_second_spec_of_a_kind_are_refused() -> None:
    class Other(ScaleUpFabric):
        kind: Literal["star"]

    with pytest.raises(ValueError, match=r"'nvswitch' has a fabric whose kind is \('star',\)"):
        ScaleUpSpec("nvswitch", Other, NvswitchNode, "")
    with pytest.raises(ValueError, match="'nvswitch' is registered twice"):
        registry(NVSWITCH, NVSWITCH, key="kind")


def test_a_union_of_one_kind_is_that_kind_and_rows_are_for_people() -> None:
    assert kind_rows({"nvswitch": NVSWITCH}) == [
        {
            "kind": "nvswitch",
            "keys": "switches, links_per_gpu",
            "example": "hgx-hopper",
            "what": "One server (HGX).",
        }
    ]
    assert any_fabric({"nvswitch": NVSWITCH}).__origin__ is NvswitchFabric


# -- pictures ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["h200-8", "gb200-nvl72-2048", "mi300x-2048", "cloudmatrix384-3072", "tpu-v4-2048-slice"]
)
def test_a_picture_shows_some_true_cables_and_says_how_much_there_is(name: str) -> None:
    topology = load_cluster(name).topology()
    found, names = picture(topology), topology.wiring.names
    ends = zip(topology.wiring.tails.tolist(), topology.wiring.heads.tolist(), strict=True)
    real = {(names[tail], names[head]) for tail, head in ends}
    assert found.cables
    for cable in found.cables:
        assert (cable.tail, cable.head) in real and {cable.tail, cable.head} <= set(found.places)
    assert sum(layer.count for layer in found.layers if layer.kind == "gpu") == topology.n_gpus
    for layer in found.layers:
        assert 0 < len(layer.shown) <= MOST_PER_LAYER
        assert layer.left_out == layer.count - len(layer.shown) >= 0


def test_switches_between_nodes_stand_above_the_gpus_and_those_inside_below() -> None:
    found = picture(load_cluster("deepseek-h800-2048").topology())
    assert [layer.kind for layer in found.layers] == ["spine", "leaf", "gpu", "nvswitch"]
    heights = [found.places[layer.shown[0]][1] for layer in found.layers]
    assert heights == sorted(heights, reverse=True)
    rates = {cable.kind: cable.rate for cable in found.cables}
    assert rates == {"nvlink": "200 GB/s", "nic": "50 GB/s", "leaf-spine": "50 GB/s"}


def test_a_number_of_another_unit() -> None:
    assert in_unit(80 * 2**30, "GiB", "bytes") == 80.0
    with pytest.raises(InputError):
        in_unit(1.0, "GiB", "s")
