"""One node, with its accelerators, the links between them, its NICs and its power."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import Field, ValidationInfo, field_validator, model_validator

from moesim.hwmodels import ranges
from moesim.hwmodels.accelerator import AcceleratorRef
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.frozen import Frozen
from moesim.hwmodels.host import list_hosts
from moesim.hwmodels.network import ScaleUpRef
from moesim.hwmodels.provenance import (
    Kind,
    Source,
    Sourced,
    SourcedBytesPerSecond,
    SourcedCount,
    SourcedSeconds,
    SourcedWatts,
)
from moesim.hwmodels.topologies.description import SWITCHED, ScaleUpShares
from moesim.hwmodels.yaml_io import by_name, load_described, shipped_names

FOLDER = "nodes"
MOST_GPUS = 65_536
"""Limit for a node; the largest scale-up domains of today have 9,216 chips."""
MOST_NICS = 64
"""Limit for a GPU."""

SourcedT = TypeVar("SourcedT", bound=Sourced)


class Node(Frozen):
    """Data of one node (`data/nodes/*.yaml`): a server, or a whole scale-up domain such as an NVL72.

    The scale-up bandwidths are the accelerator's own. Bandwidths are per GPU (or NIC) and direction.
    """

    name: str
    title: str
    accelerator: AcceleratorRef
    gpus: SourcedCount
    scale_up_switch: str
    """The network between the GPUs, in words."""
    scale_up: ScaleUpRef | None = None
    """The links between the GPUs; one non-blocking switch where not given."""
    scale_up_latency: Annotated[SourcedSeconds, ranges.LATENCY]
    """End-to-end latency of a small message from GPU to GPU inside the node."""
    nics_per_gpu: SourcedCount | None = None
    """NICs of one GPU; absent, like the two NIC bandwidths, where no scale-out network is known."""
    nic_bandwidth: SourcedBytesPerSecond | None = None
    """Nominal, per NIC and direction."""
    nic_bandwidth_effective: SourcedBytesPerSecond | None = None
    """Payload that a NIC sustains per direction, as published. It describes the network and its pictures;
    prices take `nic_bandwidth` times the share that the calibration profile states for each transfer."""
    adapter: str | None = None
    """Kind of the NICs where their software is not that of InfiniBand and RoCE, such as `efa-v4`; they join
    networks of the same adapter alone."""
    cores: SourcedCount | None = None
    """Physical cores of its CPUs, each with two hardware threads."""
    storage_nic_bandwidth: SourcedBytesPerSecond | None = None
    """All storage NICs of the node together, per direction; a description, which no prediction reads."""
    power: SourcedWatts | None = None
    """The whole node under load."""
    host: str | None = None
    """Shipped host (`data/hosts`) whose launch times are those of its CPU; absent: not known."""
    host_kind: Kind = Field("spec", exclude_if=lambda kind: kind == "spec")
    """`spec`: the host has the node's CPU; `assumed`: the nearest host that has launch times."""
    host_source: Source | None = None
    """Where the CPU is stated, or why another one stands for it."""
    note: str | None = None

    @field_validator("gpus", "nics_per_gpu")
    @classmethod
    def _possible(cls, count: SourcedCount | None, info: ValidationInfo) -> SourcedCount | None:
        most = MOST_GPUS if info.field_name == "gpus" else MOST_NICS
        if count is not None and count.n > most:
            raise ValueError(
                f"{info.field_name}={count.n:,} of a node is out of range: 1 to {most:,}; nearest: {most}"
            )
        return count

    @model_validator(mode="after")
    def _host_has_a_source(self) -> Node:
        if (self.host is None) != (self.host_source is None):
            raise ValueError("host and host_source belong together: give both, or neither")
        if self.host is not None and self.host not in list_hosts():
            known = ", ".join(list_hosts())
            raise ValueError(f"host={self.host[:60]!r} is no shipped host; shipped: {known}")
        return self

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
        """Scale-up payload bandwidth per GPU and direction; raises InputError where unknown."""
        return self.accelerator.scale_up_achievable_bytes_per_s

    @property
    def scale_up_latency_s(self) -> float:
        """Latency from GPU to GPU inside the node."""
        return self.scale_up_latency.value

    @property
    def scale_up_shares(self) -> ScaleUpShares:
        """Shares of the scale-up rate that groups inside the node can use, as the wiring allows."""
        return SWITCHED if self.scale_up is None else self.scale_up.fabric.shares(self)

    @property
    def n_nics_per_gpu(self) -> int:
        """NICs of one GPU; raises InputError where unknown."""
        return self._required(self.nics_per_gpu, "nics_per_gpu").n

    @property
    def scale_out_bytes_per_s(self) -> float:
        """Nominal bandwidth of all NICs of a GPU, per direction; raises InputError where unknown."""
        return self._required(self.nic_bandwidth, "nic_bandwidth").value * self.n_nics_per_gpu

    @property
    def scale_out_effective_bytes_per_s(self) -> float:
        """Payload bandwidth of all NICs of a GPU, per direction; raises InputError where unknown."""
        effective = self._required(self.nic_bandwidth_effective, "nic_bandwidth_effective")
        return effective.value * self.n_nics_per_gpu

    @property
    def power_w_per_gpu(self) -> float:
        """The node's power divided by its GPUs; raises InputError where unknown."""
        return self._required(self.power, "power").value / self.n_gpus

    def _required(self, figure: SourcedT | None, key: str) -> SourcedT:
        if figure is None:
            raise InputError(f"node {self.name!r} has no figure {key}; add it, with its source, to its file")
        return figure


def part_of_node(node: Node, gpus: int) -> Node:
    """`gpus` of a node's GPUs with their links and NICs, and their share of its power and storage NICs.

    Raises InputError for a node whose links are a grid of fixed dimensions.
    """
    share, source = gpus / node.n_gpus, f"{gpus} of the {node.n_gpus} GPUs of {node.name}"
    if hasattr(node.scale_up and node.scale_up.fabric, "dimensions"):
        raise InputError(
            f"{source}: its links are a grid, and a part of it is a slice with dimensions of its own; give "
            "cluster.node as data, with gpus and scale_up.fabric.dimensions of the slice",
            key="cluster.gpus",
        )
    parts: dict[str, Sourced] = {"gpus": node.gpus.model_copy(update={"value": float(gpus)})}
    for key in ("power", "storage_nic_bandwidth"):
        figure = getattr(node, key)
        if figure is not None:
            text = f"{source}; {figure.source}"
            parts[key] = figure.model_copy(
                update={"value": figure.value * share, "kind": "derived", "source": text}
            )
    return node.model_copy(update={**parts, "title": f"{source} ({node.title})"})


def list_nodes() -> tuple[str, ...]:
    """Names of the shipped nodes."""
    return shipped_names(FOLDER)


def load_node(name: str, base: Path | None = None) -> Node:
    """The node of a shipped name or a file path; raises InputError for an unknown or malformed one."""
    return load_described(Node, FOLDER, name, "node", base)


NodeRef = Annotated[Node, by_name(Node, load_node)]
"""A field that takes a node's name, path or full description."""
