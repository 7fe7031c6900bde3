"""The scale-out network between nodes: which switches, which links, which latencies."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from moesim.hwmodels import ranges
from moesim.hwmodels.fabric_kinds import with_kind
from moesim.hwmodels.files import is_there
from moesim.hwmodels.frozen import Frozen
from moesim.hwmodels.library import by_name, load_described, shipped_names
from moesim.hwmodels.provenance import (
    SourcedBytesPerSecond,
    SourcedCount,
    SourcedFraction,
    SourcedSeconds,
    SourcedUsd,
)

FOLDER = "networks"
PRICES_FOLDER = "fabric_prices"

SINGLE_NODE = "single-node"


class BaseFabric(Frozen):
    """What every scale-out network states, whatever its shape.

    The latencies are end to end for a small message: two links within a leaf, four links across leaves
    of a two-layer tree; every further link between switches adds half their difference.
    """

    link_bandwidth: SourcedBytesPerSecond
    """One port, per direction."""
    latency_same_leaf: Annotated[SourcedSeconds, ranges.LATENCY]
    latency_cross_leaf: Annotated[SourcedSeconds, ranges.LATENCY]

    @model_validator(mode="after")
    def _latencies_in_order(self) -> Self:
        if self.latency_cross_leaf.value < self.latency_same_leaf.value:
            raise ValueError("latency_cross_leaf must not be below latency_same_leaf")
        return self

    @property
    def hop_latency_s(self) -> float:
        """What one link between switches adds."""
        return (self.latency_cross_leaf.value - self.latency_same_leaf.value) / 2


class _SwitchedFabric(BaseFabric):
    """Equal switches; half of a leaf's ports face the nodes and half the spines, or as stated."""

    switch_ports: SourcedCount
    oversubscription: Annotated[SourcedFraction, ranges.OVERSUBSCRIPTION] | None = None
    """Ports of a leaf that face the nodes, for one that faces the spines; 1 where it is not given."""

    @model_validator(mode="after")
    def _ports_divide(self) -> Self:
        if self.switch_ports.n < 2 or self.switch_ports.n % 2:
            raise ValueError(f"switch_ports={self.switch_ports.n} must be even: half face up, half down")
        self.leaf_ports()
        return self

    def leaf_ports(self) -> tuple[int, int]:
        """Ports of a leaf that face down and up; raises ValueError where the ratio does not divide them."""
        ratio = 1.0 if self.oversubscription is None else self.oversubscription.value
        ports = self.switch_ports.n
        up = round(ports / (1 + ratio)) if ratio > 0 else 0
        if ratio < 1 or up < 1 or abs((ports - up) - ratio * up) > 1e-9 * ports:
            legal = [f"{(ports - u) // u}" for u in range(1, ports // 2 + 1) if (ports - u) % u == 0]
            raise ValueError(
                f"oversubscription={ratio:g} does not divide the {ports} ports of a switch; whole ratios "
                f"that do: {', '.join(reversed(legal))}"
            )
        return ports - up, up


class FatTreeFabric(_SwitchedFabric):
    """A fat-tree of two or three layers for all rails (single plane)."""

    kind: Literal["fat-tree"]
    planes: SourcedCount | None = None
    layers: SourcedCount | None = None
    """2 or 3; 2 where it is not given."""

    @model_validator(mode="after")
    def _one_plane(self) -> Self:
        if self.planes is not None and self.planes.n != 1:
            raise ValueError(
                f"planes={self.planes.n}: a network of kind 'fat-tree' has 1 plane; "
                f"for more use kind 'multi-plane-fat-tree'"
            )
        if self.n_layers not in (2, 3):
            raise ValueError(f"layers={self.n_layers}: a fat-tree here has 2 or 3 layers")
        return self

    @property
    def n_layers(self) -> int:
        """Layers of switches."""
        return 2 if self.layers is None else self.layers.n


class MultiPlaneFabric(_SwitchedFabric):
    """Several identical two-layer fat-trees side by side that no switch joins."""

    kind: Literal["multi-plane-fat-tree"]
    planes: SourcedCount


class RailFabric(_SwitchedFabric):
    """Leaves of one rail each, in units of as many nodes as a leaf has ports down, under shared spines.

    `cross_rail` says how traffic to another rail goes: `forward` over NVLink to the GPU of its own node
    on that rail, then inside the rail; `spine` straight through the spines.
    """

    kind: Literal["rail-optimised"]
    cross_rail: Literal["forward", "spine"] = "forward"


class DragonflyFabric(BaseFabric):
    """Groups of fully joined switches; every pair of groups has at least one global link."""

    kind: Literal["dragonfly"]
    switch_ports: SourcedCount
    endpoints_per_switch: SourcedCount
    switches_per_group: SourcedCount
    global_links_per_switch: SourcedCount

    @model_validator(mode="after")
    def _ports_suffice(self) -> Self:
        p, a, h = (
            x.n for x in (self.endpoints_per_switch, self.switches_per_group, self.global_links_per_switch)
        )
        if min(p, a, h) < 1:
            raise ValueError("endpoints_per_switch, switches_per_group, global_links_per_switch: at least 1")
        if p + a - 1 + h > self.switch_ports.n:
            raise ValueError(
                f"{p} endpoints, {a - 1} local and {h} global links need {p + a - 1 + h} ports a switch, "
                f"but switch_ports={self.switch_ports.n}"
            )
        return self


class EdgeListFabric(BaseFabric):
    """Any graph, inside of the nodes included: `edges` of the form "a b 50GB/s [1us]".

    GPUs are called gpu:0, gpu:1, ...; every other name is a switch. A latency that is not given is half
    of `latency_same_leaf`.
    """

    kind: Literal["edge-list"]
    edges: tuple[str, ...]


Fabric = FatTreeFabric | MultiPlaneFabric | RailFabric | DragonflyFabric | EdgeListFabric

FABRIC_KINDS = ("fat-tree", "multi-plane-fat-tree", "rail-optimised", "dragonfly", "edge-list")


class FabricPrices(Frozen):
    """What the parts of a scale-out network cost (`data/fabric_prices/*.yaml`)."""

    name: str = "custom"
    title: str = "custom prices"
    switch: SourcedUsd
    link: SourcedUsd
    """One cable with what it needs at both ends."""
    note: str | None = None


def load_fabric_prices(name: str, base: Path | None = None) -> FabricPrices:
    """The price list of a shipped name or a file path; raises InputError for an unknown or malformed one."""
    return load_described(FabricPrices, PRICES_FOLDER, name, "price list of a network", base)


class Network(Frozen):
    """Data of one network (`data/networks/*.yaml`); `kind` names one of `moesim.hwmodels.topologies`."""

    name: str
    title: str
    kind: str
    fabric: Annotated[Fabric, Field(discriminator="kind")] | None = None
    prices: str | None = None
    """Name or path of a price list. Only a name: a predicted step does not stand on what switches cost."""
    note: str | None = None

    @field_validator("prices")
    @classmethod
    def _prices_exist(cls, value: str | None, info: ValidationInfo) -> str | None:
        place = (info.context or {}).get("place")
        base = Path(place) if place else None
        if value is None or base is None:
            return value
        beside = base.parent / value
        found = str(beside) if is_there(beside) else value
        load_fabric_prices(found)
        return found

    @model_validator(mode="before")
    @classmethod
    def _fabric_of_the_kind(cls, data: Any) -> Any:
        return with_kind(data, FABRIC_KINDS, bare=(SINGLE_NODE,)) if isinstance(data, Mapping) else data


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
