"""Counts the switches, ports, cables and transceivers of a network, and their cost."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from moesim.hwmodels.fabric_prices import FabricPrices
from moesim.hwmodels.topologies.wiring import Wiring

NIC_KIND = "nic"


@dataclass(frozen=True, slots=True)
class Inventory:
    """Counts of a topology, and the cost of its scale-out network.

    `endpoints` are NIC ports. `switches` and `cables` count physical ones by kind; `scale_out_switches` are
    those of the scale-out network. `switch_ports` are those in use. `inter_switch_links` are scale-out cables
    between switches ("links" of arXiv 2505.09343, Table 3). Each optical cable has two `transceivers`.
    `cost_usd` is by part, and empty where no prices are known.
    """

    endpoints: int
    switches: dict[str, int]
    scale_out_switches: int
    switch_ports: int
    cables: dict[str, int]
    inter_switch_links: int
    transceivers: int
    cost_usd: dict[str, float] = field(default_factory=dict)

    @property
    def total_usd(self) -> float | None:
        """Cost of the scale-out network; None where no prices are known."""
        return sum(self.cost_usd.values()) if self.cost_usd else None

    @property
    def usd_per_endpoint(self) -> float | None:
        """Cost per NIC port; None without prices or endpoints."""
        total = self.total_usd
        return None if total is None or not self.endpoints else total / self.endpoints


def count_inventory(wiring: Wiring, prices: FabricPrices | None) -> Inventory:
    """Count a wiring; every chip of a striped switch and every strand of a cable counts.

    Cost: docs/model.md, eq. N1.
    """
    switches: dict[str, int] = {}
    outer = 0
    for block in wiring.vertices:
        if block.kind != "gpu" and block.count:
            switches[block.kind] = switches.get(block.kind, 0) + block.count * block.chips
            outer += 0 if block.scale_up else block.count * block.chips
    cables: dict[str, int] = {}
    endpoints = inter_switch = transceivers = ports = 0
    for run in wiring.cables:
        n = len(run.tails) * run.strands
        if not n:
            continue
        cables[run.kind] = cables.get(run.kind, 0) + n
        transceivers += 2 * n if run.optical else 0
        at_switch = int(np.sum(run.tails >= wiring.n_gpus) + np.sum(run.heads >= wiring.n_gpus))
        if run.scale_up:
            continue
        ports += at_switch * run.strands
        if run.kind == NIC_KIND:
            endpoints += n
        else:
            inter_switch += (
                int(np.sum((run.tails >= wiring.n_gpus) & (run.heads >= wiring.n_gpus))) * run.strands
            )
    cost: dict[str, float] = {}
    if prices is not None:
        cost = {
            "switches": outer * prices.switch.value,
            "inter-switch links": inter_switch * prices.link.value,
            "endpoint links": endpoints * prices.link.value,
        }
    return Inventory(endpoints, switches, outer, ports, cables, inter_switch, transceivers, cost)
