"""Clusters and profiles of published measurements: the machine that a row names, at the size it names."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from moesim.hwmodels.cluster import Cluster
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.network import Network, load_network
from moesim.hwmodels.node import Node, load_node
from moesim.simulator.scoreboard.recipes import recipe_of
from moesim.simulator.scoreboard.rows import OpenRow


class Machine(NamedTuple):
    """A node, the network between its copies, and the profile that prices it."""

    node: str
    network: str
    profile: str


MACHINES: dict[str, Machine] = {
    "A100-80GB-SXM": Machine("hgx-a100", "ft3-ib-400g", "a100-layers"),
    "A100-40GB-SXM": Machine("hgx-a100", "ft3-ib-400g", "a100-layers"),
    "H100-SXM": Machine("hgx-h100", "ft3-ib-400g", "h100-products"),
    "B200-SXM": Machine("hgx-b200", "ft3-ib-400g", "b200-layers"),
    "B300-SXM": Machine("hgx-b300", "ft3-roce-800g", "b300-layers"),
    "GB200": Machine("gb200-nvl72-64", "ft3-ib-400g", "gb200-layers"),
    "GB300": Machine("gb300-nvl72-64", "ft3-roce-800g", "gb300-layers"),
}
"""The best profile that stands on kernels of that accelerator, not on any training step."""

BETTER_KNOWN = {"simumax-b200": "b200-simumax", "mpt-h100": "h100-flash2"}
"""Groups of which more is known: kernel timings of the very machine, the age of the attention kernels."""

JEAN_ZAY_NIC = {
    "value": 6.25e9,
    "kind": "published",
    "source": "bigscience-workshop/bigscience README: 4 Omni-Path links of 100 Gb/s for 8 GPUs",
    "date": "2022-03",
}
A100_40GB = {
    "value": 1.555e12,
    "kind": "spec",
    "source": "NVIDIA A100 datasheet: 1,555 GB/s for the 40 GB part",
    "date": "2021-06",
}


def machine_of(row: OpenRow) -> tuple[Cluster, str]:
    """(cluster, profile name) of a row; raises InputError for hardware that no machine here stands for."""
    if row.hardware not in MACHINES:
        raise InputError(f"{row.id}: no machine for {row.hardware}")
    slow_network = row.group == "bloom-a100"
    best = MACHINES[row.hardware].profile
    profile = recipe_of(row).profile or BETTER_KNOWN.get(row.group, best)
    return _cluster(row.hardware, row.n_gpus, slow_network), profile


@lru_cache(maxsize=256)
def _cluster(hardware: str, n_gpus: int, slow_network: bool) -> Cluster:
    machine = MACHINES[hardware]
    node = load_node(machine.node)
    if n_gpus < node.n_gpus:
        node = _resized(node, n_gpus)
    if hardware == "A100-40GB-SXM":
        node = _smaller_memory(node)
    if slow_network:
        node = Node.model_validate({**_fields(node), "nic_bandwidth": JEAN_ZAY_NIC})
    if n_gpus % node.n_gpus:
        raise InputError(f"{n_gpus} GPUs do not fill nodes of {node.n_gpus}")
    nodes = n_gpus // node.n_gpus
    network: Network = load_network("single-node" if nodes == 1 else machine.network)
    return Cluster(name=f"{hardware}-{n_gpus}", title=hardware, node=node, nodes=nodes, network=network)


def _fields(part: Node) -> dict[str, object]:
    return {name: getattr(part, name) for name in type(part).model_fields}


def _resized(node: Node, n_gpus: int) -> Node:
    """A node of which a job takes only `n_gpus`."""
    gpus = node.gpus.model_copy(update={"value": float(n_gpus), "note": "the GPUs of the job"})
    return node.model_copy(update={"gpus": gpus, "scale_up": None})


def _smaller_memory(node: Node) -> Node:
    part = node.accelerator
    hbm = part.hbm.model_copy(update={"value": 40 * 2.0**30}) if part.hbm else None
    bandwidth = type(part.hbm_bandwidth).model_validate(A100_40GB) if part.hbm_bandwidth else None
    accelerator = part.model_copy(update={"hbm": hbm, "hbm_bandwidth": bandwidth})
    return node.model_copy(update={"accelerator": accelerator})
