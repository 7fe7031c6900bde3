"""Compiles one program for every group of GPUs, with its members, their variation and their links."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from moesim.hwmodels.arrays import IntArray
from moesim.hwmodels.topologies import Topology
from moesim.simulator.common.bounded_cache import BoundedCache, Same, digest, model_key
from moesim.simulator.engine.compilation import compile_program
from moesim.simulator.engine.full_resolution.faults import (
    check_faults,
    degraded,
    jitter_cvs,
    slow_factors,
    surviving_groups,
)
from moesim.simulator.engine.full_resolution.link_map import ClusterLinkMap
from moesim.simulator.engine.program import MemberVariation, PricedSchedule, Program
from moesim.simulator.layout.groups import grouped_gpus
from moesim.simulator.layout.job import ResolvedJob

Draw = Callable[[int, int | None], MemberVariation]
"""Returns the variation of a group from (group, members); members=None stands for the folded run's."""


@dataclass(frozen=True, slots=True)
class ClusterPrograms:
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


def compile_groups(job: ResolvedJob, priced: PricedSchedule, draw: Draw) -> ClusterPrograms:
    """Compile one program a group of GPUs on the faulty cluster's links (docs/model.md, eqs. G1 to G3).

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
    programs = []
    for group in running:
        own = gpus[:, group]
        spread = (per_node, scenario.spreading, scenario.seed, scenario.parallel.ep > 1)
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
