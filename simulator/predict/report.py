"""Computes the breakdown, the pairs and the utilisation of a finished execution (pure)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import fsum

import numpy as np

from moesim.simulator.engine.durations import NS
from moesim.simulator.engine.records import Execution, StepRecord
from moesim.simulator.model.block import is_routed_layer
from moesim.simulator.predict.result_parts import Breakdown, PhaseSpan, Utilisation

CATEGORY = {
    "F": "forward",
    "B": "backward_input",
    "I": "backward_input",
    "W": "backward_weight",
    "F&B": "forward_backward",
    "F&I": "forward_backward",
}
"""Category of each kind of action. The W of a full backward chunk counts in backward_input, a choice fixed
before any comparison."""


def breakdowns(execution: Execution, split_weight: bool = False) -> list[Breakdown]:
    """Seconds by category for every pipeline rank, averaged over members (docs/model.md, eq. T1, eq. T2).

    With `split_weight` the weight-gradient phases of a full backward chunk count in backward_weight. The
    bubble is the time in which no action runs. Exposed communication is the time of actions in which the
    compute SMs wait, the wait of a rank for its own sends after an action, and the gradient traffic at the
    end of the step.
    """
    return [_breakdown(execution, rank, split_weight) for rank in range(len(execution.ranks))]


def _breakdown(execution: Execution, rank: int, split_weight: bool) -> Breakdown:
    seconds: defaultdict[str, float] = defaultdict(float)
    exposed = 0.0
    for record in execution.ranks[rank]:
        kind = record.step.code.kind
        span = float((record.end - record.start).mean())
        weight = (
            float(record.step.code.weight_ns[record.step.microbatches[1]])
            if split_weight and kind == "B"
            else 0.0
        )
        seconds[CATEGORY[kind]] += span - weight
        seconds["backward_weight"] += weight
        exposed += span - compute_ns(record) + float((record.free - record.end).mean())
    sync = execution.syncs[rank]
    optimizer = sum(end - begin for begin, end in (sync.reduce, sync.norm, sync.optimizer, sync.gather))
    exposed += optimizer - (sync.optimizer[1] - sync.optimizer[0])
    bubble = execution.end_ns - fsum(seconds.values()) - optimizer
    return Breakdown(
        forward=seconds["forward"] / NS,
        backward_input=seconds["backward_input"] / NS,
        backward_weight=seconds["backward_weight"] / NS,
        forward_backward=seconds["forward_backward"] / NS,
        bubble=bubble / NS,
        optimizer=optimizer / NS,
        exposed_communication=exposed / NS,
    )


def mean_breakdown(rows: list[Breakdown]) -> Breakdown:
    """Mean of the breakdowns of several ranks or groups."""
    return Breakdown(
        **{name: fsum(getattr(r, name) for r in rows) / len(rows) for name in Breakdown.model_fields}
    )


def mean_over_groups(groups: list[list[Breakdown]]) -> list[Breakdown]:
    """Mean breakdown over the groups, for every pipeline rank."""
    return (
        groups[0] if len(groups) == 1 else [mean_breakdown(list(rank)) for rank in zip(*groups, strict=True)]
    )


def compute_ns(record: StepRecord) -> float:
    """Nanoseconds in which the compute SMs work inside a schedule step, averaged over members."""
    code, micro = record.step.code, record.step.microbatches
    return fsum(float(code.compute_ns[side][micro[side]]) for side in (0, 1) if micro[side] >= 0)


def pair_seconds(executions: Sequence[Execution]) -> float | None:
    """Mean seconds of the overlapped pairs; None where the schedule has no pairs."""
    spans = [
        float((record.end - record.start).mean())
        for execution in executions
        for rank in execution.ranks
        for record in rank
        if record.step.code.kind == "F&B"
    ]
    return fsum(spans) / len(spans) / NS if spans else None


def pair_phases(executions: Sequence[Execution]) -> tuple[PhaseSpan, ...]:
    """Mean duration of each phase of MoE blocks inside overlapped pairs.

    Compute is averaged over members. A transfer has the payload of its slowest member, and the wait at the
    barrier including the launch, averaged over members.
    """
    total: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for rank in (rank for execution in executions for rank in execution.ranks):
        seen: defaultdict[int, list[StepRecord]] = defaultdict(list)
        for record in rank:
            if record.step.code.kind == "F&B":
                seen[id(record.step.code)].append(record)
        for records in seen.values():
            _add_phases(records, total)
    return tuple(
        PhaseSpan(phase=phase, seconds=span / n / NS, wait_s=wait / n / NS)
        for phase, (span, wait, n) in sorted(total.items())
    )


def _add_phases(records: list[StepRecord], total: dict[str, list[float]]) -> None:
    """Add the MoE phases of records that share one template."""
    code = records[0].step.code
    for number, task in enumerate(code.tasks):
        if not is_routed_layer(task.kind):
            continue
        entry = total[task.phase]
        micro = [record.step.microbatches[task.side] for record in records]
        entry[2] += len(records)
        if task.transfer is None:
            entry[0] += float(task.rows_ns[micro].mean(axis=1).sum())
            continue
        ready = np.array([record.start for record in records])
        before = code.before[number]
        for dep in (*task.deps, *([] if before is None else [before])):
            ready = np.maximum(ready, np.array([record.ends[dep] for record in records]))
        ready = ready + task.rows_ns[micro]
        launch = np.array([record.begins[number] for record in records]) + task.transfer.launch_ns
        entry[0] += float((np.array([record.finishes[number] for record in records]) - launch).sum())
        entry[1] += float((launch - ready.mean(axis=1)).sum())


def utilisation(
    executions: Sequence[Execution], nic_bytes_per_s: float, scale_up_bytes_per_s: float
) -> Utilisation:
    """Busy fractions over the step, averaged over ranks and groups; link rates are nominal and per GPU."""
    end, ranks = max(executions[0].end_ns, 1), len(executions[0].ranks) * len(executions)
    records = [record for execution in executions for rank in execution.ranks for record in rank]
    compute = fsum(compute_ns(record) for record in records)
    transfers = sum(
        record.finishes[n] - record.begins[n] for record in records for n in record.step.code.transfers
    )
    nic, scale_up = (fsum(_port_bytes(execution, which) for execution in executions) for which in (0, 1))
    return Utilisation(
        compute_partition=compute / ranks / end,
        communication_partition=transfers / ranks / end,
        scale_up=scale_up / ranks / (scale_up_bytes_per_s * end / NS) if scale_up_bytes_per_s else 0.0,
        nic=nic / ranks / (nic_bytes_per_s * end / NS) if nic_bytes_per_s else 0.0,
    )


def _port_bytes(execution: Execution, which: int) -> float:
    """Bytes that an average GPU sent through NICs (0) or scale-up ports (1), summed over pipeline ranks."""
    link_map = execution.program.link_map
    gpus = link_map.gpus_per_rank
    return fsum(
        fsum(execution.carried_bytes[link_map.ports(rank)[which]].tolist()) / gpus
        for rank in range(len(execution.ranks))
    )
