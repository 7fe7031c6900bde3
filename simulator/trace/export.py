"""Writes a step for tools of others: as Kineto JSON for HTA and TraceLens, as Chakra execution traces.

Kineto: every kernel has the operator and the call that launched it, as much before it as a host is ahead, so
that the tools build their trees. A kernel's name begins with what these tools know kernels by, and goes on
with `moesim::CLASS::OPERATOR`, by which our own reader finds its class. HTA 0.5 recognises communication only
by names that match `^nccl.*Kernel`, so those of expert libraries begin so too. Chakra: `chakra_export`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from moesim.hwmodels.arrays import RecordArray
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.files import write_atomically
from moesim.simulator.predict.trace import check_trace_folder, microseconds, trace_path, write_events
from moesim.simulator.trace.chakra_export import chakra_files
from moesim.simulator.trace.classes import CLASSES, COMMUNICATION
from moesim.simulator.trace.events import MEMCPY, MEMSET, PHASES, Comm, Raw
from moesim.simulator.trace.predicted import START_NS, predicted_trace
from moesim.simulator.trace.read import RankTrace, StepTrace

if TYPE_CHECKING:
    from moesim.simulator.predict.step import ExecutedStep

Form = Literal["kineto", "chakra"]
FORMS: tuple[Form, ...] = ("kineto", "chakra")
HOST_AHEAD_NS, CALL_NS = START_NS, 4_000
"""How long before its kernel a call is made that nothing delays, and how long an operator's call lasts."""
HOST_PID = 1_000_000

_OPS = {
    "gemm": "aten::mm", "wgrad_gemm": "aten::mm", "gate_gemm": "aten::mm",
    "grouped_gemm": "aten::_grouped_mm",
    "attention_forward": "aten::_efficient_attention_forward",
    "attention_backward": "aten::_efficient_attention_backward",
}  # fmt: skip
"""Operators that TraceLens sorts as GEMM and attention; others are called `moesim::CLASS`."""
_KERNELS = {
    "gemm": "gemm", "wgrad_gemm": "gemm", "gate_gemm": "gemm", "grouped_gemm": "grouped_gemm",
    "attention_forward": "flash_fwd", "attention_backward": "flash_bwd", "norm": "rms_norm",
}  # fmt: skip
_NCCL = {
    "all_reduce": ("AllReduce", "allreduce"), "all_gather": ("AllGather", "_allgather_base"),
    "reduce_scatter": ("ReduceScatter", "_reduce_scatter_base"), "all_to_all": ("SendRecv", "all_to_allv"),
    "broadcast": ("Broadcast", "broadcast"), "send_recv": ("SendRecv", "send"),
    "ep_dispatch": ("SendRecv", "all_to_allv"), "ep_combine": ("SendRecv", "all_to_allv"),
    "ep_notify": ("AllReduce", "barrier"), "other_communication": ("Generic", "other"),
}  # fmt: skip
"""Name of NCCL's kernel and of PyTorch's collective for each class of communication."""


def export_step(
    step: ExecutedStep, to: str | Path, form: str, ranks: Sequence[int] | None = None,
    said: Callable[[str], None] = lambda text: None,
) -> list[Path]:  # fmt: skip
    """Write an executed step, a file a GPU, and return the paths.

    `to`: a file, where one GPU is written, else a folder, which is made. `ranks`: numbers of GPUs, by default
    the first of every pipeline rank. Raises InputError for an unknown form, a fleet, a GPU that the cluster
    does not have, and where the files cannot be written.
    """
    place = Path(to)
    check_target(place, form)
    trace = predicted_trace(step, ranks)
    said(f"writing {len(trace.ranks)} ranks to {place.name}")
    if form == "chakra":
        return _written(place, chakra_files(step, trace, _stem(place)), ".et")
    return write_kineto(trace, place)


def check_target(place: Path, form: str) -> None:
    """Raise InputError for an unknown form, and for a place where its files cannot be."""
    if form not in FORMS:
        raise InputError(f"form {form!r}: a step is exported as {' or '.join(FORMS)}")
    other = (".et",) if form == "kineto" else (".json", ".json.gz")
    if place.name.lower().endswith(other):
        kind = "JSON (.json or .json.gz)" if form == "kineto" else "an execution trace (.et)"
        raise InputError(f"{place}: {form} is written as {kind}; give such a name, or a folder")
    if not _is_file(place):
        check_trace_folder(place)


def _is_file(place: Path) -> bool:
    return place.name.lower().endswith((".json", ".json.gz", ".et"))


def _stem(place: Path) -> str:
    return place.name.partition(".")[0] if _is_file(place) else "step"


