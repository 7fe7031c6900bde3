"""Compact tables of a profiled step and of the allocator's history (pure Python, no torch)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

GPU = ("kernel", "gpu_memcpy", "gpu_memset")
MIB = 2**20
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Upper limits (MiB) of the classes of sizes; larger blocks are in the last class."""


def kernel_table(events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Kernels of a Chrome trace by name and stream, busy time, waits of the host, and every kernel's place.

    Times are in seconds; `list` has start and duration in microseconds, stream, and index into `names`.
    """
    on_gpu = sorted((e for e in events if e.get("cat") in GPU), key=lambda e: float(e["ts"]))
    if not on_gpu:
        return {"gpu_events": 0}
    names: dict[str, int] = {}
    sums: dict[tuple[str, int], list[float]] = defaultdict(lambda: [0.0, 0.0])
    rows, start = [], float(on_gpu[0]["ts"])
    for event in on_gpu:
        name, stream = str(event["name"])[:300], int(event["args"].get("stream", -1))
        index = names.setdefault(name, len(names))
        total = sums[name, stream]
        total[0] += float(event["dur"]) * 1e-6
        total[1] += 1
        rows.append([round(float(event["ts"]) - start, 2), round(float(event["dur"]), 2), stream, index])
    host: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for event in events:
        if event.get("cat") in ("cuda_runtime", "cuda_driver"):
            host[str(event["name"])][0] += float(event["dur"]) * 1e-6
            host[str(event["name"])][1] += 1
    span = max(float(e["ts"]) + float(e["dur"]) for e in on_gpu) - start
    return {
        "gpu_events": len(on_gpu),
        "span_s": span * 1e-6,
        "busy_s": busy_s(on_gpu),
        "busy_without_nccl_s": busy_s([e for e in on_gpu if "nccl" not in str(e["name"]).lower()]),
        "by_name": [
            {"name": name, "stream": stream, "seconds": total[0], "count": int(total[1])}
            for (name, stream), total in sorted(sums.items(), key=lambda item: -item[1][0])
        ],
        "host_calls": {name: {"seconds": v[0], "count": int(v[1])} for name, v in host.items()},
        "names": list(names),
        "list": rows,
    }


def busy_s(events: Iterable[Mapping[str, Any]]) -> float:
    """Seconds in which at least one of the events ran."""
    total, until = 0.0, 0.0
    for start, end in sorted((float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in events):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total * 1e-6


def operators_of_kernels(events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Seconds and number of kernels by operator with its input shapes, thread, kernel and stream.

    The thread is `main` for that of the first operator and `autograd` for any other.
    """
    operators = sorted((e for e in events if e.get("cat") == "cpu_op"), key=lambda e: float(e["ts"]))
    main = operators[0].get("tid") if operators else None
    named: dict[Any, tuple[str, str, str]] = {}
    for event in operators:
        args = event.get("args", {})
        shapes = str(args.get("Input Dims", "")).replace(" ", "")[:120]
        thread = "main" if event.get("tid") == main else "autograd"
        named[args.get("External id")] = (str(event["name"]), shapes, thread)
    sums: dict[tuple[str, str, str, str, int], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for event in events:
        if event.get("cat") in GPU:
            args = event["args"]
            operator = named.get(args.get("External id"), ("?", "", ""))
            key = (*operator, str(event["name"])[:160], int(args.get("stream", -1)))
            sums[key][0] += float(event["dur"]) * 1e-6
            sums[key][1] += 1
    fields = ("operator", "shapes", "thread", "kernel", "stream")
    rows = sorted(sums.items(), key=lambda item: -item[1][0])
    return {
        "by_operator": [
            {**dict(zip(fields, key, strict=True)), "seconds": total[0], "count": int(total[1])}
            for key, total in rows
        ]
    }


def size_class(size: float) -> str:
    """Class of a block by its bytes, as an upper limit in MiB."""
    for limit in SIZES:
        if size <= limit * MIB:
            return f"<={limit}MiB"
    return f">{SIZES[-1]}MiB"


def memory_at_peak(after: Mapping[str, Any], before: Mapping[str, Any], device: int = 0) -> dict[str, Any]:
    """Active bytes by class of size and stream at a step's peak, and segments by stream after it.

    `before` and `after` are snapshots of PyTorch's allocator around the step; `after` has its events.
    """
    live = {
        block["address"]: (block["size"], segment["stream"])
        for segment in before["segments"]
        if segment.get("device", device) == device
        for block in segment["blocks"]
        if block["state"] != "inactive"
    }
    start = current = sum(size for size, _ in live.values())
    peak, at_peak, unknown, place = current, dict(live), 0, 0
    traces = after["device_traces"]
    trace = traces[device] if device < len(traces) else []
    actions: dict[str, int] = defaultdict(int)
    for index, event in enumerate(trace):
        actions[event["action"]] += 1
        if event["action"] == "alloc":
            live[event["addr"]] = (event["size"], event.get("stream", 0))
            current += event["size"]
        elif event["action"] == "free_completed":
            size, _ = live.pop(event["addr"], (0, 0))
            unknown += not size
            current -= size
        if current > peak:
            peak, at_peak, place = current, dict(live), index
    segments: dict[str, list[float]] = defaultdict(lambda: [0, 0, 0, 0])
    for segment in after["segments"]:
        if segment.get("device", device) == device:
            entry = segments[f"{segment['stream']}/{size_class(segment['total_size'])}"]
            entry[0] += 1
            entry[1] += segment["total_size"]
            entry[2] += segment["active_size"]
    return {
        "start_bytes": start,
        "peak_bytes": peak,
        "peak_at": [place, len(trace)],
        "unknown_frees": unknown,
        "actions": dict(actions),
        "active_at_peak": _by_class(at_peak.values()),
        "segments_after": {
            key: {"segments": int(v[0]), "bytes": v[1], "active_bytes": v[2]} for key, v in segments.items()
        },
    }


def _by_class(blocks: Iterable[tuple[int, Any]]) -> dict[str, dict[str, float]]:
    out: dict[str, dict[str, float]] = {}
    for size, stream in blocks:
        entry = out.setdefault(f"{stream}/{size_class(size)}", {"blocks": 0, "bytes": 0})
        entry["blocks"] += 1
        entry["bytes"] += size
    return out
