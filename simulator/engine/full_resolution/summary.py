"""Builds the result of full resolution from the executions of all groups."""

from __future__ import annotations

from collections.abc import Sequence

from moesim.simulator.engine.full_resolution.groups import ClusterPrograms
from moesim.simulator.engine.full_resolution.heat_maps import expert_map, port_maps, rank_maps, switch_map
from moesim.simulator.engine.full_resolution.result import FaultEffect, FullResult
from moesim.simulator.engine.full_resolution.statistics import (
    gpu_times,
    group_times,
    link_loads,
    link_utilisation,
    skew_rows,
    stragglers,
)
from moesim.simulator.engine.records import Execution


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
