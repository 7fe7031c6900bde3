"""Compiles one program for every group of GPUs, with the faults of the scenario, and builds their result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from moesim.hwmodels.arrays import FloatArray, IntArray
from moesim.hwmodels.cluster import Cluster
from moesim.hwmodels.errors import InfeasibleError, InputError
from moesim.hwmodels.topologies import LinkFault, Topology
from moesim.hwmodels.topologies.faults import FaultKind
from moesim.simulator.common.bounded_cache import BoundedCache, Same, digest, model_key
from moesim.simulator.cost.table import NO_SLOW_SENDS, SlowSends
from moesim.simulator.engine.compilation import compile_program
from moesim.simulator.engine.full_resolution.link_map import ClusterLinkMap
from moesim.simulator.engine.full_resolution.result import FaultEffect, FullResult
from moesim.simulator.engine.full_resolution.statistics import (
    expert_map,
    gpu_times,
    group_times,
    link_loads,
    link_utilisation,
    port_maps,
    rank_maps,
    skew_rows,
    stragglers,
    switch_map,
)
from moesim.simulator.engine.program import MemberVariation, PricedSchedule, Program
from moesim.simulator.engine.records import Execution
from moesim.simulator.layout.job import ResolvedJob
from moesim.simulator.layout.parallel import grouped_gpus
from moesim.simulator.scenario.sections import Down, Fault, Jitter, NodeLoss, SlowGpu, SlowLink

# -- faults ----------------------------------------------------------------------------------------


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

    A target is such as "nic:17", "plane:3", "gpu:5" (its scale-up ports), a link id, or else a switch. Raises
    InputError for a link that does not exist, InfeasibleError where a fault cuts off a GPU.
    """
    kinds: dict[str, FaultKind] = {"nic": "nic", "plane": "plane", "scale-up": "plane", "gpu": "gpu-links"}
    links = []
    for fault in faults:
        if isinstance(fault, SlowLink | Down):
            kind: FaultKind = (
                "link" if "->" in fault.link else kinds.get(fault.link.partition(":")[0], "switch")
            )
            bandwidth = fault.bandwidth if isinstance(fault, SlowLink) else 0.0
            links.append(LinkFault(kind, fault.link, bandwidth))
    return topology.degraded(links) if links else topology


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


# -- groups ----------------------------------------------------------------------------------------

Draw = Callable[[int, int | None], MemberVariation]
"""Returns the variation of a group from (group, members); members=None stands for the folded run's."""


class ClusterPrograms(Struct, frozen=True):
    """Programs of all running groups, and the GPUs of their members.

    `gpus[rank, group, member]`: global GPU numbers of all groups. `running`: the groups that have a program,
    in the order of `programs`.
    """

    programs: tuple[Program, ...]
    gpus: IntArray
    running: tuple[int, ...]
    topology: Topology


_TOPOLOGIES: BoundedCache[Topology] = BoundedCache(150_000, lambda topology: topology.n_gpus)
"""Topologies of the clusters before, limited by their GPUs (each takes about 140 bytes a GPU and cable)."""
_LINK_MAPS: BoundedCache[ClusterLinkMap] = BoundedCache(64_000_000, ClusterLinkMap.bytes_at_most)
"""Link maps of the groups before, of at most 64 MB."""


def _wired(topology: Topology) -> Topology:
    """The topology with all its cables, which it otherwise adds when they are first asked for."""
    assert topology.wiring
    return topology


def compile_groups(
    job: ResolvedJob,
    priced: PricedSchedule,
    draw: Draw,
    slow_sends: SlowSends = NO_SLOW_SENDS,
) -> ClusterPrograms:
    """Compile one program a group of GPUs on the faulty cluster's links (docs/model.md, eqs. G1 to G3).

    `slow_sends`: those of which the latencies count here, since the links themselves are simulated.
    Raises InputError for faults that name parts outside the cluster, InfeasibleError where no step can end.
    """
    scenario, cluster, layout = job.scenario, job.cluster, job.layout
    faults = scenario.faults
    check_faults(faults, cluster)
    gpus = grouped_gpus(layout, cluster.node.scale_up_shares)
    running = surviving_groups(faults, gpus, layout.gpus_per_node)
    place = (model_key(cluster.node), model_key(cluster.network), cluster.nodes)
    healthy = _TOPOLOGIES.get(place, lambda: _wired(cluster.topology()))
    topology = (
        _TOPOLOGIES.get((place, faults), lambda: _wired(degraded(healthy, faults))) if faults else healthy
    )
    per_node = min(gpus.shape[2], layout.gpus_per_node)
    programs, latencies = [], tuple(sorted(slow_sends.by_latency.items()))
    for group in running:
        own = gpus[:, group]
        spread = (per_node, scenario.spreading, scenario.seed, scenario.parallel.ep > 1, latencies)
        link_map = _LINK_MAPS.get(
            (Same(topology), Same(healthy), digest(own), *spread),
            partial(ClusterLinkMap, topology, healthy, own, *spread),
        )
        variation = draw(group, gpus.shape[2])
        usual = scenario.variation.jitter_cv.value
        jitter = jitter_cvs(faults, own, usual)
        variation = replace(
            variation,
            clock=variation.clock * slow_factors(faults, own),
            jitter_cv=usual if bool((jitter == usual).all()) else jitter,
        )
        programs.append(compile_program(priced, variation, link_map, group))
    return ClusterPrograms(tuple(programs), gpus, tuple(running), topology)


# -- the result ------------------------------------------------------------------------------------


def full_result(
    whole: ClusterPrograms, executions: Sequence[Execution], causes: tuple[FaultEffect, ...]
) -> FullResult:
    """Stragglers, skew, link load and heat maps of a finished run of all groups (docs/model.md, eq. G4)."""
    times = [group_times(execution) for execution in executions]
    running = list(whole.running)
    gpus = whole.gpus[:, running]
    share = link_utilisation(whole.topology, executions[0].carried_bytes, executions[0].end_ns)
    kinds, busiest = link_loads(whole.topology, share)
    maps = (
        *port_maps(whole.topology, share),
        switch_map(whole.topology, share),
        *rank_maps(times, running),
        expert_map([execution.program for execution in executions]),
    )
    return FullResult(
        gpus=int(gpus.size),
        groups=len(running),
        members=int(gpus.shape[2]),
        lost_groups=tuple(sorted(set(range(whole.gpus.shape[1])) - set(running))),
        group_end_s=tuple(execution.last_ns / 1e9 for execution in executions),
        gpu_times=gpu_times(times, gpus),
        stragglers=stragglers(times, gpus, running),
        skew=skew_rows(times),
        link_kinds=kinds,
        busiest_links=busiest,
        heat_maps=tuple(found for found in maps if found is not None),
        causes=causes,
    )
