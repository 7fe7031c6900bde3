"""The part of a topology that is drawn: true cables only, few enough to see, layers as people draw them."""

from __future__ import annotations

from functools import lru_cache

import pytest

from moesim.hwmodels import InputError, load_cluster
from moesim.hwmodels.topologies import Topology
from moesim.hwmodels.topologies.base import MOST_PER_LAYER, Picture, picture
from moesim.hwmodels.units import in_unit

CLUSTERS = (
    "deepseek-h800-2048",
    "h200-8",
    "gb200-nvl72-2048",
    "mi300x-2048",
    "cloudmatrix384-3072",
    "tpu-v4-2048-slice",
)


@lru_cache(maxsize=8)
def drawn(name: str) -> tuple[Topology, Picture]:
    topology = load_cluster(name).topology()
    return topology, picture(topology)


@pytest.mark.parametrize("name", CLUSTERS)
def test_every_drawn_cable_is_one_of_the_topology_between_drawn_vertices(name: str) -> None:
    topology, found = drawn(name)
    names = topology.wiring.names
    real = {
        (names[tail], names[head])
        for tail, head in zip(topology.wiring.tails.tolist(), topology.wiring.heads.tolist(), strict=True)
    }
    assert found.cables
    for cable in found.cables:
        assert (cable.tail, cable.head) in real
        assert {cable.tail, cable.head} <= set(found.places)


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_layer_is_small_and_says_how_much_there_is(name: str) -> None:
    topology, found = drawn(name)
    assert sum(layer.count for layer in found.layers if layer.kind == "gpu") == topology.n_gpus
    for layer in found.layers:
        assert 0 < len(layer.shown) <= MOST_PER_LAYER
        assert layer.left_out == layer.count - len(layer.shown) >= 0


def test_switches_between_nodes_stand_above_the_gpus_and_those_inside_below() -> None:
    _, found = drawn("deepseek-h800-2048")
    assert [layer.kind for layer in found.layers] == ["spine", "leaf", "gpu", "nvswitch"]
    heights = [found.places[layer.shown[0]][1] for layer in found.layers]
    assert heights == sorted(heights, reverse=True)
    rates = {cable.kind: cable.rate for cable in found.cables}
    assert rates == {"nvlink": "200 GB/s", "nic": "50 GB/s", "leaf-spine": "50 GB/s"}


def test_a_number_of_another_unit() -> None:
    assert in_unit(80 * 2**30, "GiB", "bytes") == 80.0
    with pytest.raises(InputError):
        in_unit(1.0, "GiB", "s")
