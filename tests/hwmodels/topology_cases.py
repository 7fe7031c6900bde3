"""Small topologies of every kind, shared by the tests."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from moesim.hwmodels import Node, load_network, load_node, validate_model
from moesim.hwmodels.network import Network, ScaleUp, load_scale_up
from moesim.hwmodels.topologies import RouteSet, Topology, build_topology

RATE = {"link_bandwidth": "50 GB/s", "latency_same_leaf": "2 us", "latency_cross_leaf": "3 us"}


def network(kind: str, buildings: dict[str, str] | None = None, /, **fabric: Any) -> Network:
    """A network of a kind with the rates above, in one building or several."""
    data = {"name": "n", "title": "t", "kind": kind} | ({"buildings": buildings} if buildings else {})
    return validate_model(Network, data | ({"fabric": {**RATE, **fabric}} if fabric else {}), "n.yaml")


def node(gpus: int = 8, scale_up: ScaleUp | None = None, nics: int = 1) -> Node:
    """An H800 node with another number of GPUs and another inside."""
    base = load_node("hgx-h800")
    assert base.nics_per_gpu is not None
    changes: dict[str, Any] = {
        "gpus": base.gpus.model_copy(update={"value": float(gpus)}),
        "nics_per_gpu": base.nics_per_gpu.model_copy(update={"value": float(nics)}),
        "scale_up": scale_up,
    }
    return base.model_copy(update=changes)


def torus(*dimensions: int) -> ScaleUp:
    """A torus of these sizes."""
    figures = {"link_bandwidth": "100 GB/s", "link_bandwidth_effective": "90 GB/s", "latency_per_hop": "1 us"}
    fabric = {"dimensions": [str(size) for size in dimensions], **figures}
    return validate_model(ScaleUp, {"kind": "torus", "fabric": fabric}, "t.yaml")


def supernode(hosts: int, spines: int) -> ScaleUp:
    """A two-level supernode of hosts of 4 in 3 planes."""
    del hosts  # follows from the node's GPUs
    fabric = {
        "gpus_per_host": "4",
        "planes": "3",
        "second_level_switches": str(spines),
        "latency_across_hosts": "1 us",
    }
    return validate_model(ScaleUp, {"kind": "supernode", "fabric": fabric}, "s.yaml")


SHIPPED = ("mpft-ib-400g", "mrft-ib-400g", "ft3-ib-400g", "rail-roce-400g", "dragonfly-ib-400g")


SITES = {"count": "3", "bandwidth": "30 GB/s", "distance": "40 km"}


@functools.cache
def cases() -> dict[str, Topology]:
    """Every kind, most of them small enough to look at all pairs."""
    tree, multi = {"switch_ports": "8"}, {"planes": "4", "switch_ports": "8"}
    fly = {"endpoints_per_switch": "2", "switches_per_group": "4", "global_links_per_switch": "2"}
    mesh, pod = load_scale_up("mi300x-mesh"), load_network("single-node")
    small = node(4)
    return {
        "nvswitch": build_topology(node(), 1, pod),
        "nvl72": build_topology(node(72, load_scale_up("nvl72")), 2, network("fat-tree", switch_ports="144")),
        "mesh": build_topology(node(8, mesh), 1, pod),
        "mesh-rails": build_topology(node(8, mesh), 6, network("rail-optimised", switch_ports="64")),
        "torus-4x3x2": build_topology(node(24, torus(4, 3, 2)), 1, pod),
        "torus-5x4": build_topology(node(20, torus(5, 4)), 1, pod),
        "torus-2x1x6": build_topology(node(12, torus(2, 1, 6)), 1, pod),
        "supernode": build_topology(node(12, supernode(3, 4)), 2, network("fat-tree", switch_ports="64")),
        "fat-tree-2": build_topology(small, 8, network("fat-tree", **tree)),
        "fat-tree-2-over": build_topology(small, 12, network("fat-tree", **tree, oversubscription="3")),
        "fat-tree-3": build_topology(small, 30, network("fat-tree", **tree, layers="3")),
        "fat-tree-3-over": build_topology(
            small, 18, network("fat-tree", **tree, layers="3", oversubscription="3")
        ),
        "multi-plane": build_topology(small, 20, network("multi-plane-fat-tree", **multi)),
        "two-planes": build_topology(
            small, 10, network("multi-plane-fat-tree", planes="2", switch_ports="8")
        ),
        "rails": build_topology(small, 8, network("rail-optimised", **tree)),
        "rails-spine": build_topology(
            small, 12, network("rail-optimised", **tree, oversubscription="3", cross_rail="spine")
        ),
        "dragonfly-1": build_topology(small, 2, network("dragonfly", switch_ports="8", **fly)),
        "dragonfly-4": build_topology(small, 8, network("dragonfly", switch_ports="8", **fly)),
        "dragonfly-7": build_topology(small, 14, network("dragonfly", switch_ports="8", **fly)),
        "dragonfly-9": build_topology(small, 18, network("dragonfly", switch_ports="8", **fly)),
        "two-nics": build_topology(node(4, nics=2), 4, network("fat-tree", **tree)),
        "rails-3": build_topology(
            node(2), 24, network("rail-optimised", **tree, layers="3", core_oversubscription="3")
        ),
        "buildings": build_topology(small, 12, network("fat-tree", SITES, **tree)),
        "buildings-3": build_topology(small, 18, network("fat-tree", SITES, **tree, layers="3")),
        "buildings-planes": build_topology(small, 12, network("multi-plane-fat-tree", SITES, **multi)),
        "buildings-fly": build_topology(small, 24, network("dragonfly", SITES, switch_ports="8", **fly)),
        "edge-list": build_topology(node(4), 2, network("edge-list", edges=EDGES)),
    }


EDGES = [
    *(f"gpu:{g} inside:{g // 4} 200GB/s 2us" for g in range(8)),
    *(f"inside:{n} spine:{s} 50GB/s" for n in range(2) for s in range(2)),
    "inside:0 spine:0 50GB/s",
    "# a comment",
]

SPREADINGS = ("modulo", "ecmp", "ideal")


def pairs(topo: Topology, most: int = 48) -> tuple[np.ndarray, np.ndarray]:
    """All pairs of `most` evenly chosen GPUs."""
    picked = np.unique(np.linspace(0, topo.n_gpus - 1, min(topo.n_gpus, most)).astype(np.int64))
    src, dst = (x.ravel() for x in np.meshgrid(picked, picked))
    return src, dst


def check_flow(topo: Topology, src: np.ndarray, dst: np.ndarray, routes: RouteSet) -> None:
    """What leaves every vertex entered it: 1 more leaves the source, 1 more enters the destination."""
    wiring, each = topo.wiring, np.arange(len(src))
    tails = np.stack([wiring.tails, wiring.heads], axis=1).ravel()
    heads = np.stack([wiring.heads, wiring.tails], axis=1).ravel()
    pair = np.repeat(each, np.diff(routes.indptr))
    net = np.zeros((len(src), wiring.n_vertices))
    np.add.at(net, (pair, tails[routes.links]), routes.share)
    np.add.at(net, (pair, heads[routes.links]), -routes.share)
    np.add.at(net, (each, src), -1.0)
    np.add.at(net, (each, dst), 1.0)
    assert np.abs(net).max() < 1e-9
    assert (routes.share > 0).all() and (routes.share <= 1 + 1e-12).all()
