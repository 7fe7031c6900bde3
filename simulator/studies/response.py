"""First-order response of the step time to prices, along the critical path of one execution (pure)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import fsum

from moesim.hwmodels.arrays import FloatArray
from moesim.simulator.cost.table import CostTable
from moesim.simulator.engine.critical import Segment
from moesim.simulator.engine.program import NS, Program
from moesim.simulator.model.operator import BlockKind, Phase

END_OF_STEP = ("gradient reduction", "gradient norm", "optimizer", "parameter gather")


@dataclass(frozen=True, slots=True)
class ResponsePart:
    """The price of a stretch of the critical path."""

    kind: BlockKind
    phase: Phase
    overlapped_share: float | None
    payload: bool


@dataclass(frozen=True, slots=True)
class PathWeights:
    """Seconds of a critical path by price; `rest_s` has no price that could change."""

    parts: Mapping[ResponsePart, float]
    send_s: float
    end_s: Mapping[tuple[int, str], float]
    """Seconds by (pipeline rank, part of the end of the step)."""
    rest_s: float


def path_weights(path: list[Segment]) -> PathWeights:
    """Sum the segments of a critical path by price."""
    parts: defaultdict[ResponsePart, int] = defaultdict(int)
    ends: defaultdict[tuple[int, str], int] = defaultdict(int)
    send = rest = 0
    for segment in path:
        length = segment.end_ns - segment.begin_ns
        task = segment.task
        if task is not None:
            parts[ResponsePart(task.kind, task.phase, task.overlapped_share, segment.payload)] += length
        elif segment.cause == "pipeline send":
            send += length
        elif segment.cause in END_OF_STEP:
            ends[segment.rank, segment.cause] += length
        else:
            rest += length
    return PathWeights(
        {part: ns / NS for part, ns in parts.items()},
        send / NS,
        {key: ns / NS for key, ns in ends.items()},
        rest / NS,
    )


def response_s(weights: PathWeights, before: CostTable, after: CostTable) -> float:
    """Seconds by which the step changes when prices go from `before` to `after` (docs/model.md, eq. U1).

    The path stays the same, and every stretch changes with its own price. This is exact for small changes; a
    large change may move the path, which makes the true change larger.
    """
    changes = [
        seconds * (_price(after, part) / old - 1.0)
        for part, seconds in weights.parts.items()
        if (old := _price(before, part)) > 0.0
    ]
    if before.send_s > 0.0:
        changes.append(weights.send_s * (after.send_s / before.send_s - 1.0))
    for (rank, cause), seconds in weights.end_s.items():
        field = {"gradient reduction": "reduce_s", "gradient norm": "norm_s", "optimizer": "optimizer_s"}
        name = field.get(cause, "gather_s")
        old = getattr(before.sync[rank], name)
        if old > 0.0:
            changes.append(seconds * (getattr(after.sync[rank], name) / old - 1.0))
    return fsum(changes)


def spread_response_s(path: Sequence[Segment], clock: FloatArray, before: float, after: float) -> float:
    """Seconds by which the step changes when the spread of GPU speed goes from one CV to another (eq. U5).

    `clock`: time factors 1 / (1 + cv z) [pipeline ranks, members]. The draws z and the members on the path
    stay the same.
    """
    if before <= 0.0:
        return 0.0
    changes = []
    for segment in path:
        if segment.task is not None and not segment.payload:
            speed = 1.0 / float(clock[segment.rank, segment.member % clock.shape[1]])
            other = max(1.0 + (speed - 1.0) * after / before, 0.1)
            changes.append((segment.end_ns - segment.begin_ns) / NS * (speed / other - 1.0))
    return fsum(changes)


def redrawn_response_s(path: Sequence[Segment], before: Program, after: Program) -> float:
    """Seconds by which the step changes when the same draws have another spread (docs/model.md, eq. U6).

    `after` is `before` with other run-to-run noise or expert load; the path and its members stay the same.
    """
    changes = []
    for segment in path:
        if segment.place is not None:
            old, new = (_duration_ns(program, segment) for program in (before, after))
            if old > 0.0:
                changes.append((segment.end_ns - segment.begin_ns) / NS * (new / old - 1.0))
    return fsum(changes)


def _duration_ns(program: Program, segment: Segment) -> float:
    """Time (ns) of a segment's task on its member, or of its slowest member's payload alone on its links."""
    assert segment.place is not None
    position, number = segment.place
    step = program.ranks[segment.rank][position]
    task = step.code.tasks[number]
    microbatch = step.microbatches[task.side]
    if segment.payload and task.transfer is not None:
        return task.transfer.payload_ns.item(microbatch)
    return float(task.rows_ns[microbatch][segment.member])


def _price(table: CostTable, part: ResponsePart) -> float:
    if part.payload:
        cost = table.transfer[
            part.kind, part.phase, "alone" if part.overlapped_share is None else "overlapped"
        ]
        return cost.payload_s
    price = table.phase(part.kind, part.phase, part.overlapped_share)
    return price.fixed_s + price.row_s
