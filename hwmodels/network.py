"""The scale-out network between nodes: which switches, which links, which latencies."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, model_validator

from moesim.hwmodels.library import by_name, load_described, shipped_names
from moesim.hwmodels.provenance import SourcedBytesPerSecond, SourcedCount, SourcedSeconds

FOLDER = "networks"

SINGLE_NODE = "single-node"


class Fabric(BaseModel):
    """A two-layer fat-tree of equal switches, or several identical ones side by side (planes).

    Half of a leaf's ports face the nodes and half the spines (no oversubscription). The latencies are
    end to end for a small message: two links within a leaf, four links across leaves.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    planes: SourcedCount
    switch_ports: SourcedCount
    link_bandwidth: SourcedBytesPerSecond
    """One port, per direction."""
    latency_same_leaf: SourcedSeconds
    latency_cross_leaf: SourcedSeconds

    @model_validator(mode="after")
    def _plausible(self) -> Self:
        if self.planes.n < 1:
            raise ValueError("planes must be at least 1")
        if self.switch_ports.n < 2 or self.switch_ports.n % 2:
            raise ValueError(f"switch_ports={self.switch_ports.n} must be even: half face up, half down")
        if self.latency_cross_leaf.value < self.latency_same_leaf.value:
            raise ValueError("latency_cross_leaf must not be below latency_same_leaf")
        return self


class Network(BaseModel):
    """Data of one network (`data/networks/*.yaml`); `kind` names one of `moesim.hwmodels.topologies`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    title: str
    kind: str
    fabric: Fabric | None = None
    note: str | None = None

    @model_validator(mode="after")
    def _fabric_where_needed(self) -> Self:
        if self.kind == SINGLE_NODE and self.fabric is not None:
            raise ValueError(f"a network of kind {SINGLE_NODE!r} has no fabric: leave the key out")
        if self.kind != SINGLE_NODE and self.fabric is None:
            raise ValueError(f"a network of kind {self.kind!r} needs the key fabric")
        return self


def list_networks() -> tuple[str, ...]:
    """Names of the shipped networks."""
    return shipped_names(FOLDER)


def load_network(name: str, base: Path | None = None) -> Network:
    """The network of a shipped name or a file path (relative to the file `base`, if given).

    Raises InputError for an unknown name or a malformed file.
    """
    return load_described(Network, FOLDER, name, "network", base)


NetworkRef = Annotated[Network, by_name(Network, load_network)]
"""A field that takes a network's name, path or full description."""
