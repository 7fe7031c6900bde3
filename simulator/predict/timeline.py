"""Timelines to draw: the actions of every pipeline rank, and the phases of one action."""

from __future__ import annotations

from dataclasses import dataclass

from moesim.simulator.engine.durations import NS
from moesim.simulator.engine.program import PlacedStep
from moesim.simulator.engine.records import Execution, SyncRecord
from moesim.simulator.predict.step import run_step
from moesim.simulator.predict.trace import trace_info
from moesim.simulator.predict.trace_events import THREADS, GpuEvents
from moesim.simulator.scenario import Scenario

SYNC = {
    "reduce": "gradient reduction",
    "norm": "gradient norm",
    "optimizer": "optimizer",
    "gather": "parameter gather",
}
DETAIL_LABELS = {"stage": "stage", "block": "block", "microbatch": "micro-batch"}
"""Arguments of a trace event that the detail of a phase shows, with their labels."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar on one row of a timeline, in seconds from the start of the step.

    `kind`: a schedule action (F, B, I, W, F&B, F&I), a phase or a part of the step's end. `detail`: its
    stages and micro-batches.
    """

    row: str
    kind: str
    detail: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """Timeline of the first GPU of every pipeline rank.

    `actions`: schedule actions and the end of the step, with one row a pipeline rank. `zoomed`: the phases of
    one action of `zoomed_rank` on its streams, of an overlapped pair from the middle of the step if the
    schedule has pairs, else of the middle action.
    """

    step_s: float
    ranks: int
    actions: tuple[Bar, ...]
    zoomed_rank: int
    zoomed: tuple[Bar, ...]


def timeline(scenario: Scenario, rank: int = 0) -> Timeline:
    """Run a step and return its timeline. Raises InputError for an illegal scenario."""
    step = run_step(scenario)
    execution = step.executions[0]
    ranks = range(len(execution.ranks))
    rank = min(max(rank, 0), len(ranks) - 1)
    actions = [bar for r in ranks for bar in (*_actions(execution, r), *_end(execution.syncs[r], str(r)))]
    info = trace_info(step.prepared, 0)
    return Timeline(
        step_s=execution.end_ns / NS,
        ranks=len(ranks),
        actions=tuple(actions),
        zoomed_rank=rank,
        zoomed=tuple(_zoomed(GpuEvents(execution, info, rank, 0, info.gpus[rank][0]))),
    )


def _actions(execution: Execution, rank: int) -> list[Bar]:
    return [
        Bar(
            str(rank),
            record.step.code.kind,
            _which(record.step),
            int(record.start[0]) / NS,
            int(record.end[0]) / NS,
        )
        for record in execution.ranks[rank]
    ]


def _which(step: PlacedStep) -> str:
    """Stage and micro-batch of every action of a step, such as "F of stage 0, micro-batch 7"."""
    sides = ((kind, 0 if kind == "F" else 1) for kind in step.code.kind.split("&"))
    return "; ".join(
        f"{kind} of stage {step.stages[side]}, micro-batch {step.microbatches[side]}" for kind, side in sides
    )


def _end(sync: SyncRecord, row: str) -> list[Bar]:
    spans = ((name, getattr(sync, key)) for key, name in SYNC.items())
    return [Bar(row, name, name, begin / NS, end / NS) for name, (begin, end) in spans if end > begin]


def _zoomed(gpu: GpuEvents) -> list[Bar]:
    records = gpu.execution.ranks[gpu.rank]
    pairs = [record for record in records if record.step.code.kind in ("F&B", "F&I")] or records
    if not pairs:
        return []
    chosen = pairs[len(pairs) // 2]
    return [
        Bar(
            THREADS.get(event["tid"], "pipeline send"),
            _phase(event["name"]),
            ", ".join(
                f"{DETAIL_LABELS[key]} {value}"
                for key, value in event["args"].items()
                if key in DETAIL_LABELS
            ),
            event["ts"] / 1e6,
            (event["ts"] + event["dur"]) / 1e6,
        )
        for event in gpu.phases(chosen)
    ]


def _phase(name: str) -> str:
    """The readable name of a kernel in a trace: "dispatch F", "wait for dispatch F", "attn F"."""
    words = name.partition(" (")[0].removeprefix("ncclDevKernel_").replace("_", " ")
    return words.replace("notify ", "wait for ", 1) if words.startswith("notify ") else words
