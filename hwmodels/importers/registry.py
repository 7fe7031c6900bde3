"""Every form of file that describes a server: a new one is its file and one line here."""

from __future__ import annotations

from collections.abc import Mapping

from moesim.hwmodels.importers.machine import MachineForm
from moesim.hwmodels.importers.nccl_xml import NCCL_XML
from moesim.hwmodels.importers.smi_topo import SMI_TOPO
from moesim.hwmodels.registry import registry

MACHINE_FORMS: Mapping[str, MachineForm] = registry(
    NCCL_XML,
    SMI_TOPO,
)
"""Forms by name; the first that recognises a text reads it. Text of no form is an edge list."""

EDGE_LIST_FORM = "edge list: lines such as gpu:0 switch:0 50GB/s 1us"
"""What describes a whole cluster; the forms above describe one server."""
