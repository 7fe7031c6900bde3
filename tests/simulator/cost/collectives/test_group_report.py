"""Link loads of one group: even where routing is even, and the same bytes drawn whole or in parts."""

from __future__ import annotations

import pytest

from moesim.hwmodels.network import load_network
from moesim.hwmodels.node import load_node
from moesim.hwmodels.topologies import build_topology
from moesim.simulator.cost.collectives.group_report import TOKENS_PER_DRAW, dispatch_loads
from moesim.simulator.layout.routing import Gate

PLACE = build_topology(load_node("hgx-h800"), 2, load_network("mpft-ib-400g"))
GATE = Gate(64, 4)


def test_even_routing_loads_links_evenly_and_a_sample_nearly() -> None:
    tokens = TOKENS_PER_DRAW + 100
    rows = {(r.routing, r.load.kind): r for r in dispatch_loads(GATE, tokens, 1000.0, range(16), PLACE)}
    for kind in ("nvlink", "nic"):
        assert rows["even", kind].largest_over_mean == pytest.approx(1.0, rel=1e-9)
        assert 1.0 < rows["sampled", kind].largest_over_mean < 1.15
        assert rows["sampled", kind].load.mean_bytes == pytest.approx(
            rows["even", kind].load.mean_bytes, rel=0.02
        )


def test_the_same_seed_draws_the_same_loads() -> None:
    first, again, other = (dispatch_loads(GATE, 300, 1.0, range(16), PLACE, seed) for seed in (1, 1, 2))
    assert first == again != other
