"""Short descriptions of a cluster by accelerator or node and number of nodes; rules choose the rest."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Discriminator, Field, GetJsonSchemaHandler, Tag, model_validator

from moesim.hwmodels.cluster import Cluster, load_cluster
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.frozen import Frozen
from moesim.hwmodels.network import Network, load_network
from moesim.hwmodels.node import Node, load_node, part_of_node
from moesim.hwmodels.price import EnergySiteRef, RentPrice
from moesim.hwmodels.provenance import UNDATED, DateText, Kind, Source
from moesim.hwmodels.validation import validate_model
from moesim.simulator.scenario.defaults import network_of, node_of

if TYPE_CHECKING:
    from pydantic.json_schema import JsonSchemaValue
    from pydantic_core import CoreSchema


class ClusterOutline(Frozen):
    """A cluster by its accelerator or node and the number of nodes or GPUs; rules choose what is left out."""

    accelerator: str | None = Field(
        None, description="Name of a shipped accelerator; its shipped node is taken."
    )
    node: str | Node | None = Field(
        None, description="In the place of accelerator: a node's name, path or data."
    )
    nodes: Annotated[int, Field(ge=1, strict=True)] | None = Field(
        None, description="Number of nodes. Absent: as many as gpus fill, or the part of one that they are."
    )
    gpus: Annotated[int, Field(ge=1, strict=True)] | None = Field(
        None, description="All GPUs of the job, which may be a part of each node. Absent: all of the nodes."
    )
    network: str | Network | None = Field(
        None, description="Absent: the smallest shipped network of such NICs that takes the nodes."
    )
    price_per_gpu_hour: RentPrice | None = Field(
        None, description="Absent: the median of the shipped offers for the accelerator."
    )
    energy: EnergySiteRef | None = Field(None, description="Electricity of the site: name, path or data.")
    name: str | None = Field(None, description="Absent: GPUs and accelerator.")
    title: str | None = Field(None, description="Shown to people. Absent: as the name.")
    kind: Kind = Field("assumed", description="Provenance of the composition.")
    source: Source = Field("stated by the user", description="Source of the composition.")
    date: DateText = Field(UNDATED, description="Date of the composition.")
    note: str | None = Field(None, description="Free text.")

    @model_validator(mode="after")
    def _one_machine(self) -> ClusterOutline:
        if (self.accelerator is None) == (self.node is None):
            raise ValueError(
                "a cluster needs exactly one of accelerator and node, and the number of nodes or GPUs, for "
                "example {accelerator: h100-sxm, nodes: 16} or {accelerator: h100-sxm, gpus: 1}"
            )
        if self.nodes is None and self.gpus is None:
            raise ValueError(
                "a cluster needs its number of nodes or of GPUs, for example {accelerator: h100-sxm, nodes: "
                "16} or {accelerator: h100-sxm, gpus: 1}"
            )
        return self

    @property
    def left_out(self) -> tuple[str, ...]:
        """Keys among node and network that are chosen by rule."""
        return tuple(key for key in ("node", "network") if getattr(self, key) is None)

    def cluster(self, base: Path | None) -> Cluster:
        """Build the full cluster; relative paths start from the folder of the file `base`.

        Raises InputError for unknown names and for nodes that do not fit the network.
        """
        named = self.node if self.node is not None else node_of(str(self.accelerator))
        node, nodes = self._used(load_node(named, base) if isinstance(named, str) else named)
        network = self.network if self.network is not None else network_of(node, nodes)
        if isinstance(network, str):
            network = load_network(network, base)
        name = self.name or f"{nodes * node.n_gpus}x{node.accelerator.name}"
        cluster = Cluster(
            name=name,
            title=self.title or name,
            node=node,
            nodes=nodes,
            network=network,
            energy=self.energy,
            kind=self.kind,
            source=self.source,
            date=self.date,
            note=self.note,
        )
        if "price_per_gpu_hour" in self.model_fields_set:
            return cluster.model_copy(update={"price_per_gpu_hour": self.price_per_gpu_hour})
        return cluster

    def _used(self, node: Node) -> tuple[Node, int]:
        """(the used part of each node, number of nodes); raises InputError for GPUs that do not fill them."""
        whole = node.n_gpus
        if self.gpus is None:
            assert self.nodes is not None
            return node, self.nodes
        nodes = self.nodes or max(1, self.gpus // whole)
        each, rest = divmod(self.gpus, nodes)
        if rest or each > whole:
            least, most = whole * max(1, self.gpus // whole), whole * (self.gpus // whole + 1)
            near = tuple(dict.fromkeys((least, most))) if self.nodes is None else (nodes * min(each, whole),)
            where = (
                f"{nodes} x {node.name} of {whole}" if self.nodes else f"whole nodes {node.name} of {whole}"
            )
            raise InputError(
                f"cluster.gpus={self.gpus} does not divide evenly over {where}; nearest: "
                f"{', '.join(map(str, near))}; or state cluster.nodes too, or at most {whole} GPUs",
                key="cluster.gpus",
                nearest=near,
            )
        return (node if each == whole else part_of_node(node, each)), nodes


def outline_naming(section: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the data of an outline that names its `key` (node or network) instead of leaving it to a rule.

    An override of a figure below that key needs the name.
    """
    named = dict(section)
    if key == "node" and isinstance(named.get("accelerator"), str):
        named[key] = node_of(named.pop("accelerator"))
    elif key == "network" and named.get(key) is None:
        named[key] = validate_model(ClusterOutline, named, "cluster").cluster(None).network.name
    return named


def data_for_other_accelerator(cluster: object) -> dict[str, Any]:
    """Data of a cluster that remain when another accelerator is named: nodes, GPUs and energy site."""
    if isinstance(cluster, str):
        return {"nodes": load_cluster(cluster).nodes}
    data = cluster if isinstance(cluster, Mapping) else {}
    return {key: data[key] for key in ("nodes", "gpus", "energy") if key in data}


def _form(value: object) -> str:
    """Tag of a value in the union `AnyCluster`: a name, an outline or a full cluster."""
    if isinstance(value, Mapping):
        short = value.get("accelerator") is not None or value.get("gpus") is not None
        whole = not short and value.get("network") is not None
        return "cluster" if whole else "outline"
    return "name" if isinstance(value, str) else "outline" if isinstance(value, ClusterOutline) else "cluster"


class _AnyOf:
    """Uses `anyOf` in the JSON Schema, because a full description may also match the outline's schema."""

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        found = handler(schema)
        return {"anyOf": found.pop("oneOf"), **found}


AnyCluster = Annotated[
    Annotated[str, Tag("name")]
    | Annotated[Cluster, Tag("cluster")]
    | Annotated[ClusterOutline, Tag("outline")],
    Discriminator(_form),
    _AnyOf(),
]
"""A field that takes a cluster's name or path, its outline, or its full description."""
