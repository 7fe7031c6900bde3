"""Chrome/Perfetto traces of an execution, with kernel names that Holistic Trace Analysis (HTA) classifies.

A trace has one process a GPU (a member of a pipeline rank) and one thread a stream, so that the slices of a
thread nest; schedule actions have their own thread. The name of every communication kernel begins with
`ncclDevKernel_`, because HTA 0.5 recognises such a kernel only by a name that matches `^nccl.*Kernel`.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.files import check_writable, is_folder, write_atomically
from moesim.simulator.cost.table import Mode
from moesim.simulator.engine.program import NS
from moesim.simulator.engine.records import Execution, SendRecord
from moesim.simulator.schedules.template import SHARDING_PHASES

if TYPE_CHECKING:
    from moesim.simulator.predict.step import Prepared


# -- trace events ------------------------------------------------------------------------------------
# Builds the events of a trace: slices and thread names of one GPU, arrows between pipeline ranks (pure).

Event = dict[str, Any]

SCHEDULE, COMPUTE, COMMUNICATION, INSIDE, DATA_PARALLEL, SHARDING, FIRST_SEND = 0, 1, 2, 3, 4, 5, 8
"""Numbers of threads and of the streams on them; sends use FIRST_SEND and higher numbers."""

THREADS = {
    SCHEDULE: "schedule",
    COMPUTE: "compute stream",
    COMMUNICATION: "communication stream",
    INSIDE: "tensor and context parallel",
    SHARDING: "sharded parameters",
    DATA_PARALLEL: "data parallel",
}


class TraceInfo(Struct, frozen=True):
    """Data of the plan that a trace states in addition to times.

    `gpus[rank][member]`: global GPU number. `group_sizes`: members of the groups "ep", "model" (tp x cp),
    "dp" and "world". `elements`: numbers of elements that enter ("in") and leave ("out") a dispatch on one
    GPU (a combine is the reverse), and a pipeline "send". `notes`: written unchanged beside the events.
    """

    name: str
    gpus: tuple[tuple[int, ...], ...]
    group_sizes: Mapping[str, int]
    elements: Mapping[str, int]
    notes: Mapping[str, str | int] = field(default_factory=dict)


class ShownGpus(Struct, frozen=True):
    """The part of one group that a trace shows, as (pipeline rank, member) places of its execution."""

    execution: Execution
    info: TraceInfo
    places: tuple[tuple[int, int], ...]


def microseconds(ns: int) -> float:
    """`ns` in microseconds, rounded so that a reader which multiplies by 1000 and truncates gets `ns` back.

    Perfetto's importer truncates, and a slice that lost a nanosecond would no longer nest.
    """
    value = ns / 1000.0
    return value if int(value * 1000.0) == ns else math.nextafter(value, math.inf)


def name_events(gpu: int, rank: int, member: int, lanes: int, sharded: bool = False) -> list[Event]:
    """Metadata events that name and order a GPU's process and threads.

    `lanes` threads are for sends; with `sharded` there is one for the collectives of ZeRO-3.
    """
    threads = {**THREADS, **{FIRST_SEND + n: f"pipeline send {n}" for n in range(lanes)}}
    if not sharded:
        del threads[SHARDING]
    rows: list[tuple[int, str, Event]] = [
        (0, "process_name", {"name": f"GPU {gpu} (pipeline rank {rank}, member {member})"}),
        (0, "process_sort_index", {"sort_index": gpu}),
    ]
    for tid, name in threads.items():
        rows += [(tid, "thread_name", {"name": name}), (tid, "thread_sort_index", {"sort_index": tid})]
    return [{"ph": "M", "pid": gpu, "tid": tid, "name": what, "args": args} for tid, what, args in rows]


def send_lanes(sends: list[SendRecord]) -> list[tuple[SendRecord, int]]:
    """Sends of one rank, each with the first free lane, because sends may overlap and slices may not."""
    free: list[int] = []
    placed = []
    for send in sorted(sends, key=lambda s: (s.start, s.end, s.label)):
        lane = next((n for n, end in enumerate(free) if end <= send.start), len(free))
        free[lane:] = [send.end] if lane == len(free) else [send.end, *free[lane + 1 :]]
        placed.append((send, lane))
    return placed


class GpuEvents(Struct, frozen=True):
    """The events of one GPU."""

    execution: Execution
    info: TraceInfo
    rank: int
    member: int
    gpu: int

    def _slice(self, tid: int, name: str, begin: int, end: int, args: dict[str, Any]) -> Iterator[Event]:
        if end > begin:
            cat = "user_annotation" if tid == SCHEDULE else "kernel"
            start = microseconds(begin)
            event = {"ph": "X", "cat": cat, "name": name, "pid": self.gpu, "tid": tid, "ts": start}
            if tid != SCHEDULE:
                args = {"device": self.gpu, "stream": tid, **args}
            yield {**event, "dur": microseconds(end - begin), "args": args}

    def steps(self) -> Iterator[Event]:
        """Schedule actions and the tasks inside them."""
        table, times = self.execution.table, self.execution.times
        for action in range(*table.first_action[self.rank : self.rank + 2].tolist()):
            step = table.steps[action]
            stages = {"stage": step.stages, "microbatch": step.microbatches}
            sides = ("forward", "backward")
            args = {f"{s} {k}": v[i] for k, v in stages.items() for i, s in enumerate(sides) if v[i] >= 0}
            span = times.start.item(action, self.member), times.end.item(action, self.member)
            yield from self._slice(SCHEDULE, f"{step.code.kind} {step.label}", *span, args)
            yield from self._phases(action)

    def _phases(self, action: int) -> Iterator[Event]:
        """The tasks inside one schedule action, on their streams."""
        table, times, member = self.execution.table, self.execution.times, self.member
        step, first = table.steps[action], int(table.first_task[action])
        mode: Mode = "overlapped" if "&" in step.code.kind else "alone"
        ends = times.ends[first : first + len(step.code.tasks), member].tolist()
        for number, task in enumerate(step.code.tasks):
            microbatch, name, end = step.microbatches[task.side], task.phase.replace(" ", "_"), ends[number]
            row = task.rows_ns.item(microbatch, member)
            args: Event = {"stage": step.stages[task.side], "block": task.block, "microbatch": microbatch}
            if task.transfer is None:
                waits = min(row, round(task.price.exposed_s * NS))
                yield from self._slice(COMPUTE, f"{task.phase} ({task.kind})", end - row, end - waits, args)
                args |= {"Collective name": "allgather", "Group size": self.info.group_sizes["model"]}
                yield from self._slice(INSIDE, f"ncclDevKernel_{name}", end - waits, end, args)
                continue
            # The transfer can begin when its stream is free and its inputs are there.
            before = step.code.before[number]
            waits_for = task.deps if before is None else (*task.deps, before)
            ready = max([times.start.item(action, member), *(ends[n] for n in waits_for)])
            launch = min(end, times.begins.item(first + number) + task.transfer.launch_ns)
            args |= self._collective(task.phase)
            thread = SHARDING if task.stream == "sharding" else COMMUNICATION
            yield from self._slice(thread, f"ncclDevKernel_prepare_{name}", ready, ready + row, args)
            yield from self._slice(thread, f"ncclDevKernel_notify_{name}", ready + row, launch, args)
            price = self.execution.program.costs.transfer[task.kind, task.phase, mode]
            moved = {"nic bytes": round(price.nic_bytes), "scale-up bytes": round(price.scale_up_bytes)}
            yield from self._slice(thread, f"ncclDevKernel_{name}", launch, end, {**args, **moved})

    def _collective(self, phase: str) -> dict[str, Any]:
        sizes, elements = self.info.group_sizes, self.info.elements
        if phase.startswith(("gather", "scatter")):
            name = "allgather" if phase.startswith("gather") else "reduce_scatter"
            return {"Collective name": name, "Group size": sizes["dp"]}
        # The backward of a combine sends rows out again, as a dispatch does.
        out = phase in ("dispatch F", "combine B")
        return {
            "Collective name": "all_to_allv",
            "Group size": sizes["ep"],
            "In msg nelems": elements["in" if out else "out"],
            "Out msg nelems": elements["out" if out else "in"],
        }

    def sends(self, lanes: list[tuple[SendRecord, int]]) -> Iterator[Event]:
        """Activations and gradients to neighbouring pipeline ranks."""
        for send, lane in lanes:
            args = {
                "Collective name": "send",
                "Group size": 2,
                "In msg nelems": self.info.elements["send"],
                "Src Rank": self.gpu,
                "Dst Rank": self.info.gpus[send.target][self.member],
            }
            name = f"ncclDevKernel_SendRecv {send.label}"
            yield from self._slice(FIRST_SEND + lane, name, send.start, send.end, args)

    def end_of_step(self) -> Iterator[Event]:
        """Gradient reduction, norm, optimizer and parameter gather."""
        sync, sizes = self.execution.syncs[self.rank], self.info.group_sizes
        # Without a parameter gather every rank updated all parameters, so gradients were all-reduced.
        whole = sync.gather[1] == sync.gather[0]
        reduction = (
            ("AllReduce_gradients", "allreduce") if whole else ("ReduceScatter_gradients", "reduce_scatter")
        )
        parts = (
            (*reduction, "dp", sync.reduce),
            ("AllReduce_gradient_norm", "allreduce", "world", sync.norm),
            ("AllGather_parameters", "allgather", "dp", sync.gather),
        )
        for name, collective, group, (begin, end) in parts:
            args = {"Collective name": collective, "Group size": sizes[group]}
            yield from self._slice(DATA_PARALLEL, f"ncclDevKernel_{name}", begin, end, args)
        yield from self._slice(COMPUTE, "optimizer", *sync.optimizer, {})


def send_arrows(part: ShownGpus, first: int) -> Iterator[Event]:
    """Arrows, numbered after `first`, from shown pipeline sends to the shown actions that need them."""
    execution, info = part.execution, part.info
    ranks = sorted({rank for rank, _ in part.places})
    takers: dict[tuple[str, int, int], int] = {}  # actions that need an activation or a gradient
    for action, step in enumerate(execution.table.steps):
        (forward, backward), (fmb, bmb) = step.stages, step.microbatches
        if forward >= 0:
            takers["F", forward, fmb] = action
        if backward >= 0 and step.code.kind != "W":
            takers["B", backward, bmb] = action
    sends: defaultdict[int, list[SendRecord]] = defaultdict(list)
    for send in execution.sends:
        sends[send.source].append(send)
    number = first
    for source in ranks:
        for send, lane in send_lanes(sends[source]):
            # The next stage needs an activation such as "3F12", the previous one a gradient.
            kind = "F" if "F" in send.label else "B"
            stage, microbatch = map(int, send.label.split(kind))
            taker = takers.get((kind, stage + (1 if kind == "F" else -1), microbatch))
            if send.target not in ranks or taker is None or send.end <= send.start:
                continue
            for member in (m for r, m in part.places if r == source and (send.target, m) in part.places):
                number += 1
                for ph, rank, tid, ns in (
                    ("s", source, FIRST_SEND + lane, send.start),
                    ("f", send.target, SCHEDULE, execution.times.start.item(taker, member)),
                ):
                    place = {"pid": info.gpus[rank][member], "tid": tid, "ts": microseconds(ns)}
                    bind = {"bp": "e"} if ph == "f" else {}
                    yield {"ph": ph, "cat": "pipeline", "name": "pipeline", "id": number, **place, **bind}


EXTENSIONS = (".json", ".json.gz")


def trace_info(prepared: Prepared, group: int = 0) -> TraceInfo:
    """Plan data for the trace of a prepared scenario, or in full resolution of one of its groups."""
    layout, pricer, scenario = prepared.layout, prepared.pricer, prepared.scenario
    plan, members = scenario.parallel, prepared.program.members
    if prepared.whole is not None:
        gpus = [tuple(row) for row in prepared.whole.gpus[:, group].tolist()]
    else:
        firsts = [layout.rank(rank, 0, 0, 0) for rank in range(plan.pp)]
        gpus = [
            tuple((layout.ep_group(first) if plan.ep > 1 else layout.dp_group(first))[:members])
            for first in firsts
        ]
    hidden = prepared.shape.routed_width
    sent = round(pricer.ep_tokens * hidden)
    return TraceInfo(
        name=scenario.name,
        gpus=tuple(gpus),
        group_sizes={"ep": plan.ep, "model": plan.tp * plan.cp, "dp": layout.dp, "world": layout.n_gpus},
        elements={
            "in": sent,
            "out": round(pricer.received_rows * hidden),
            "send": sent * prepared.shape.residual_streams,
        },
        notes={"seed": scenario.seed, "profile": prepared.profile.name},
    )


def shown_places(
    execution: Execution, info: TraceInfo, ranks: Sequence[int] | None = None, members: Sequence[int] = (0,)
) -> list[ShownGpus]:
    """GPUs of a folded run that a trace shows: `ranks` (default all), and `members` of each by position.

    Raises InputError for a rank or member that does not exist.
    """
    count = len(execution.program.ranks)
    who = _chosen("members", members, execution.program.members)
    places = [(r, m) for r in _chosen("ranks", range(count) if ranks is None else ranks, count) for m in who]
    return [ShownGpus(execution, info, tuple(places))]


def shown_gpus(
    prepared: Prepared, executions: Sequence[Execution], gpus: Sequence[int] | None = None
) -> list[ShownGpus]:
    """GPUs of a full run that a trace shows, by global number; by default one pipeline of the first group.

    Raises InputError for a GPU that does not exist or did not run.
    """
    whole = prepared.whole
    assert whole is not None
    wanted = whole.gpus[:, whole.running[0], 0].tolist() if gpus is None else gpus
    where = {
        gpu: (group, rank, member)
        for group in whole.running
        for rank, row in enumerate(whole.gpus[:, group].tolist())
        for member, gpu in enumerate(row)
    }
    wrong = [gpu for gpu in wanted if gpu not in where]
    if wrong or not wanted:
        lost = " that is not lost" if len(whole.running) < whole.gpus.shape[1] else ""
        wrong_gpu = wrong[0] if wrong else "none"
        raise InputError(f"trace of ranks={wrong_gpu}: give a GPU from 0 to {whole.gpus.size - 1}{lost}")
    shown = []
    for number, group in enumerate(whole.running):
        places = sorted({where[gpu][1:] for gpu in wanted if where[gpu][0] == group})
        if places:
            shown.append(ShownGpus(executions[number], trace_info(prepared, group), tuple(places)))
    return shown


def chrome_trace(shown: Sequence[ShownGpus]) -> dict[str, Any]:
    """The trace as one JSON object (Trace Event Format; ts and dur in microseconds).

    The events after the metadata are in order of time.
    """
    metadata: list[Event] = []
    events: list[Event] = []
    arrows = 0
    for part in shown:
        execution, info = part.execution, part.info
        lanes = {
            rank: send_lanes([send for send in execution.sends if send.source == rank])
            for rank in {rank for rank, _ in part.places}
        }
        for rank, member in part.places:
            gpu, own = info.gpus[rank][member], lanes[rank]
            sharded = bool(SHARDING_PHASES & {phase for _, phase, _ in execution.program.costs.transfer})
            sends = 1 + max((lane for _, lane in own), default=-1)
            metadata += name_events(gpu, rank, member, sends, sharded)
            gpu_events = GpuEvents(execution, info, rank, member, gpu)
            events += [*gpu_events.steps(), *gpu_events.sends(own), *gpu_events.end_of_step()]
        arrow_events = list(send_arrows(part, arrows))
        arrows += len(arrow_events) // 2
        events += arrow_events
    events.sort(key=lambda e: (e["ts"], e["pid"], e["tid"], -e.get("dur", 0.0)))
    kernels = (e for e in events if e.get("cat") == "kernel")
    for number, event in enumerate(kernels):
        event["args"]["correlation"] = number
    info = shown[0].info
    rank, member = shown[0].places[0]
    distributed = {
        "backend": "nccl",
        "rank": info.gpus[rank][member],
        "world_size": info.group_sizes["world"],
    }
    return {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": 0,
        "distributedInfo": distributed,
        "traceName": info.name,
        "moesim": dict(info.notes),
        "traceEvents": metadata + events,
    }


def write_trace(path: str | Path, shown: Sequence[ShownGpus]) -> None:
    """Write `chrome_trace` to a .json or .json.gz file atomically, with equal bytes for equal runs.

    Raises InputError for another extension and for a missing folder.
    """
    trace = chrome_trace(shown)
    write_events(
        trace_path(path), {key: trace[key] for key in trace if key != "traceEvents"}, trace["traceEvents"]
    )


def write_events(path: Path, head: Mapping[str, Any], events: Iterable[Event]) -> None:
    """Write a trace, one event a line, so that traces can be compared line by line; `head` stands before."""
    encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode

    def chunks() -> Iterator[str]:
        # HTA finds the rank by the text `"rank": 0`, including the blank; without it every file is rank 0.
        yield json.dumps(head)[:-1] + ', "traceEvents":[\n'
        separator, rest = "", iter(events)
        while part := list(islice(rest, 4096)):
            yield separator + ",\n".join(map(encode, part))
            separator = ",\n"
        yield "\n]}\n"

    write_atomically(path, chunks())


def check_trace_folder(folder: Path) -> None:
    """Raise InputError where the folder of traces is a file, or where no folder can have its name."""
    try:
        exists = folder.exists()
    except (OSError, ValueError) as error:
        raise InputError(f"trace folder {str(folder)[:80]}: cannot be a folder: {error}") from None
    if exists and not is_folder(folder):
        raise InputError(f"trace folder {str(folder)[:80]}: this is a file; give a folder")


def trace_path(path: str | Path) -> Path:
    """`path` if a trace can be written there; otherwise raises InputError with the legal extensions."""
    path = Path(path)
    if not path.name.lower().endswith(EXTENSIONS):
        raise InputError(f"trace file {path}: unknown extension; use {' or '.join(EXTENSIONS)}")
    check_writable(path, "trace file")
    return path


def _chosen(what: str, numbers: Sequence[int], count: int) -> list[int]:
    wrong = [n for n in numbers if not 0 <= n < count]
    if wrong or not numbers:
        legal = f"only {what[:-1]} 0" if count == 1 else f"{what} 0 to {count - 1}"
        raise InputError(f"trace of {what}={wrong[0] if wrong else 'none'}: the result has {legal}")
    return sorted(set(numbers))
