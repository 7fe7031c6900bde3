"""Servers whose GPUs share one non-blocking switch."""

from __future__ import annotations

from typing import Literal

import numpy as np

from moesim.hwmodels.arrays import IntArray
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.provenance import SourcedCount
from moesim.hwmodels.topologies.description import NodeFigures, ScaleUpFabric
from moesim.hwmodels.topologies.part import ScaleUpPart, absent_where, columns, link
from moesim.hwmodels.topologies.spec import ScaleUpSpec
from moesim.hwmodels.topologies.wiring import Wiring


class HubFabric(ScaleUpFabric):
    """Every GPU has `links_per_gpu` links, spread over `switches` chips."""

    switches: SourcedCount
    links_per_gpu: SourcedCount


class NvswitchFabric(HubFabric):
    """One server (HGX)."""

    kind: Literal["nvswitch"]


class NvswitchNode(ScaleUpPart):
    """GPUs behind one non-blocking switch; a port is one link out of the GPU and one into it.

    The switch chips count as one switch, since every GPU stripes its traffic over all of them. A chip that
    fails takes its part of every port.
    """

    def __init__(self, node: NodeFigures, nodes: int, fabric: HubFabric | None = None) -> None:
        """Raises InputError where a GPU has fewer links than there are chips."""
        super().__init__(node, nodes)
        self.chips = 1 if fabric is None else fabric.switches.n
        self.strands = 1 if fabric is None else fabric.links_per_gpu.n
        if self.strands < self.chips:
            raise InputError(
                f"links_per_gpu={self.strands} is fewer than switches={self.chips}: "
                f"every GPU needs a link to every chip"
            )

    def wire(self, wiring: Wiring) -> None:
        """Add one switch per node and one cable per GPU."""
        hub = wiring.add_vertices("nvswitch", self.nodes, lambda i: f"nvswitch:{i}", chips=self.chips)
        gpus = np.arange(self.n_gpus)
        self.first = wiring.add_cables(
            "nvlink",
            gpus,
            hub + gpus // self.per_node,
            (self.node.scale_up_achievable_bytes_per_s, self.node.scale_up_bytes_per_s),
            self.node.scale_up_latency_s / 2,
            strands=self.strands,
        )

    def size(self) -> tuple[int, int]:
        """(switches, cables): one switch per node and one cable per GPU."""
        return self.nodes, self.n_gpus

    def paths(self, src: IntArray, dst: IntArray, choice: IntArray) -> IntArray:
        """[n, 2] the link out of the sender's port and the one into the receiver's."""
        itself = src == dst
        return columns(
            absent_where(itself, link(self.first + src)),
            absent_where(itself, link(self.first + dst, back=True)),
        )


NVSWITCH = ScaleUpSpec("nvswitch", NvswitchFabric, NvswitchNode, "hgx-hopper")
