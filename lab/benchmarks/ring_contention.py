"""How much longer the busiest link behind the NICs takes than a NIC when all data-parallel rings run at once.

    python -m lab.benchmarks.ring_contention

Two-layer fat-trees of 64-port switches on nodes of eight GPUs; ranks in order, one ring a rail. Dense groups
are the GPUs of a pipeline rank, groups of experts the replicas of one GPU's experts.
"""

from __future__ import annotations

from moesim.hwmodels.network import Network, load_network
from moesim.hwmodels.node import load_node
from moesim.hwmodels.topologies import Topology, build_topology
from moesim.simulator.cost.collectives import ring
from moesim.simulator.cost.collectives.flows import link_loads
from moesim.simulator.cost.collectives.flows import group_by_node

RATIOS = (1.0, 3.0, 7.0)
PLANS = ((64, 4, 16), (256, 8, 64))
"""Nodes, pipeline ranks and expert-parallel degree."""
SIZE = 1e9


def oversubscribed(ratio: float) -> Network:
    """The shipped 400 Gb/s fat-tree with this many ports down for each port up."""
    network = load_network("mrft-ib-400g")
    assert network.fabric is not None
    stated = {"value": ratio, "kind": "assumed", "source": "what-if", "date": "2026-11"}
    fabric = {**network.fabric.model_dump(exclude_none=True), "oversubscription": stated}
    return network.model_copy(update={"fabric": type(network.fabric).model_validate(fabric)})


def groups(gpus: int, pp: int, ep: int) -> dict[str, list[list[int]]]:
    """GPUs of the rings of dense parameters and of experts."""
    per = gpus // pp
    dense = [list(range(r * per, (r + 1) * per)) for r in range(pp)]
    experts = [[r * per + i + k * ep for k in range(per // ep)] for r in range(pp) for i in range(ep)]
    return {"dense": dense, "experts": experts}


def factor(topology: Topology, rings: list[list[int]], spreading: str) -> float:
    """Seconds of the busiest link between switches over those of the busiest NIC."""
    seconds: dict[str, dict[str, float]] = {}
    for gpus in rings:
        flows = ring.plan("reduce_scatter", SIZE, group_by_node(gpus, 8)).phases[0].flows
        loads = link_loads(flows, topology, spreading)  # type: ignore[arg-type]
        rows = zip(
            loads.ids, loads.kinds, loads.bytes, loads.nominal_bytes_per_s, loads.scale_up, strict=True
        )
        for link, kind, size, rate, inside in rows:
            if not inside:
                links = seconds.setdefault(kind, {})
                links[link] = links.get(link, 0.0) + size / rate
    nic = max(seconds["nic"].values())
    return max((max(v.values()) for kind, v in seconds.items() if kind != "nic"), default=0.0) / nic


def main() -> None:
    """Print one line for each network, plan and kind of ring."""
    for ratio in RATIOS:
        network = oversubscribed(ratio)
        for nodes, pp, ep in PLANS:
            topology = build_topology(load_node("hgx-h100"), nodes, network)
            for name, rings in groups(8 * nodes, pp, ep).items():
                by = {way: factor(topology, rings, way) for way in ("modulo", "ecmp")}
                text = ", ".join(f"{way} {value:.1f}" for way, value in by.items())
                print(f"{ratio:g}:1, {8 * nodes:,} GPUs, pp {pp}, ep {ep}, {name}: {text}")


if __name__ == "__main__":
    main()
