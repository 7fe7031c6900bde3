"""What a step was made of, from attributed events: busy and idle time, classes, gaps, collectives.

Every figure is in nanoseconds and of one rank. Idle time is split by its cause so that the parts add up to it
exactly; communication is split into transfer and waiting only where at least two ranks hold the same
collective.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from moesim.hwmodels.arrays import IntArray, RecordArray
from moesim.simulator.trace.attribute import Attributed
from moesim.simulator.trace.classes import CLASSES, COMMUNICATION, COPIES, NOT_IN_MODEL, UNCLASSIFIED
from moesim.simulator.trace.events import (
    CALL,
    KERNEL,
    MEMCPY,
    OVERHEAD,
    PHASES,
    Raw,
    covered,
    union,
)  # fmt: skip

LATE_NS = 1_000
"""A gap is launch-bound where the next kernel's launch began less than this before the gap, or after."""
_COMM = [CLASSES.index(name) for name in COMMUNICATION]
_COPY = [CLASSES.index(name) for name in COPIES if name != "memset"]
SYNCHRONISATIONS = ("Synchronize", "MemcpyDtoH", "hipStreamSync")
MOST_ROWS = 4096


def spans_of(events: RecordArray) -> tuple[IntArray, IntArray]:
    """The merged spans in which at least one of the events runs."""
    return union(events["start"], events["end"])


def is_communication(events: RecordArray) -> np.ndarray:
    """Which events are communication kernels."""
    return np.isin(events["cls"], _COMM)


def times(events: RecordArray, start: int, end: int) -> dict[str, int]:
    """Wall, busy, compute, communication, exposed and idle nanoseconds of a span.

    Compute is every kernel but communication, and fills; exposed communication is beside no compute, an
    exposed copy (memcpy) beside neither. Compute, both exposed parts and idle add up to the wall time.
    """
    begin, stop = np.clip(events["start"], start, end), np.clip(events["end"], start, end)
    talks = is_communication(events)
    copies = ((events["activity"] == MEMCPY) | np.isin(events["cls"], _COPY)) & ~talks
    compute = covered(union(begin[~talks & ~copies], stop[~talks & ~copies]))
    beside, busy = covered(union(begin[~copies], stop[~copies])), covered(union(begin, stop))
    return {
        "wall_ns": end - start,
        "busy_ns": busy,
        "compute_ns": compute,
        "communication_ns": covered(union(begin[talks], stop[talks])),
        "exposed_communication_ns": beside - compute,
        "exposed_copy_ns": busy - beside,
        "idle_ns": end - start - busy,
    }


def step_bounds(raw: Raw, found: Attributed) -> list[tuple[str, int, int]]:
    """Steps as the GPU saw them: from the first to the last activity that belongs to each."""
    bounds = []
    for number, (name, _, _) in enumerate(found.steps):
        own = raw.events[raw.events["step"] == number]
        if len(own):
            bounds.append((name, int(own["start"].min()), int(own["end"].max())))
    return bounds


def by_class(events: RecordArray) -> list[dict[str, Any]]:
    """Nanoseconds, count and share of each class by phase, longest first; what overlaps counts twice."""
    length = events["end"] - events["start"]
    total = max(int(length.sum()), 1)
    rows = []
    for number in np.unique(events["cls"]).tolist():
        own = events["cls"] == number
        phases = {
            PHASES[phase]: int(length[own & (events["phase"] == phase)].sum())
            for phase in np.unique(events["phase"][own]).tolist()
        }
        taken = int(length[own].sum())
        rows.append(
            {
                "class": CLASSES[number],
                "ns": taken,
                "events": int(own.sum()),
                "share": taken / total,
                "phases_ns": phases,
            }
        )
    return sorted(rows, key=lambda row: -row["ns"])


def coverage(events: RecordArray) -> dict[str, float]:
    """Shares of GPU time in a class, and not in our model, of the sum of events."""
    length = (events["end"] - events["start"]).astype(float)
    total = float(length.sum()) or 1.0
    lost = float(length[events["cls"] == CLASSES.index(UNCLASSIFIED)].sum())
    outside = float(
        length[
            np.isin(
                events["cls"], [CLASSES.index(NOT_IN_MODEL), CLASSES.index("fill"), CLASSES.index("memset")]
            )
        ].sum()
    )
    return {"classified": 1 - lost / total, "not_in_model": outside / total, "unclassified": lost / total}


