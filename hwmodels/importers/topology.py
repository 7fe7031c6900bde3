"""Makes a cluster file from the topology of a machine, by the reader of its format."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from moesim.hwmodels.cluster import Cluster
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.files import read_text
from moesim.hwmodels.importers.machine import ImportedMachine, MachineForm, rate_text
from moesim.hwmodels.importers.nccl_xml import NCCL_XML
from moesim.hwmodels.importers.smi_topo import SMI_TOPO
from moesim.hwmodels.network import load_network
from moesim.hwmodels.node import Node, load_node
from moesim.hwmodels.topologies.edge_list import EDGE_LIST, parse_edges
from moesim.hwmodels.topologies.scale_up_parts import FULLY_CONNECTED
from moesim.hwmodels.validation import registry, validate_model
from moesim.hwmodels.yaml_io import dump_mapping

# -- readers ---------------------------------------------------------------------------------------

MACHINE_FORMS: Mapping[str, MachineForm] = registry(
    NCCL_XML,
    SMI_TOPO,
)
"""Forms by name; the first that recognises a text reads it. Text of no form is an edge list."""

EDGE_LIST_FORM = "edge list: lines such as gpu:0 switch:0 50GB/s 1us"
"""What describes a whole cluster; the forms above describe one server."""


# -- clusters --------------------------------------------------------------------------------------

MAX_BYTES = 4_000_000
MOST_EDGES = 15_000
"""Most edges of a graph, so that its cluster file can be read again."""


class ImportedTopology(Struct, frozen=True):
    """A cluster and its file's text; `understood` and `assumed` say in words what was read and what not."""

    cluster: Cluster
    text: str
    understood: tuple[str, ...]
    assumed: tuple[str, ...]


def import_topology(
    path: Path, like: str, nodes: int = 1, network: str | None = None, date: str | None = None
) -> ImportedTopology:
    """The cluster that a file describes; a shipped node, `like`, supplies everything else.

    An edge list describes the whole cluster of `nodes` nodes; the forms of the registry describe one server,
    of which `nodes` are joined by the network called `network`. `date` goes into the provenance (today where
    not given). Raises InputError for a file that is missing, malformed or hostile, and for what does not fit
    together.
    """
    text, base = read_text(path, MAX_BYTES, "topology"), load_node(like)
    day = date or datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    name = re.sub(r"[^a-z0-9-]+", "-", path.stem.lower()).strip("-") or "imported"
    if nodes < 1:
        raise InputError(f"--nodes {nodes}: must be at least 1")
    form = next((form for form in MACHINE_FORMS.values() if form.recognises(text)), None)
    if form is not None:
        parts = _from_machine(form.read(text, str(path), base), base, nodes, network, (str(path), day))
    elif network is not None:
        raise InputError(f"--network {network!r}: the edge list {path} is the network already")
    else:
        parts = _from_edges(text, base, nodes, (str(path), day))
    data = {
        "name": name,
        "title": f"imported from {path.name}",
        "kind": "derived",
        "source": f"moesim import topology: {path.name} like node {base.name}, {nodes} node(s) as stated",
        "date": day,
        "node": parts.node,
        "nodes": nodes,
        "network": parts.network,
    }
    cluster = validate_model(Cluster, data, str(path))
    return ImportedTopology(cluster, dump_mapping(data), parts.understood, parts.assumed)


class _Parts(Struct, frozen=True):
    node: dict[str, Any]
    network: Any
    understood: tuple[str, ...]
    assumed: tuple[str, ...]


def _figure(value: Any, place: tuple[str, str], how: str = "") -> dict[str, Any]:
    """A figure read from the file, or derived, as `how` says, from it and the node that it is like."""
    kind, source = ("derived", f"{how} in {place[0]}") if how else ("measured", f"read from {place[0]}")
    return {"value": value, "kind": kind, "source": source, "date": place[1]}


