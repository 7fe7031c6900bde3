"""The size of a topology is known before it is built, and what is too large is refused, not built."""

from __future__ import annotations

import pytest
from topology_cases import SHIPPED, cases, network, node

from moesim.hwmodels import load_network
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.topologies import build_topology


@pytest.mark.parametrize("name", sorted(cases()))
def test_the_size_is_what_is_wired(name: str) -> None:
    topology = cases()[name]
    wiring = topology.wiring
    assert topology.size() == (wiring.n_vertices - topology.n_gpus, wiring.n_cables)


@pytest.mark.parametrize("name", SHIPPED)
def test_the_size_of_shipped_networks(name: str) -> None:
    topology = build_topology(node(), 200, load_network(name))
    wiring = topology.wiring
    assert topology.size() == (wiring.n_vertices - topology.n_gpus, wiring.n_cables)


def test_too_many_parts_are_refused_with_the_number_that_fits() -> None:
    huge = build_topology(node(), 2_000_000, network("fat-tree", switch_ports="1024", layers="3"))
    with pytest.raises(
        InputError, match=r"cluster.nodes=2,000,000: 16,000,000 GPUs, .* more than the 20,000,000"
    ):
        _ = huge.wiring