def _written(place: Path, files: dict[str, bytes], ending: str) -> list[Path]:
    """Write files by name into a folder, or the only one of this ending under the name that was given."""
    if _is_file(place):
        own = [name for name in files if name.endswith(ending)]
        if len(own) > 1:
            raise InputError(f"{place}: {len(own)} ranks need a folder; give one, or one rank")
        write_atomically(place, iter([files[own[0]]]))
        return [place]
    folder = _made(place)
    for name, data in files.items():
        write_atomically(folder / name, iter([data]))
    return [folder / name for name in files]


def _made(folder: Path) -> Path:
    check_trace_folder(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"folder {folder}: cannot be created: {error.strerror or error}") from None
    return folder


# -- Kineto ------------------------------------------------------------------------------------------


def write_kineto(trace: StepTrace, place: Path) -> list[Path]:
    """Write a trace as Kineto JSON: one rank to a file, else `rank-NNNNN.json.gz` in a folder."""
    if _is_file(place):
        if len(trace.ranks) > 1:
            raise InputError(f"{place}: {len(trace.ranks)} ranks need a folder; give one, or one rank")
        paths = [trace_path(place)]
    else:
        folder = _made(place)
        paths = [folder / f"rank-{rank.raw.rank:05d}.json.gz" for rank in trace.ranks]
    for path, rank in zip(paths, trace.ranks, strict=True):
        write_events(path, kineto_head(trace, rank), kineto_events(rank))
    return paths


def kineto_head(trace: StepTrace, rank: RankTrace) -> dict[str, Any]:
    """What stands before the events: rank, world, process groups and GPUs of the node."""
    raw = rank.raw
    groups = {comm.group: comm for comm in raw.comms if comm.group and comm.ranks}
    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": n, "name": raw.gpu} for n in range(max(raw.gpus_per_node, 1))],
        "distributedInfo": {
            "backend": "nccl", "rank": raw.rank, "world_size": raw.world, "pg_count": len(groups),
            "pg_config": [
                {"pg_name": name, "pg_desc": name, "pg_size": comm.size, "ranks": list(comm.ranks)}
                for name, comm in groups.items()
            ],
        },
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": 0,
        "traceName": trace.source,
        "moesim": list(trace.notes),
    }  # fmt: skip


