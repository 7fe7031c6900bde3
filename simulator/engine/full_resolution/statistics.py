"""Statistics of full resolution: stragglers, skew along a chunk, and the load of every link (pure)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from moesim.hwmodels.arrays import BoolArray, FloatArray, IntArray
from moesim.hwmodels.topologies import Topology
from moesim.simulator.engine.durations import NS
from moesim.simulator.engine.full_resolution.result import (
    GpuTimes,
    LinkKindLoad,
    LinkLoad,
    SkewRow,
    Straggler,
)
from moesim.simulator.engine.records import Execution, StepRecord

MOST_LISTED = 10
"""Most stragglers and links that a result lists."""


@dataclass(frozen=True, slots=True)
class Barrier:
    """All passes of one group through the barrier of one transfer of a template, in nanoseconds.

    `ready[n, member]`: when a member arrived in pass n. `meet[n]`: when the last member arrived.
    """

    kind: str
    phase: str
    position: int
    """Number of earlier transfers of the same phase in the action."""
    ready: IntArray
    meet: IntArray


def barriers(records: Sequence[StepRecord]) -> Iterator[Barrier]:
    """The barriers of one pipeline rank; actions with the same template share their barriers."""
    alike: defaultdict[int, list[StepRecord]] = defaultdict(list)
    for record in records:
        alike[id(record.step.code)].append(record)
    for same in alike.values():
        code = same[0].step.code
        seen: defaultdict[str, int] = defaultdict(int)
        for number in code.transfers:
            task = code.tasks[number]
            ready = np.array([record.start for record in same])
            before = code.before[number]
            for dep in (*task.deps, *([] if before is None else [before])):
                ready = np.maximum(ready, np.array([record.ends[dep] for record in same]))
            rows = task.rows_ns[[record.step.microbatches[task.side] for record in same]]
            meet = np.array([record.begins[number] for record in same], dtype=np.int64)
            yield Barrier(code.kind, task.phase, seen[task.phase], ready + rows, meet)
            seen[task.phase] += 1


@dataclass(frozen=True, slots=True)
class GroupTimes:
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
    shape = (len(execution.ranks), execution.program.members)
    compute, wait, held_up = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    skew: defaultdict[tuple[str, int], list[FloatArray]] = defaultdict(list)
    for rank, records in enumerate(execution.ranks):
        for record in records:
            for task in record.step.code.tasks:
                if task.transfer is None:
                    compute[rank] += task.rows_ns[record.step.microbatches[task.side]]
        sums: defaultdict[tuple[str, int], FloatArray] = defaultdict(lambda: np.zeros(shape[1]))
        passes: defaultdict[tuple[str, int], int] = defaultdict(int)
        for barrier in barriers(records):
            waits = barrier.meet[:, None] - barrier.ready
            wait[rank] += waits.sum(axis=0)
            if shape[1] > 1:
                last = barrier.ready.argmax(axis=1)
                second = np.partition(barrier.ready, -2, axis=1)[:, -2]
                np.add.at(held_up[rank], last, barrier.meet - second)
            if barrier.kind == "F&B":
                key = (barrier.phase, barrier.position)
                sums[key] += waits.sum(axis=0)
                passes[key] += len(waits)
        for key, total in sums.items():
            skew[key].append(total / passes[key] / NS)
    rows = tuple((phase, n, np.array(values)) for (phase, n), values in sorted(skew.items()))
    return GroupTimes(compute / NS, wait / NS, held_up / NS, rows)


def gpu_times(times: Sequence[GroupTimes], gpus: IntArray) -> GpuTimes:
    """One figure a GPU, in order of GPU numbers; `gpus[rank, group, member]` covers the groups of `times`."""

    def ordered(name: str) -> tuple[float, ...]:
        values = np.full(int(gpus.max()) + 1, np.nan)
        for group, part in enumerate(times):
            values[gpus[:, group]] = getattr(part, name)
        return tuple(round(float(v), 9) for v in values[~np.isnan(values)])

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


@dataclass(frozen=True, slots=True)
class LinkEnds:
    """Vertices at both ends of every link (GPUs have the lowest numbers), and which links are scale-up."""

    tails: IntArray
    heads: IntArray
    scale_up: BoolArray


def link_ends(topology: Topology) -> LinkEnds:
    """The ends of the links of `topology.links()`, in its order."""
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
