"""Parts of a topology: what one is, and the spec by which it is chosen and described."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from typing import Annotated, Any, get_args

import numpy as np
from msgspec import Struct
from pydantic import Field

from moesim.hwmodels.arrays import BoolArray, IntArray
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.frozen import Frozen
from moesim.hwmodels.topologies.base import Paths, Topology
from moesim.hwmodels.topologies.description import NetworkTier, NodeFigures, ScaleOutFabric
from moesim.hwmodels.topologies.wiring import Wiring

# -- parts -----------------------------------------------------------------------------------------


class Part(Paths):
    """Paths between GPUs through one network, with detours beyond the equally good ones."""

    def detours(self) -> int:
        """Most detours of a pair, which are paths beyond the equally good ones."""
        return 0

    def detour_paths(self, src: IntArray, dst: IntArray, number: int) -> IntArray:
        """[n, hops] links of detour `number` of each pair, in the form of `paths`."""
        raise NotImplementedError


class ScaleUpPart(Part):
    """The network inside a node; src and dst of each pair are in the same node."""


class ScaleOutPart(Part):
    """The network between the nodes, which their NICs use.

    Where `forwards` is true, traffic to another plane or rail first moves inside the sender's node to the GPU
    that `sender` names. `joined` says whether two GPUs' NICs reach each other at all.
    """

    forwards = False

    def __init__(self, node: NodeFigures, nodes: int, fabric: ScaleOutFabric) -> None:
        """Takes the node, the number of nodes, and the figures of the network."""
        super().__init__(node, nodes)
        self.fabric = fabric
        self.nics = 0
        """Number of the cable of GPU 0's NIC, set by `wire`; those of the other GPUs follow."""

    def sender(self, src: IntArray, dst: IntArray) -> IntArray:
        """The GPU of src's node whose NIC sends to dst; dst's counterpart where the network forwards."""
        if not self.forwards:
            return src
        return src // self.per_node * self.per_node + dst % self.per_node

    def joined(self, src: IntArray, dst: IntArray) -> IntArray:
        """[n] 1 where the NICs of the two GPUs are on the same plane."""
        return np.ones(len(src), np.int64)

    def nic_rates(self) -> tuple[float, float]:
        """(payload, nominal) bandwidth of a GPU's NICs in this network, limited by NIC or switch port."""
        ports = self.fabric.link_bandwidth.value * self.node.n_nics_per_gpu
        return (
            min(self.node.scale_out_effective_bytes_per_s, ports),
            min(self.node.scale_out_bytes_per_s, ports),
        )

    def climbs(self) -> int:
        """Number of ways from a GPU up to the highest layer of switches."""
        raise NotImplementedError

    def climb(self, gpu: IntArray, choice: IntArray) -> tuple[IntArray, IntArray]:
        """Links [n, hops] from each GPU's NIC to a switch of the highest layer, and that vertex [n]."""
        raise NotImplementedError

    def top_switches(self) -> IntArray:
        """Vertices of the highest layer, at which links to other buildings end; known after `wire`."""
        raise NotImplementedError

    def n_top_switches(self) -> int:
        """Their number, from the figures of the description alone."""
        raise NotImplementedError

    def tiers(self) -> tuple[NetworkTier, ...]:
        """Levels at which links limit what NICs can send; none on a network without oversubscription."""
        return ()

    def nic_links(self, src: IntArray, dst: IntArray) -> IntArray:
        """[n, 2] the link out of src's NIC and the one into dst's."""
        return columns(link(self.nics + src), link(self.nics + dst, back=True))

    def between_nics(self, src: IntArray, dst: IntArray, *hops: IntArray) -> IntArray:
        """[n, hops] paths out of src's NIC, over `hops` between switches, and into dst's; -1 to itself."""
        first, last = absent_where((src == dst)[:, None], self.nic_links(src, dst)).T
        return columns(first, *hops, last)

    def wire_nics(self, wiring: Wiring, switch_of_gpu: IntArray) -> int:
        """Add one cable per GPU to its switch, with a strand per NIC; returns the number of the first."""
        return wiring.add_cables(
            "nic",
            np.arange(self.n_gpus),
            switch_of_gpu,
            self.nic_rates(),
            self.fabric.latency_same_leaf.value / 2,
            strands=self.node.n_nics_per_gpu,
            optical=True,
        )


