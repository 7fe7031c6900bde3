"""A scale-up domain over several servers (NVL72), whose GPUs share switch chips in separate trays."""

from __future__ import annotations

from typing import Literal

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.provenance import SourcedCount
from moesim.hwmodels.topologies.description import NodeFigures
from moesim.hwmodels.topologies.nvswitch_node import HubFabric, NvswitchNode
from moesim.hwmodels.topologies.spec import ScaleUpSpec


class DomainFabric(HubFabric):
    """Several servers of `gpus_per_host` GPUs that share the switch chips (NVL72)."""

    kind: Literal["scale-up-domain"]
    gpus_per_host: SourcedCount


class ScaleUpDomain(NvswitchNode):
    """An NVSwitch node whose `gpus` are those of all hosts in the domain.

    Ranks and placement treat the domain as one node, with its GPUs numbered host by host.
    """

    def __init__(self, node: NodeFigures, nodes: int, fabric: DomainFabric) -> None:
        """Raises InputError where the GPUs do not divide into hosts or a GPU's links over the chips."""
        super().__init__(node, nodes, fabric)
        per_host = fabric.gpus_per_host.n
        if per_host < 1 or self.per_node % per_host:
            raise InputError(
                f"gpus_per_host={per_host} does not divide the {self.per_node} GPUs of node {node.name!r}"
            )
        if self.strands % self.chips:
            raise InputError(
                f"links_per_gpu={self.strands} is no multiple of switches={self.chips}: "
                f"chips of a domain carry equal parts"
            )
        self.hosts = self.per_node // per_host


SCALE_UP_DOMAIN = ScaleUpSpec("scale-up-domain", DomainFabric, ScaleUpDomain, "nvl72")
