"""Heat maps as data, for the load of links and ports, the waiting of ranks and the load of experts (pure)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moesim.hwmodels.arrays import FloatArray
from moesim.hwmodels.topologies import Topology
from moesim.simulator.engine.full_resolution.result import HeatMap
from moesim.simulator.engine.full_resolution.statistics import GroupTimes, link_ends
from moesim.simulator.engine.program import Program

UTILISATION = "share of nominal bandwidth over the step"

MOST_SWITCHES = 512
"""Most rows or columns of a map of switches; for larger fabrics only the ports are shown."""


def port_maps(topology: Topology, utilisation: FloatArray) -> list[HeatMap]:
    """Utilisation of every GPU's busiest NIC and scale-up link, by node and GPU of the node."""
    ends = link_ends(topology)
    maps = []
    for title, of_kind in (("NIC load", ~ends.scale_up), ("scale-up port load", ends.scale_up)):
        busiest, found = np.zeros(topology.n_gpus), False
        for side in (ends.tails, ends.heads):
            links = np.flatnonzero(of_kind & (side < topology.n_gpus))
            np.maximum.at(busiest, side[links], utilisation[links])
            found = found or bool(len(links))
        if found:
            maps.append(_by_node(title, UTILISATION, busiest, topology.gpus_per_node))
    return maps


def switch_map(topology: Topology, utilisation: FloatArray) -> HeatMap | None:
    """Utilisation of the cables between scale-out switches in their busier direction; None without any."""
    wiring = topology.wiring
    outer = ~topology.links().scale_up[::2]
    cables = np.flatnonzero(outer & (wiring.tails >= topology.n_gpus) & (wiring.heads >= topology.n_gpus))
    tails, row = np.unique(wiring.tails[cables], return_inverse=True)
    heads, column = np.unique(wiring.heads[cables], return_inverse=True)
    if not len(cables) or max(len(tails), len(heads)) > MOST_SWITCHES:
        return None
    values = np.full((len(tails), len(heads)), -1.0)
    busier = np.maximum(utilisation[2 * cables], utilisation[2 * cables + 1])
    np.maximum.at(values, (row, column), busier)
    values[values < 0.0] = np.nan
    names = wiring.names
    return HeatMap(
        title="switch link load",
        unit=UTILISATION,
        row_label="switch",
        column_label="switch",
        rows=tuple(names[v] for v in tails.tolist()),
        columns=tuple(names[v] for v in heads.tolist()),
        values=_rounded(values),
    )


def rank_maps(times: Sequence[GroupTimes], groups: Sequence[int]) -> list[HeatMap]:
    """Waiting and held-up time, by pipeline rank and member of all groups."""
    maps = []
    for title, name in (("wait at barriers", "wait_s"), ("time the group waited for it", "held_up_s")):
        values = np.concatenate([getattr(part, name) for part in times], axis=1)
        members = times[0].wait_s.shape[1]
        maps.append(
            HeatMap(
                title=title,
                unit="seconds a step",
                row_label="pipeline rank",
                column_label="group.member",
                rows=tuple(str(r) for r in range(len(values))),
                columns=tuple(f"{g}.{m}" for g in groups for m in range(members)),
                values=_rounded(values),
            )
        )
    return maps


def expert_map(programs: Sequence[Program]) -> HeatMap | None:
    """Relative rows of each member in each routed layer, averaged over micro-batches and groups."""
    loads = [program.variation.loads for program in programs]
    if not loads[0].shape[0] or loads[0].shape[2] == 1:
        return None
    values = np.mean([load.mean(axis=1) for load in loads], axis=0)
    return HeatMap(
        title="expert load",
        unit="rows over their mean",
        row_label="routed layer",
        column_label="rank of the expert-parallel group",
        rows=tuple(str(r) for r in range(len(values))),
        columns=tuple(str(m) for m in range(values.shape[1])),
        values=_rounded(values),
    )


def _by_node(title: str, unit: str, of_gpu: FloatArray, gpus_per_node: int) -> HeatMap:
    values = of_gpu.reshape(-1, gpus_per_node)
    return HeatMap(
        title=title,
        unit=unit,
        row_label="node",
        column_label="GPU of the node",
        rows=tuple(str(n) for n in range(len(values))),
        columns=tuple(str(g) for g in range(gpus_per_node)),
        values=_rounded(values),
    )


def _rounded(values: FloatArray) -> tuple[tuple[float | None, ...], ...]:
    return tuple(tuple([None if v != v else round(v, 9) for v in row]) for row in values.tolist())
