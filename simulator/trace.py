"""Chrome/Perfetto traces of an execution, named so that Holistic Trace Analysis classifies them.

One process a GPU (a member of a pipeline rank), one thread a stream, so that slices of a thread nest;
schedule actions have a thread of their own. Everything that communicates is called `ncclDevKernel_...`:
HTA 0.5 takes a kernel for communication only when its name matches `^nccl.*Kernel`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.files import check_writable, write_atomically
from moesim.simulator.engine.execute import Execution
from moesim.simulator.trace_events import Event, GpuEvents, TraceInfo, flows, names, send_lanes

if TYPE_CHECKING:
    from moesim.simulator.prepare import Prepared

EXTENSIONS = (".json", ".json.gz")


def trace_info(prepared: Prepared) -> TraceInfo:
    """The trace's description of a prepared scenario."""
    layout, pricer, scenario = prepared.layout, prepared.pricer, prepared.scenario
    plan, members = scenario.parallel, prepared.program.members
    gpus = []
    for rank in range(plan.pp):
        first = layout.rank(rank, 0, 0, 0)
        group = layout.ep_group(first) if plan.ep > 1 else layout.dp_group(first)
        gpus.append(tuple(group[:members]))
    hidden = prepared.shape.hidden
    sent = round(pricer.ep_tokens * hidden)
    return TraceInfo(
        name=scenario.name,
        gpus=tuple(gpus),
        group_sizes={"ep": plan.ep, "model": plan.tp * plan.cp, "dp": layout.dp, "world": layout.n_gpus},
        elements={"in": sent, "out": round(pricer.received_rows * hidden), "send": sent},
        notes={"seed": scenario.seed, "profile": prepared.profile.name},
    )


def chrome_trace(
    execution: Execution, info: TraceInfo, ranks: Sequence[int] | None = None, members: Sequence[int] = (0,)
) -> dict[str, Any]:
    """The trace as one JSON object (Trace Event Format; ts and dur in microseconds).

    `ranks`: pipeline ranks, all by default; `members`: GPUs of each, by position in the expert-parallel
    group. Complete events come in order of time. Raises InputError for a rank or member that is not there.
    """
    shown, who = _shown(execution, ranks, members)
    metadata: list[Event] = []
    events: list[Event] = []
    for rank in shown:
        lanes = send_lanes([send for send in execution.sends if send.source == rank])
        for member in who:
            gpu = info.gpus[rank][member]
            metadata += names(gpu, rank, member, 1 + max((lane for _, lane in lanes), default=-1))
            found = GpuEvents(execution, info, rank, member, gpu)
            events += [*found.steps(), *found.sends(lanes), *found.end_of_step()]
    events += flows(execution, info, shown, who)
    events.sort(key=lambda e: (e["ts"], e["pid"], e["tid"], -e.get("dur", 0.0)))
    kernels = (e for e in events if e.get("cat") == "kernel")
    for number, event in enumerate(kernels):
        event["args"]["correlation"] = number
    first = info.gpus[shown[0]][who[0]]
    return {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": 0,
        "distributedInfo": {"backend": "nccl", "rank": first, "world_size": info.group_sizes["world"]},
        "traceName": info.name,
        "moesim": dict(info.notes),
        "traceEvents": metadata + events,
    }


def write_trace(
    path: str | Path,
    execution: Execution,
    info: TraceInfo,
    ranks: Sequence[int] | None = None,
    members: Sequence[int] = (0,),
) -> None:
    """Write `chrome_trace` to a .json or .json.gz file: complete or not at all, equal bytes for equal runs.

    Raises InputError for another extension, a missing folder, and as `chrome_trace` does.
    """
    path = trace_path(path)
    write_atomically(path, _chunks(chrome_trace(execution, info, ranks, members)))


def write_trace_per_gpu(
    folder: str | Path,
    execution: Execution,
    info: TraceInfo,
    ranks: Sequence[int] | None = None,
    members: Sequence[int] = (0,),
) -> list[Path]:
    """Write one `rank-NNNNN.json.gz` a GPU, the layout that Holistic Trace Analysis reads; return the paths.

    The folder must exist. Raises InputError as `write_trace` does.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"trace folder {folder}: does not exist; create it first")
    written = []
    shown, who = _shown(execution, ranks, members)
    for rank in shown:
        for member in who:
            path = folder / f"rank-{info.gpus[rank][member]:05d}.json.gz"
            write_trace(path, execution, info, [rank], [member])
            written.append(path)
    return written


def trace_path(path: str | Path) -> Path:
    """`path` if a trace can be written there; raises InputError naming the legal extensions otherwise."""
    path = Path(path)
    if not path.name.lower().endswith(EXTENSIONS):
        raise InputError(f"trace file {path}: unknown extension; use {' or '.join(EXTENSIONS)}")
    check_writable(path, "trace file")
    return path


def _chunks(trace: dict[str, Any]) -> Iterator[str]:
    """JSON text with one event a line, so that two traces can be compared line by line."""
    encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
    head = {key: value for key, value in trace.items() if key != "traceEvents"}
    # HTA finds the rank by the text `"rank": 0`, blank included; without it every file is rank 0.
    yield json.dumps(head)[:-1] + ', "traceEvents":[\n'
    events: list[Event] = trace["traceEvents"]
    for start in range(0, len(events), 4096):
        part = ",\n".join(encode(event) for event in events[start : start + 4096])
        yield part + (",\n" if start + 4096 < len(events) else "\n")
    yield "]}\n"


def _shown(
    execution: Execution, ranks: Sequence[int] | None, members: Sequence[int]
) -> tuple[list[int], list[int]]:
    count = len(execution.ranks)
    every = range(count) if ranks is None else ranks
    return _chosen("ranks", every, count), _chosen("members", members, execution.program.members)


def _chosen(what: str, numbers: Sequence[int], count: int) -> list[int]:
    wrong = [n for n in numbers if not 0 <= n < count]
    if wrong or not numbers:
        legal = f"only {what[:-1]} 0" if count == 1 else f"{what} 0 to {count - 1}"
        raise InputError(f"trace of {what}={wrong[0] if wrong else 'none'}: the result has {legal}")
    return sorted(set(numbers))
