"""Statistics of full resolution: stragglers, skew, the load of every link, and heat maps as data (pure)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
from msgspec import Struct

from moesim.hwmodels.arrays import BoolArray, FloatArray, IntArray
from moesim.hwmodels.frozen import SameObject
from moesim.hwmodels.topologies import Topology
from moesim.simulator.engine.bounds import member_sums_ns
from moesim.simulator.engine.full_resolution.result import (
    GpuTimes,
    HeatMap,
    LinkKindLoad,
    LinkLoad,
    SkewRow,
    Straggler,
)
from moesim.simulator.engine.program import NS, Program
from moesim.simulator.engine.records import Execution, waits

# -- statistics ------------------------------------------------------------------------------------

MOST_LISTED = 10
"""Most stragglers and links that a result lists."""


class GroupTimes(Struct, frozen=True):
    """Seconds of the members of one group on every pipeline rank [rank, member]."""

    compute_s: FloatArray
    wait_s: FloatArray
    """Wait at barriers for members that arrived later."""
    held_up_s: FloatArray
    """Time in which the member alone kept its group waiting, from the arrival of the last but one."""
    skew: tuple[tuple[str, int, FloatArray], ...]
    """(phase, position, mean wait of each member of each rank) inside overlapped pairs."""


def group_times(execution: Execution) -> GroupTimes:
    """Busy and waiting time of every member (docs/model.md, eq. G4)."""
    table, members = execution.tasks, execution.program.members
    shape = (len(execution.program.ranks), members)
    compute = member_sums_ns(table, np.ones(len(table.of_template)))
    recorded, wait = waits(execution), np.zeros(shape)
    first = np.cumsum([0, *(len(code.transfers) for code in table.actions.codes)])
    sums: defaultdict[tuple[str, int], dict[int, IntArray]] = defaultdict(dict)
    passes: defaultdict[tuple[str, int, int], int] = defaultdict(int)
    for group in table.groups:
        rank, number, actions = group
        code = table.actions.codes[number]
        if not code.transfers:
            continue
        of_code = recorded.wait_ns[first[number] : first[number + 1]]
        wait[rank] += of_code.sum(axis=0)
        if code.kind == "F&B":
            earlier: defaultdict[str, int] = defaultdict(int)  # transfers of the same phase
            for transfer, own in zip(code.transfers, of_code, strict=True):
                phase = code.tasks[transfer].phase
                position, earlier[phase] = earlier[phase], earlier[phase] + 1
                of_rank = sums[phase, position]
                of_rank[rank] = of_rank[rank] + own if rank in of_rank else own
                passes[phase, position, rank] += len(actions)
    skew = tuple(
        (phase, n, np.array([total / passes[phase, n, rank] / NS for rank, total in of_rank.items()]))
        for (phase, n), of_rank in sorted(sums.items())
    )
    return GroupTimes(compute / NS, wait / NS, recorded.held_up_ns / NS, skew)


def gpu_times(times: Sequence[GroupTimes], gpus: IntArray) -> GpuTimes:
    """One figure a GPU, in order of GPU numbers; `gpus[rank, group, member]` covers the groups of `times`."""

    def ordered(name: str) -> tuple[float, ...]:
        values = np.full(int(gpus.max()) + 1, np.nan)
        for group, part in enumerate(times):
            values[gpus[:, group]] = getattr(part, name)
        return tuple([round(v, 9) for v in values[~np.isnan(values)].tolist()])

    return GpuTimes(
        gpu=tuple(sorted(gpus.ravel().tolist())),
        compute_s=ordered("compute_s"),
        wait_s=ordered("wait_s"),
        held_up_s=ordered("held_up_s"),
    )


def stragglers(times: Sequence[GroupTimes], gpus: IntArray, groups: Sequence[int]) -> tuple[Straggler, ...]:
    """The GPUs that kept their groups waiting longest."""
    held_up = np.array([part.held_up_s for part in times]).transpose(1, 0, 2)  # [rank, group, member]
    order = np.argsort(-held_up, axis=None, kind="stable")[:MOST_LISTED]
    rows = []
    for rank, group, member in zip(*np.unravel_index(order, held_up.shape), strict=True):
        compute = times[group].compute_s[rank]
        if held_up[rank, group, member] > 0.0:
            rows.append(
                Straggler(
                    gpu=int(gpus[rank, group, member]),
                    pipeline_rank=int(rank),
                    group=groups[int(group)],
                    member=int(member),
                    held_up_s=float(held_up[rank, group, member]),
                    compute_over_group=float(compute[member] / compute.mean()) if compute.mean() else 1.0,
                )
            )
    return tuple(rows)


def skew_rows(times: Sequence[GroupTimes]) -> tuple[SkewRow, ...]:
    """Percentiles over all GPUs of the wait at each transfer of a pair, in the order of the chunk."""
    gathered: defaultdict[tuple[str, int], list[FloatArray]] = defaultdict(list)
    for part in times:
        for phase, position, values in part.skew:
            gathered[phase, position].append(values.ravel())
    rows = []
    for (phase, position), parts in sorted(gathered.items()):
        low, mid, high = np.percentile(np.concatenate(parts), [10, 50, 90])
        rows.append(
            SkewRow(phase=phase, layer=position, p10_s=float(low), p50_s=float(mid), p90_s=float(high))
        )
    return tuple(rows)


class LinkEnds(Struct, frozen=True):
    """Vertices at both ends of every link (GPUs have the lowest numbers), and which links are scale-up."""

    tails: IntArray
    heads: IntArray
    scale_up: BoolArray


def link_ends(topology: Topology) -> LinkEnds:
    """The ends of the links of `topology.links()`, in its order."""
    return _link_ends(SameObject(topology))


@lru_cache(maxsize=2)
def _link_ends(key: SameObject[Topology]) -> LinkEnds:
    topology = key.value
    wiring = topology.wiring
    pairs = np.array([wiring.tails, wiring.heads])
    return LinkEnds(pairs.T.ravel(), pairs[::-1].T.ravel(), topology.links().scale_up)


def link_utilisation(topology: Topology, carried_bytes: FloatArray, end_ns: int) -> FloatArray:
    """Bytes that every link carried over the bytes that its nominal bandwidth allows in the step."""
    return np.asarray(carried_bytes / (topology.links().nominal_bytes_per_s * max(end_ns, 1) / NS))


def link_loads(
    topology: Topology, share: FloatArray
) -> tuple[tuple[LinkKindLoad, ...], tuple[LinkLoad, ...]]:
    """(utilisation by kind of link, the busiest links); `share`: utilisation of every link."""
    table = topology.links()
    kinds = np.array(table.kinds)
    by_kind = []
    for kind in sorted(set(table.kinds)):
        of_kind = share[kinds == kind]
        by_kind.append(
            LinkKindLoad(
                kind=kind,
                links=len(of_kind),
                used=int((of_kind > 0.0).sum()),
                mean=float(of_kind.mean()),
                most=float(of_kind.max()),
            )
        )
    busiest = np.argsort(-share, kind="stable")[:MOST_LISTED]
    named = tuple(
        LinkLoad(link=table.ids[i], kind=table.kinds[i], utilisation=float(share[i]))
        for i in busiest.tolist()
        if share[i] > 0.0
    )
    return tuple(by_kind), named


# -- heat maps -------------------------------------------------------------------------------------

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
            values = busiest.reshape(-1, topology.gpus_per_node)
            rows = "node", range(len(values))
            maps.append(
                _heat_map(title, UTILISATION, rows, ("GPU of the node", range(values.shape[1])), values)
            )
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
    switches = [("switch", [wiring.names[v] for v in ends.tolist()]) for ends in (tails, heads)]
    return _heat_map("switch link load", UTILISATION, switches[0], switches[1], values)


def rank_maps(times: Sequence[GroupTimes], groups: Sequence[int]) -> list[HeatMap]:
    """Waiting and held-up time, by pipeline rank and member of all groups."""
    members = [f"{g}.{m}" for g in groups for m in range(times[0].wait_s.shape[1])]
    maps = []
    for title, name in (("wait at barriers", "wait_s"), ("time the group waited for it", "held_up_s")):
        values = np.concatenate([getattr(part, name) for part in times], axis=1)
        ranks = "pipeline rank", range(len(values))
        maps.append(_heat_map(title, "seconds a step", ranks, ("group.member", members), values))
    return maps


def expert_map(programs: Sequence[Program]) -> HeatMap | None:
    """Relative rows of each member in each routed layer, averaged over micro-batches and groups."""
    loads = [program.variation.loads for program in programs]
    if not loads[0].shape[0] or loads[0].shape[2] == 1:
        return None
    values = np.mean([load.mean(axis=1) for load in loads], axis=0)
    layers = "routed layer", range(len(values))
    ranks = "rank of the expert-parallel group", range(values.shape[1])
    return _heat_map("expert load", "rows over their mean", layers, ranks, values)


def _heat_map(
    title: str,
    unit: str,
    rows: tuple[str, Iterable[object]],
    columns: tuple[str, Iterable[object]],
    values: FloatArray,
) -> HeatMap:
    """A heat map; `rows` and `columns`: their label and their names."""
    return HeatMap(
        title=title,
        unit=unit,
        row_label=rows[0],
        column_label=columns[0],
        rows=tuple(map(str, rows[1])),
        columns=tuple(map(str, columns[1])),
        values=tuple(tuple([None if v != v else round(v, 9) for v in row]) for row in values.tolist()),
    )
