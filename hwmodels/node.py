"""One server: its accelerators, the switch between them, its NICs and its power."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict

from moesim.hwmodels.accelerator import AcceleratorRef
from moesim.hwmodels.library import by_name, load_described, shipped_names
from moesim.hwmodels.provenance import SourcedBytesPerSecond, SourcedCount, SourcedSeconds, SourcedWatts
from moesim.hwmodels.scale_up import ScaleUpRef

FOLDER = "nodes"


class Node(BaseModel):
    """Data of one node (`data/nodes/*.yaml`): a server, or a whole scale-up domain such as an NVL72.

    The scale-up bandwidths are the accelerator's own. Bandwidths are per GPU (or NIC) and direction.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    title: str
    accelerator: AcceleratorRef
    gpus: SourcedCount
    scale_up_switch: str
    """What joins the GPUs, in words."""
    scale_up: ScaleUpRef | None = None
    """What joins the GPUs, as links; without it one non-blocking switch."""
    scale_up_latency: SourcedSeconds
    """GPU to GPU inside the node, end to end, small message."""
    nics_per_gpu: SourcedCount
    nic_bandwidth: SourcedBytesPerSecond
    """Nominal, per NIC and direction."""
    nic_bandwidth_effective: SourcedBytesPerSecond
    """Payload that a NIC sustains per direction."""
    storage_nic_bandwidth: SourcedBytesPerSecond | None = None
    """All storage NICs of the node together, per direction."""
    power: SourcedWatts
    """The whole node under load."""
    note: str | None = None

    @property
    def n_gpus(self) -> int:
        """Accelerators in the node."""
        return self.gpus.n

    @property
    def scale_up_bytes_per_s(self) -> float:
        """Nominal scale-up bandwidth per GPU and direction."""
        return self.accelerator.scale_up_bytes_per_s

    @property
    def scale_up_achievable_bytes_per_s(self) -> float:
        """Scale-up payload bandwidth per GPU and direction; InputError where the accelerator has none."""
        return self.accelerator.scale_up_achievable_bytes_per_s

    @property
    def scale_up_latency_s(self) -> float:
        """GPU to GPU inside the node."""
        return self.scale_up_latency.value

    @property
    def scale_out_bytes_per_s(self) -> float:
        """Nominal NIC bandwidth per GPU and direction (all NICs of the GPU)."""
        return self.nic_bandwidth.value * self.nics_per_gpu.n

    @property
    def scale_out_effective_bytes_per_s(self) -> float:
        """NIC payload bandwidth per GPU and direction (all NICs of the GPU)."""
        return self.nic_bandwidth_effective.value * self.nics_per_gpu.n

    @property
    def power_w_per_gpu(self) -> float:
        """The node's power divided by its GPUs."""
        return self.power.value / self.n_gpus


def list_nodes() -> tuple[str, ...]:
    """Names of the shipped nodes."""
    return shipped_names(FOLDER)


def load_node(name: str, base: Path | None = None) -> Node:
    """The node of a shipped name or a file path (relative to the file `base`, if given).

    Raises InputError for an unknown name or a malformed file.
    """
    return load_described(Node, FOLDER, name, "node", base)


NodeRef = Annotated[Node, by_name(Node, load_node)]
"""A field that takes a node's name, path or full description."""