def _base_node(base: Node, gpus: int, place: tuple[str, str]) -> dict[str, Any]:
    data = base.model_dump(mode="json", exclude_none=True)
    changed = {"name": "imported", "title": f"as {base.name}, with what {place[0]} says"}
    return {**data, **changed, "accelerator": base.accelerator.name, "gpus": _figure(gpus, place)}


def _from_machine(
    machine: ImportedMachine, base: Node, nodes: int, network: str | None, place: tuple[str, str]
) -> _Parts:
    node = _base_node(base, machine.gpus, place)
    understood = [f"{machine.form}: {machine.gpus} GPUs, {machine.nics} NICs"]
    assumed = [*machine.notes, f"latencies, power and payload rates as node {base.name!r}"]
    node.pop("scale_up", None)
    joined: Any = network or ("single-node" if nodes == 1 else None)
    if machine.shape == "nvswitch":
        links = max(machine.switch_links)
        if min(machine.switch_links) != links:
            raise InputError(
                f"{place[0]}: the GPUs have {min(machine.switch_links)} to {links} links to switches"
            )
        node["scale_up_switch"] = f"switched, {links} links a GPU"
        understood.append(f"all GPUs behind switches, {links} links each")
    elif machine.shape == "fully-connected":
        _mesh(node, machine, base, place)
        understood.append("every pair of GPUs joined directly")
    else:
        if nodes > 1 or network is not None:
            raise InputError(
                f"{place[0]}: not all pairs of GPUs have an equal scale-up link; "
                f"such a server is read as a graph of its own: use --nodes 1 and no --network, or write "
                f"an edge list of the whole cluster"
            )
        # Of a partial mesh: a GPU's bandwidth is divided by the most links that any GPU has.
        totals = [1]
        totals += [
            sum(n for pair, n in machine.pair_links.items() if gpu in pair) for gpu in range(machine.gpus)
        ]
        each = base.scale_up_achievable_bytes_per_s / max(totals)
        direct = sorted(machine.pair_links.items())
        edges = [f"gpu:{i} gpu:{j} {rate_text(each * n)}" for (i, j), n in direct] + list(machine.edges)
        joined = _edge_network(edges, base, machine.form, place[0])
        node["scale_up_switch"] = "as its edge list says"
        understood.append(f"a graph of {len(edges)} links")
        assumed.append("PCIe sockets joined at the rate of their fastest link")
        if machine.pair_links:
            assumed.append(f"rates of scale-up links from the scale-up rate of {base.accelerator.name}")
    if nodes > 1 and joined is None:
        raise InputError(f"--nodes {nodes}: name the network that joins them, such as --network mrft-ib-400g")
    understood += _nics(node, machine, base, place)
    return _Parts(node, joined, tuple(understood), tuple(assumed))


def _mesh(node: dict[str, Any], machine: ImportedMachine, base: Node, place: tuple[str, str]) -> None:
    """Gives every pair an equal part of a GPU's scale-up bandwidth."""
    pair = base.scale_up_bytes_per_s / (machine.gpus - 1)
    effective = base.scale_up_achievable_bytes_per_s / (machine.gpus - 1)
    rate = f"scale-up rate of {base.accelerator.name} over the {machine.gpus - 1} links of a GPU"
    node["scale_up_switch"] = "none: a link for every pair"
    node["scale_up"] = {
        "kind": FULLY_CONNECTED.kind,
        "title": "a link for every pair of GPUs",
        "fabric": {
            "link_bandwidth": _figure(f"{pair / 1e9:.6g} GB/s", place, rate),
            "link_bandwidth_effective": _figure(f"{effective / 1e9:.6g} GB/s", place, rate),
        },
    }


