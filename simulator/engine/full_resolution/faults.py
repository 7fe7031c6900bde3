"""Applies the faults of a scenario to GPUs, links and groups (pure)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moesim.hwmodels.arrays import FloatArray, IntArray
from moesim.hwmodels.cluster import Cluster
from moesim.hwmodels.errors import InfeasibleError, InputError
from moesim.hwmodels.topologies import LinkFault, Topology
from moesim.hwmodels.topologies.faults import FaultKind
from moesim.simulator.scenario.faults import Down, Fault, Jitter, NodeLoss, SlowGpu, SlowLink


def check_faults(faults: Sequence[Fault], cluster: Cluster) -> None:
    """Raise InputError where a fault names a GPU or node outside the cluster, or an empty list of GPUs."""
    for number, fault in enumerate(faults):
        place = f"faults[{number}]"
        if isinstance(fault, NodeLoss) and fault.node >= cluster.nodes:
            raise InputError(f"{place}.node={fault.node}: the cluster has nodes 0 to {cluster.nodes - 1}")
        if isinstance(fault, SlowGpu | Jitter) and fault.gpu != "all":
            gpus = (fault.gpu,) if isinstance(fault.gpu, int) else fault.gpu
            wrong = [gpu for gpu in gpus if not isinstance(gpu, int) or gpu >= cluster.n_gpus]
            if wrong or not gpus:
                found = wrong[0] if wrong else "none"
                raise InputError(f"{place}.gpu={found}: the cluster has GPUs 0 to {cluster.n_gpus - 1}")


def degraded(topology: Topology, faults: Sequence[Fault]) -> Topology:
    """The topology with its slow and dead links.

    Raises InputError for a link that does not exist, InfeasibleError where a fault cuts off a GPU.
    """
    links = [
        LinkFault(_kind(fault.link), fault.link, fault.bandwidth if isinstance(fault, SlowLink) else 0.0)
        for fault in faults
        if isinstance(fault, SlowLink | Down)
    ]
    return topology.degraded(links) if links else topology


def _kind(target: str) -> FaultKind:
    """The kind of a target such as "nic:17", "plane:3", "gpu:5" (its scale-up ports), a link id, a switch."""
    if "->" in target:
        return "link"
    kinds: dict[str, FaultKind] = {"nic": "nic", "plane": "plane", "scale-up": "plane", "gpu": "gpu-links"}
    return kinds.get(target.partition(":")[0], "switch")


def slow_factors(faults: Sequence[Fault], gpus: IntArray) -> FloatArray:
    """Factor by which the compute of each of `gpus` takes longer."""
    factor = np.ones(gpus.shape)
    for fault in faults:
        if isinstance(fault, SlowGpu):
            factor[np.isin(gpus, np.atleast_1d(fault.gpu))] /= fault.speed
    return factor


def jitter_cvs(faults: Sequence[Fault], gpus: IntArray, usual: float) -> FloatArray:
    """Coefficient of variation of the phases of each of `gpus`; the squares of independent causes add up."""
    square = np.full(gpus.shape, usual**2)
    for fault in faults:
        if isinstance(fault, Jitter):
            hit = np.ones(gpus.shape, bool) if fault.gpu == "all" else np.isin(gpus, np.atleast_1d(fault.gpu))
            square[hit] += fault.cv**2
    return np.asarray(np.sqrt(square))


def surviving_groups(faults: Sequence[Fault], gpus: IntArray, gpus_per_node: int) -> list[int]:
    """Groups without a GPU on a lost node; `gpus[rank, group, member]` are global numbers.

    Raises InfeasibleError where no group is left, because the step could not end.
    """
    lost = sorted({fault.node for fault in faults if isinstance(fault, NodeLoss)})
    hit = np.atleast_1d(np.isin(gpus // gpus_per_node, lost).any(axis=(0, 2)))
    left = [group for group in range(gpus.shape[1]) if not hit[group]]
    if not left:
        ranks = sorted({int(r) for r in np.nonzero(np.isin(gpus // gpus_per_node, lost))[0]})
        raise InfeasibleError(
            f"node {', '.join(map(str, lost))} lost: it holds experts and layers of pipeline rank "
            f"{', '.join(map(str, ranks))}, and no other group of {gpus.shape[2]} GPUs holds the same: the "
            "step cannot end. Replace the node from spares and restart from a checkpoint, or run more than "
            f"{gpus.shape[1]} expert-parallel group{'s' if gpus.shape[1] > 1 else ''} a pipeline rank"
        )
    return left