def gaps(raw: Raw, start: int, end: int) -> dict[str, int]:
    """Idle nanoseconds by cause; the parts add up to the idle time of the span.

    Of a gap, what the profiler's own spans cover is "profiler"; else what a host synchronisation covers is
    "device_synchronisation"; else it is "launch_bound" up to the next kernel's launch call, and what is
    left is "dependency" (a launched kernel waits for another stream, a peer or its queue). "unknown": no
    launch is known.
    """
    events = raw.events[(raw.events["end"] > start) & (raw.events["start"] < end)]
    starts, ends = spans_of(events)
    parts = dict.fromkeys(("profiler", "device_synchronisation", "launch_bound", "dependency", "unknown"), 0)
    if not len(starts):
        return parts
    host = raw.host
    calls = {n for n, name in enumerate(raw.names) if any(word in name for word in SYNCHRONISATIONS)}
    syncs = host[(host["kind"] == CALL) & np.isin(host["name"], list(calls))]
    probe = host[host["kind"] == OVERHEAD]
    probing, waiting = union(probe["start"], probe["end"]), union(syncs["start"], syncs["end"])
    first = _by_start(events)[np.searchsorted(np.sort(events["start"]), starts)]
    left = np.clip(np.concatenate(([start], ends)), start, end)
    right = np.clip(np.concatenate((starts, [end])), start, end)
    launch = np.concatenate((first, [_NO_LAUNCH]))
    idle = np.maximum(right - left, 0)
    own = np.where(idle > 0, _covered_before(probing, right) - _covered_before(probing, left), 0)
    held = np.where(idle > 0, _covered_before(waiting, right) - _covered_before(waiting, left), 0)
    held = np.minimum(held, idle - own)
    rest = idle - own - held
    known = launch != _NO_LAUNCH
    late = np.where(known & (launch > left - LATE_NS), np.clip(launch - left + LATE_NS, 0, rest), 0)
    parts["profiler"] = int(own.sum())
    parts["device_synchronisation"] = int(held.sum())
    parts["launch_bound"] = int(late.sum())
    parts["unknown"] = int(rest[~known].sum())
    parts["dependency"] = int((rest - late)[known].sum())
    return parts


_NO_LAUNCH = 2**62


def _by_start(events: RecordArray) -> IntArray:
    """Launch times in order of start; a start that several share takes the earliest of them."""
    order = np.argsort(events["start"], kind="stable")
    launch = events["launch"][order]
    head = np.concatenate(([True], np.diff(events["start"][order]) > 0))
    return np.where(head & (launch >= 0), launch, _NO_LAUNCH)


def _covered_before(spans: tuple[IntArray, IntArray], when: IntArray) -> IntArray:
    """Nanoseconds of merged spans that lie before each moment."""
    if not len(spans[0]):
        return np.zeros(len(when), np.int64)
    total = np.concatenate(([0], np.cumsum(spans[1] - spans[0])))
    place = np.searchsorted(spans[0], when, side="right")
    over = np.maximum(spans[1][np.maximum(place - 1, 0)] - when, 0)
    return total[place] - np.where(place > 0, over, 0)


def collectives(raw: Raw) -> list[dict[str, Any]]:
    """Collectives and sends in order: class, group, bytes, span, and whether they stay inside a node."""
    chosen = np.flatnonzero(is_communication(raw.events) & (raw.events["activity"] == KERNEL))
    seen: Counter[tuple[str, str]] = Counter()
    found = []
    for place in chosen.tolist():
        event = raw.events[place]
        comm = raw.comms[int(event["comm"])] if event["comm"] >= 0 else None
        kind, group = CLASSES[int(event["cls"])], comm.group if comm else ""
        key = (kind, group)
        size = max(comm.bytes_in, comm.bytes_out) if comm else -1
        start, end = int(event["start"]), int(event["end"])
        found.append({
            "event": place, "class": kind, "group": group, "ranks": list(comm.ranks) if comm else [],
            "occurrence": seen[key], "bytes": size, "start_ns": start, "end_ns": end,
            "where": _where(comm.ranks if comm else (), raw.gpus_per_node),
            "bytes_per_s": size / (end - start) * 1e9 if size > 0 and end > start else None,
        })  # fmt: skip
        seen[key] += 1
    return found