def _nics(node: dict[str, Any], machine: ImportedMachine, base: Node, place: tuple[str, str]) -> list[str]:
    if not machine.nics:
        return ["no NIC in the file: those of the node it is like"]
    each, rest = divmod(machine.nics, machine.gpus)
    share = 1.0
    if each == 0 or rest:  # some are storage NICs, or GPUs share them: count whole NICs per GPU
        each, share = max(1, each), min(1.0, machine.nics / machine.gpus)
    node["nics_per_gpu"] = _figure(each, place)
    like = base.nic_bandwidth
    if like is None and machine.nic_bytes_per_s is None:
        raise InputError(f"node {base.name!r} has no figure nic_bandwidth: name a node that has one")
    rate = machine.nic_bytes_per_s if machine.nic_bytes_per_s or like is None else like.value
    assert rate is not None
    value = f"{rate * share * 8 / 1e9:.6g} Gb/s"
    # The figure is read from the file only if the file states the rate; otherwise it keeps the provenance of
    # the node that the machine is like.
    if share < 1.0:
        whose = "" if machine.nic_bytes_per_s else f" of node {base.name} (--like)"
        shared = f"nic_bandwidth{whose}, shared: {machine.nics} NICs for {machine.gpus} GPUs"
        rate *= share
        node["nic_bandwidth"] = _figure(value, place, shared)
    elif machine.nic_bytes_per_s is not None or like is None:
        node["nic_bandwidth"] = _figure(value, place)
    else:
        source = f"as node {base.name} (--like), not stated in {place[0]}: {like.source}"
        node["nic_bandwidth"] = {"value": value, "kind": like.kind, "source": source, "date": like.date}
    payload = base.scale_out_effective_bytes_per_s / base.scale_out_bytes_per_s
    how = f"payload share {payload:.3g} of a NIC of node {base.name}, times nic_bandwidth of the NICs"
    node["nic_bandwidth_effective"] = _figure(f"{rate * payload / 1e9:.6g} GB/s", place, how)
    whence = "" if machine.nic_bytes_per_s else f", the rate of node {base.name!r}: the file states none"
    return [f"{each} NIC a GPU of {rate * 8 / 1e9:g} Gb/s{whence}"]


def _from_edges(text: str, base: Node, nodes: int, place: tuple[str, str]) -> _Parts:
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]
    network = _edge_network(lines, base, "edge list", place[0])
    try:
        edges = parse_edges(text.splitlines())
    except InputError as error:
        raise InputError(f"{place[0]}: {error}") from None
    gpus = len({name for edge in edges for name in (edge.a, edge.b) if re.fullmatch(r"gpu:\d+", name)})
    if not gpus:
        raise InputError(f"{place[0]}: no name like gpu:0; GPUs are called gpu:0, gpu:1, ...")
    if gpus % nodes:
        raise InputError(f"{place[0]}: {gpus} GPUs do not divide into --nodes {nodes}")
    node = _base_node(base, gpus // nodes, place)
    understood = (f"edge list: {len(edges)} links, {gpus} GPUs in {nodes} nodes",)
    assumed = (f"latencies that are not stated, power and NICs as node {base.name!r}",)
    return _Parts(node, network, understood, assumed)


def _edge_network(edges: list[str], base: Node, form: str, place: str) -> dict[str, Any]:
    """A network of kind edge-list; other figures come from the node and from a shipped InfiniBand network."""
    if len(edges) > MOST_EDGES:
        raise InputError(
            f"{place}: {len(edges):,} links, but the cluster file that is written from them holds at most "
            f"{MOST_EDGES:,}"
        )
    fabric = load_network("mrft-ib-400g").fabric
    assert fabric is not None
    keep = ("value", "kind", "source", "date")
    if base.nic_bandwidth is None:
        raise InputError(f"node {base.name!r} has no figure nic_bandwidth: name a node that has one")
    nic = base.nic_bandwidth.model_dump(mode="json", include=set(keep))
    latencies = {
        key: getattr(fabric, key).model_dump(mode="json", include=set(keep)) | {"kind": "assumed"}
        for key in ("latency_same_leaf", "latency_cross_leaf")
    }
    return {
        "name": "imported",
        "title": f"imported from a {form}",
        "kind": EDGE_LIST.kind,
        "fabric": {"link_bandwidth": nic, **latencies, "edges": edges},
    }
