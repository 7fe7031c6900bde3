"""Chrome/Perfetto traces of an execution, with kernel names that Holistic Trace Analysis (HTA) classifies.

A trace has one process a GPU (a member of a pipeline rank) and one thread a stream, so that the slices of a
thread nest; schedule actions have their own thread. The name of every communication kernel begins with
`ncclDevKernel_`, because HTA 0.5 recognises such a kernel only by a name that matches `^nccl.*Kernel`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.files import check_writable, is_folder, write_atomically
from moesim.simulator.engine.records import Execution
from moesim.simulator.predict.trace_events import (
    Event,
    GpuEvents,
    ShownGpus,
    TraceInfo,
    name_events,
    send_arrows,
    send_lanes,
)
from moesim.simulator.schedules.template import SHARDING_PHASES

if TYPE_CHECKING:
    from moesim.simulator.predict.prepared import Prepared

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
    count = len(execution.ranks)
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
        found = wrong[0] if wrong else "none"
        raise InputError(f"trace of ranks={found}: give a GPU from 0 to {whole.gpus.size - 1}{lost}")
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
    path = trace_path(path)
    write_atomically(path, _chunks(chrome_trace(shown)))


def check_trace_folder(folder: Path) -> None:
    """Raise InputError where the folder of traces is a file, or where no folder can have its name."""
    try:
        exists = folder.exists()
    except (OSError, ValueError) as error:
        raise InputError(f"trace folder {str(folder)[:80]}: cannot be a folder: {error}") from None
    if exists and not is_folder(folder):
        raise InputError(f"trace folder {str(folder)[:80]}: this is a file; give a folder")


def write_trace_per_gpu(folder: str | Path, shown: Sequence[ShownGpus]) -> list[Path]:
    """Write one `rank-NNNNN.json.gz` a GPU, the layout that Holistic Trace Analysis reads; return the paths.

    A missing folder is created. Raises InputError as `write_trace` does, and where the folder cannot be made.
    """
    folder = Path(folder)
    check_trace_folder(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"trace folder {folder}: cannot be created: {error.strerror or error}") from None
    written = []
    for part in shown:
        for rank, member in part.places:
            path = folder / f"rank-{part.info.gpus[rank][member]:05d}.json.gz"
            write_trace(path, [ShownGpus(part.execution, part.info, ((rank, member),))])
            written.append(path)
    return written


def trace_path(path: str | Path) -> Path:
    """`path` if a trace can be written there; otherwise raises InputError with the legal extensions."""
    path = Path(path)
    if not path.name.lower().endswith(EXTENSIONS):
        raise InputError(f"trace file {path}: unknown extension; use {' or '.join(EXTENSIONS)}")
    check_writable(path, "trace file")
    return path


def _chunks(trace: dict[str, Any]) -> Iterator[str]:
    """JSON text with one event a line, so that traces can be compared line by line."""
    encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
    head = {key: value for key, value in trace.items() if key != "traceEvents"}
    # HTA finds the rank by the text `"rank": 0`, including the blank; without it every file is rank 0.
    yield json.dumps(head)[:-1] + ', "traceEvents":[\n'
    events: list[Event] = trace["traceEvents"]
    for start in range(0, len(events), 4096):
        part = ",\n".join(encode(event) for event in events[start : start + 4096])
        yield part + (",\n" if start + 4096 < len(events) else "\n")
    yield "]}\n"


def _chosen(what: str, numbers: Sequence[int], count: int) -> list[int]:
    wrong = [n for n in numbers if not 0 <= n < count]
    if wrong or not numbers:
        legal = f"only {what[:-1]} 0" if count == 1 else f"{what} 0 to {count - 1}"
        raise InputError(f"trace of {what}={wrong[0] if wrong else 'none'}: the result has {legal}")
    return sorted(set(numbers))
