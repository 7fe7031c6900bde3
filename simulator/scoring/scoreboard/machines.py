"""Clusters and profiles of published measurements, at the size that each row states."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from moesim.hwmodels.cluster import Cluster
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.network import Network, load_network
from moesim.hwmodels.node import Node, load_node
from moesim.simulator.scoring.scoreboard.configurations import published_of
from moesim.simulator.scoring.scoreboard.rows import OpenRow


class RowMachine(NamedTuple):
    """Names of a node, of the network between nodes, and of the profile that prices them."""

    node: str
    network: str
    profile: str


MACHINES: dict[str, RowMachine] = {
    "A100-80GB-SXM": RowMachine("hgx-a100", "ft3-ib-400g", "a100-layers"),
    "A100-40GB-SXM": RowMachine("hgx-a100", "ft3-ib-400g", "a100-layers"),
    "H100-SXM": RowMachine("hgx-h100", "ft3-ib-400g", "h100-products"),
    "H100-SXM-96GB-HBM2e": RowMachine("hgx-h100-hbm2e", "ft3-ib-400g", "h100-hbm2e-products"),
    "B200-SXM": RowMachine("hgx-b200", "ft3-ib-400g", "b200-layers"),
    "B300-SXM": RowMachine("hgx-b300", "ft3-roce-800g", "b300-layers"),
    "GB200": RowMachine("gb200-nvl72-64", "ft3-ib-400g", "gb200-layers"),
    "GB300": RowMachine("gb300-nvl72-64", "ft3-roce-800g", "gb300-layers"),
}
"""Machine of each accelerator; its profile is the best one from kernels of that accelerator, not from any
training step."""

HBM2E = "H100-SXM-96GB-HBM2e"
VARIANT = re.compile(r"HBM2e|\b96 ?GB\b", re.I)
POWER = re.compile(r"\b(\d{3,4}) ?W\b")
LIMITS = {"H100-SXM": 700, HBM2E: 500}
"""Power limit (W) of an accelerator's description."""

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


def hardware_of(row: OpenRow) -> str:
    """The name of the accelerator of a row; power and memory variants have their own names.

    Raises InputError for hardware, a memory or a power limit without a description.
    """
    text, name = f"{row.hardware} {row.notes}", row.hardware
    if name.startswith("H100") and VARIANT.search(text):
        name = HBM2E
    if name not in MACHINES:
        raise InputError(f"{row.id}: no machine for {row.hardware}")
    limit = POWER.search(text)
    if limit and int(limit.group(1)) != LIMITS.get(name, int(limit.group(1))):
        if name == "H100-SXM" and int(limit.group(1)) == LIMITS[HBM2E]:
            return HBM2E
        raise InputError(f"{row.id}: no description of {row.hardware} at {limit.group(1)} W")
    return name


def left_out_of_machine(row: OpenRow) -> tuple[str, ...]:
    """Notes on facts of a row's machine that are not priced."""
    if row.hardware in MACHINES and hardware_of(row) == HBM2E:
        return ("the rates that this accelerator holds at 500 W were not published: products as at 700 W",)
    return ()


def machine_of(row: OpenRow) -> tuple[Cluster, str]:
    """(cluster, profile name) of a row. Raises InputError for hardware without a machine here."""
    hardware = hardware_of(row)
    slow_network = row.group == "bloom-a100"
    profile = published_of(row).profile
    if profile is None or hardware == HBM2E:
        profile = MACHINES[hardware].profile
    return _cluster(hardware, row.n_gpus, slow_network), profile


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
    """The node with only the `n_gpus` that a job uses."""
    gpus = node.gpus.model_copy(update={"value": float(n_gpus), "note": "the GPUs of the job"})
    return node.model_copy(update={"gpus": gpus, "scale_up": None})


def _smaller_memory(node: Node) -> Node:
    part = node.accelerator
    hbm = part.hbm.model_copy(update={"value": 40 * 2.0**30}) if part.hbm else None
    bandwidth = type(part.hbm_bandwidth).model_validate(A100_40GB) if part.hbm_bandwidth else None
    accelerator = part.model_copy(update={"hbm": hbm, "hbm_bandwidth": bandwidth})
    return node.model_copy(update={"accelerator": accelerator})