def _where(ranks: Sequence[int], per_node: int) -> str:
    """Inside or between nodes, where ranks and GPUs of a node are known and ranks are placed node by node."""
    if len(ranks) < 2 or not per_node:
        return "unknown"
    return "inside a node" if len({rank // per_node for rank in ranks}) == 1 else "between nodes"


def align(
    raws: Sequence[Raw], listed: Sequence[list[dict[str, Any]]]
) -> tuple[list[int], list[dict[str, Any]]]:
    """Clock offsets of ranks (to add to each), and the matched collectives with transfer and waiting.

    The same collective (class, group, ranks, bytes, occurrence) ends at the same time on all its ranks but
    for the link's latency, so the median difference of ends is the difference of clocks. Transfer is the
    time after the last rank arrived, waiting what a rank was there before. Where ranks hold different numbers
    of a kind, which one is lost is not known, and none of that kind is matched.
    """
    kinds = [Counter((row["class"], row["group"], tuple(row["ranks"])) for row in rows) for rows in listed]
    whole = {kind for counts in kinds for kind in counts if len({c[kind] for c in kinds} - {0}) == 1}
    keyed: list[dict[tuple[Any, ...], dict[str, Any]]] = []
    for rows in listed:
        named = [((row["class"], row["group"], tuple(row["ranks"])), row) for row in rows]
        keyed.append({
            (*kind, row["occurrence"]): row for kind, row in named if kind in whole and kind[0] != "send_recv"
        })  # fmt: skip
    offsets = [0] * len(raws)
    for n in range(1, len(raws)):
        base = next((m for m in range(n) if keyed[m].keys() & keyed[n].keys()), None)
        if base is not None:
            common = keyed[base].keys() & keyed[n].keys()
            delta = [keyed[base][key]["end_ns"] - keyed[n][key]["end_ns"] for key in common]
            offsets[n] = offsets[base] + int(np.median(delta))
    matched = []
    for key in sorted(set().union(*[set(rows) for rows in keyed]), key=str) if keyed else []:
        there = [n for n, rows in enumerate(keyed) if key in rows]
        if len(there) < 2:
            continue
        last = max(keyed[n][key]["start_ns"] + offsets[n] for n in there)
        for n in there:
            row = keyed[n][key]
            length = row["end_ns"] - row["start_ns"]
            wait = min(max(last - row["start_ns"] - offsets[n], 0), length)
            matched.append({
                "rank": raws[n].rank, "class": key[0], "group": key[1], "occurrence": key[3],
                "waiting_ns": wait, "transfer_ns": length - wait, "bytes": row["bytes"],
            })  # fmt: skip
    return offsets, matched


def gemms(raw: Raw) -> list[dict[str, Any]]:
    """GEMMs by shape (m x n x k) and class: count, nanoseconds, and FLOP/s where the shape is known."""
    table: dict[tuple[str, str], list[int]] = {}
    for name in ("gemm", "wgrad_gemm", "gate_gemm", "grouped_gemm"):
        own = raw.events[raw.events["cls"] == CLASSES.index(name)]
        for shape, length in zip(own["shape"].tolist(), (own["end"] - own["start"]).tolist(), strict=True):
            table.setdefault((name, raw.names[shape] if shape >= 0 else ""), []).append(length)
    found = []
    for (name, shape), lengths in table.items():
        flop = flop_of(shape) if name != "grouped_gemm" else 0
        found.append({
            "class": name, "shape": shape, "events": len(lengths), "ns": sum(lengths),
            "flop_per_s": flop * len(lengths) / sum(lengths) * 1e9 if flop and sum(lengths) else None,
        })  # fmt: skip
    return sorted(found, key=lambda row: -row["ns"])


def flop_of(shape: str) -> int:
    """FLOP of a GEMM by its shape, such as 64x32x16 or 8 of 64x32x16; 0 where it has none."""
    batch, _, sizes = shape.rpartition(" of ")
    parts = [int(part) for part in sizes.split("x")] if sizes else []
    return 2 * int(batch or 1) * parts[0] * parts[1] * parts[2] if len(parts) == 3 else 0


def check_events(raw: Raw) -> list[str]:
    """Notes on what contradicts itself: kernels that overlap on one stream, and jumps of the clock."""
    notes = []
    worst = count = 0
    for device, stream in sorted(
        set(zip(raw.events["device"].tolist(), raw.events["stream"].tolist(), strict=True))
    ):
        own = raw.events[(raw.events["device"] == device) & (raw.events["stream"] == stream)]
        before = np.maximum.accumulate(own["end"])[:-1] if len(own) else own["end"]
        late = before - own["start"][1:]
        count += int((late > LATE_NS).sum())
        worst = max(worst, int(late.max(initial=0)))
    if count:
        notes.append(
            f"{count} kernels begin before the one before them on their stream ends (by up to "
            f"{worst / 1e3:.1f} us): "
            "busy time counts each moment once"
        )
    known = raw.events["launch"] >= 0
    early = (raw.events["launch"] > raw.events["end"]) & known & ~raw.events["graph"]
    if early.any():
        notes.append(
            f"{int(early.sum())} of {int(known.sum())} kernels end before they are launched: the clocks "
            "of host and "
            "GPU differ or jump; host gaps are not to be trusted"
        )
    spans = spans_of(raw.events)
    if len(spans[0]) > 1:
        hole = int((spans[0][1:] - spans[1][:-1]).max())
        whole = int(spans[1][-1] - spans[0][0])
        if hole > 0.9 * whole and hole > 10**9:
            notes.append(
                f"a hole of {hole / 1e9:.1f} s of {whole / 1e9:.1f} s without any kernel: a jump of the "
                "clock?"
            )
    return notes