def kineto_events(rank: RankTrace) -> Iterator[dict[str, Any]]:
    """The events of one rank: names, the step, and for every kernel its operator, call and flow."""
    raw, events = rank.raw, rank.events[np.argsort(rank.events["start"], kind="stable")]
    device = max(raw.rank, 0) % max(raw.gpus_per_node, 1)
    yield from _metadata(raw, device, sorted(set(events["stream"].tolist())))
    calls, lasts = host_calls(events)
    for step in rank.steps:
        begin = 0 if len(rank.steps) == 1 else step["start_ns"] - HOST_AHEAD_NS
        end = max(step["start_ns"] + step["wall_ns"], calls[-1] + lasts[-1])
        name = f"ProfilerStep#{step['number']}"
        yield _span("user_annotation", name, HOST_PID, HOST_PID, begin, end)
    yield from _phases(events, calls, lasts)
    columns = ("start", "end", "stream", "cls", "name", "activity", "comm", "bytes", "shape")
    rows = zip(*(events[column].tolist() for column in columns), strict=True)
    for number, (row, call, last) in enumerate(zip(rows, calls, lasts, strict=True), 1):
        start, end, stream, cls, name, activity, comm, size, shape = row
        kind, label = CLASSES[cls], raw.names[name] if name >= 0 else CLASSES[cls]
        said = _said(raw.comms[comm], kind, raw.rank) if comm >= 0 else {}
        dims = _dims(raw.names[shape]) if shape >= 0 else {}
        op = _OPS.get(kind, "record_param_comms" if kind in COMMUNICATION else f"moesim::{kind}")
        yield _span(
            "cpu_op", op, HOST_PID, HOST_PID, call, call + last, {"External id": number, **said, **dims}
        )
        inner = {"External id": number, "correlation": number}
        api = "cudaMemcpyAsync" if activity == MEMCPY else "cudaLaunchKernel"
        yield _span("cuda_runtime", api, HOST_PID, HOST_PID, call, call + max(last // 2, 1), inner)
        flow = {"id": number, "cat": "ac2g", "name": "ac2g"}
        yield {"ph": "s", "pid": HOST_PID, "tid": HOST_PID, "ts": microseconds(call), **flow}
        yield {"ph": "f", "pid": device, "tid": stream, "ts": microseconds(start), "bp": "e", **flow}
        cat = {MEMCPY: "gpu_memcpy", MEMSET: "gpu_memset"}.get(activity, "kernel")
        args = {**inner, "device": device, "stream": stream, **({"bytes": size} if size >= 0 else {}), **said}
        yield _span(cat, kernel_name(label, kind, activity), device, stream, start, end, args)


def kernel_name(name: str, kind: str, activity: int = 0) -> str:
    """A name that HTA and TraceLens sort as they should, and from which our reader takes the class."""
    if activity in (MEMCPY, MEMSET) or "moesim::" in name:
        return name
    begin = f"ncclDevKernel_{_NCCL[kind][0]}" if kind in COMMUNICATION else _KERNELS.get(kind, kind)
    return f"{begin} moesim::{kind}::{name}"


def host_calls(events: RecordArray) -> tuple[list[int], list[int]]:
    """When the call of each event begins and how long it lasts, in nanoseconds; one thread, in order.

    A call is HOST_AHEAD_NS before what its kernel waited for on the GPU, and where the host was late (a
    `launch` that is known) at that launch. Calls never begin after their kernels.
    """
    starts, launches = events["start"].tolist(), events["launch"].tolist()
    reached = np.maximum.accumulate(events["end"]).tolist()
    latest, bound = [0] * len(starts), 1 << 62
    for n in range(len(starts) - 1, -1, -1):
        bound = latest[n] = min(starts[n], bound - 1)
    calls: list[int] = []
    for n, (start, launch) in enumerate(zip(starts, launches, strict=True)):
        busy_until = min(start, reached[n - 1]) if n else start
        wanted = launch if launch > 0 else busy_until - HOST_AHEAD_NS
        after = 0 if not calls else calls[-1] + (1 if launch > 0 else CALL_NS)
        calls.append(min(max(wanted, after, 0), latest[n]))
    # A little shorter than the distance to the next call, so that rounded times do not overlap.
    lasts = [
        max(1, min(CALL_NS, (after - call) * 3 // 4))
        for call, after in zip(calls, [*calls[1:], 1 << 62], strict=True)
    ]
    return calls, lasts


def _phases(events: RecordArray, calls: list[int], lasts: list[int]) -> Iterator[dict[str, Any]]:
    """Annotations of the host's thread: phase, layer and micro-batch of the calls inside."""
    keys = list(zip(*(events[key].tolist() for key in ("phase", "layer", "microbatch")), strict=True))
    first = 0
    for n in range(1, len(keys) + 1):
        if n < len(keys) and keys[n] == keys[first]:
            continue
        phase, layer, microbatch = keys[first]
        text = f"moesim::phase::{PHASES[phase]}"
        text += f" layers.{layer}" * (layer >= 0) + f" micro-batch {microbatch}" * (microbatch >= 0)
        if phase:
            yield _span(
                "user_annotation", text, HOST_PID, HOST_PID, calls[first], calls[n - 1] + lasts[n - 1]
            )
        first = n


def _span(
    cat: str, name: str, pid: int, tid: int, begin: int, end: int, args: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {
        "ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": microseconds(begin),
        "dur": microseconds(end - begin), "args": args or {},
    }  # fmt: skip


def _metadata(raw: Raw, device: int, streams: list[int]) -> Iterator[dict[str, Any]]:
    rows: list[tuple[int, int, str, dict[str, Any]]] = [
        (HOST_PID, 0, "process_name", {"name": "python"}),
        (HOST_PID, 0, "process_labels", {"labels": "CPU"}),
        (HOST_PID, HOST_PID, "thread_name", {"name": "host"}),
        (device, 0, "process_name", {"name": f"rank {raw.rank}"}),
        (device, 0, "process_labels", {"labels": f"GPU {device}"}),
        *((device, stream, "thread_name", {"name": f"stream {stream}"}) for stream in streams),
    ]
    for pid, tid, what, args in rows:
        yield {"ph": "M", "pid": pid, "tid": tid, "ts": 0.0, "name": what, "args": args}


def _said(comm: Comm, kind: str, rank: int) -> dict[str, Any]:
    """What a profiler says of a collective; sizes in bytes, whose type the table does not hold."""
    sizes = [max(size, 0) for size in (comm.bytes_in, comm.bytes_out)]
    said: dict[str, Any] = {
        "Collective name": _NCCL[kind][1] if kind in _NCCL else comm.kind, "dtype": "Byte",
        "In msg nelems": sizes[0], "Out msg nelems": sizes[1], "Group size": comm.size,
        "Process Group Name": comm.group, "Process Group Description": comm.group, "Rank": rank,
    }  # fmt: skip
    if comm.ranks:
        said["Process Group Ranks"] = json.dumps(list(comm.ranks))
    return said


def _dims(shape: str) -> dict[str, Any]:
    """The sizes of a GEMM's operands from a shape such as "8 of 4096x512x128"."""
    batch, _, sizes = shape.rpartition(" of ")
    m, n, k = (int(size) for size in sizes.split("x"))
    more = [int(batch)] if batch else []
    return {"Input Dims": [[*more, m, k], [*more, k, n]], "Input type": ["", ""]}