def endpoints_of_leaf(down_ports: int, nics: int) -> int:
    """GPUs that fit on a leaf; raises InputError where one GPU's NICs need more ports than it has."""
    if nics > down_ports:
        raise InputError(f"nics_per_gpu={nics}: a leaf has only {down_ports} ports for the nodes")
    return down_ports // nics


def link(cable: IntArray, *, back: bool = False) -> IntArray:
    """Link numbers of cables, from tail to head or back."""
    return 2 * cable + int(back)


def absent_where(condition: IntArray | BoolArray, links: IntArray) -> IntArray:
    """The links, with -1 where the condition holds."""
    return np.where(condition, -1, links)


def columns(*links: IntArray) -> IntArray:
    """[n, hops] from one array [n] per hop."""
    return np.stack(links, axis=1)


# -- specs -----------------------------------------------------------------------------------------


class TopologySpec(Struct, frozen=True):
    """A kind of topology, with its name and keys in files and its builder.

    `fabric` is the model of the keys, which `build` takes, or None for a kind without keys; its field `kind`
    is a Literal of the same name. `example` is a shipped file of this kind ("" for none).
    """

    kind: str
    fabric: type[Frozen] | None
    build: Callable[[NodeFigures, int, Any], object]
    example: str

    def __post_init__(self) -> None:
        """Raises ValueError where the fabric's Literal differs from the kind."""
        stated = None if self.fabric is None else get_args(self.fabric.model_fields["kind"].annotation)
        if stated not in (None, (self.kind,)):
            raise ValueError(
                f"topology {self.kind!r} has a fabric whose kind is {stated}; write the same name"
            )

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of `fabric` in a file, without those that all scale-out networks share."""
        if self.fabric is None:
            return ()
        shared = ScaleOutFabric.model_fields if issubclass(self.fabric, ScaleOutFabric) else {}
        return tuple(key for key in self.fabric.model_fields if key not in ("kind", *shared))

    @property
    def what(self) -> str:
        """Description for people: the first paragraph of the docstring of `fabric` (or of `build`)."""
        return " ".join(((self.fabric or self.build).__doc__ or "").split("\n\n")[0].split())


class ScaleUpSpec(TopologySpec, frozen=True):
    """Spec of a scale-up network; `build` raises InputError where the keys do not fit the node."""

    build: Callable[[NodeFigures, int, Any], ScaleUpPart]


class ScaleOutSpec(TopologySpec, frozen=True):
    """Spec of a scale-out network; `build` raises InputError where the nodes do not fit.

    `build` returns the part between the nodes (None where there is none), or a whole topology that also wires
    the inside of the nodes.
    """

    build: Callable[[NodeFigures, int, Any], ScaleOutPart | Topology | None]


def any_fabric(specs: Mapping[str, TopologySpec]) -> Any:
    """The type of a field for the fabric of any of these kinds, which its key `kind` selects."""
    fabrics: Iterator[Any] = (spec.fabric for spec in specs.values() if spec.fabric is not None)
    return Annotated[reduce(operator.or_, fabrics), Field(discriminator="kind")]


def kind_rows(specs: Mapping[str, TopologySpec]) -> list[dict[str, str]]:
    """One row per kind, for people: the kind, its own keys of `fabric`, an example and a description."""
    return [
        {"kind": spec.kind, "keys": ", ".join(spec.keys), "example": spec.example, "what": spec.what}
        for spec in specs.values()
    ]
