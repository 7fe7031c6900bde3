"""Overrides of a scenario that make the links of its cluster faster or slower."""

from __future__ import annotations

from moesim.hwmodels.provenance import Sourced
from moesim.hwmodels.units import quantity_text
from moesim.simulator.scenario import Scenario


def faster_links(scenario: Scenario, nic: float = 1.0, scale_up: float = 1.0) -> tuple[str, ...]:
    """Overrides that multiply the bandwidths of NICs and of links inside a node.

    `nic` also scales the switch ports of the NICs. Latencies, the kernels' shares of a bandwidth and figures
    of achievable bandwidth, which no price reads, stay as they are. The new figures count as assumed; figures
    that the hardware does not have are left out.
    """
    node, fabric = scenario.machine.node, scenario.machine.network.fabric
    accelerator = node.accelerator
    section = node.scale_up.fabric if node.scale_up is not None else None
    figures: list[tuple[str, Sourced | None, float]] = [
        ("cluster.node.nic_bandwidth", node.nic_bandwidth, nic),
        ("cluster.network.fabric.link_bandwidth", getattr(fabric, "link_bandwidth", None), nic),
        ("cluster.node.accelerator.scale_up_bandwidth", accelerator.scale_up_bandwidth, scale_up),
        ("cluster.node.scale_up.fabric.link_bandwidth", getattr(section, "link_bandwidth", None), scale_up),
    ]
    return tuple(
        f"{key}={quantity_text(figure.value * factor, 'bytes_per_s')}"
        for key, figure, factor in figures
        if figure is not None and factor != 1.0
    )
