"""Reads Nsight Systems SQLite, Chakra execution traces and our CSV of the H800 timeline into plain tables.

Nothing of a file is executed: SQLite is opened read-only with fixed queries on tables (views and triggers
of the file never run), protobuf is decoded by its wire format. Chakra's messages follow the public schema
`et_def.proto` (mlcommons/chakra, Apache-2.0); a reader of the wire format is smaller than generated code.
"""

from __future__ import annotations

import csv
import sqlite3
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from msgspec import Struct, field

from moesim.hwmodels.arrays import RecordArray
from moesim.hwmodels.errors import InputError
from moesim.simulator.trace.events import (
    ANNOTATION,
    CALL,
    EVENT,
    HOST,
    KERNEL,
    MEMCPY,
    MEMSET,
    OP,
    Comm,
    Names,
    Raw,
    rows,
)  # fmt: skip
from moesim.simulator.trace.kineto import opened

_KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
_NEEDED = {
    "StringIds": ("id", "value"),
    _KERNELS: ("start", "end", "deviceId", "streamId", "correlationId", "demangledName"),
}
_COPY_KINDS = {1: "HtoD", 2: "DtoH", 8: "DtoD", 10: "PtoP"}
_CSV = ("kernel_class", "phase", "layer_index", "stream", "start_us", "duration_us", "kernel_name_truncated")
_CSV_CLASSES = {
    "attn_bwd_core": "attention_backward", "attn_bwd_post": "attention_pre_post",
    "attn_bwd_pre": "attention_pre_post",
    "attn_fwd_core": "attention_forward", "copy": "copy", "elementwise": "elementwise",
    "ep_combine": "ep_combine",
    "ep_dispatch": "ep_dispatch", "ep_layout": "ep_notify", "ep_notify": "ep_notify", "gate_topk": "topk",
    "gemm_bf16_gate": "gate_gemm", "gemm_fp8_dense": "gemm", "gemm_fp8_grouped": "grouped_gemm",
    "gemm_fp8_wgrad": "wgrad_gemm", "mem_memcpy": "memcpy_d2d", "mem_memset": "memset",
    "misc": "not_in_model",
    "moe_permute": "permute", "quant_cast": "cast", "rmsnorm": "norm", "rope": "rope", "swiglu": "swiglu",
    "transpose": "transpose",
}  # fmt: skip
_CHAKRA_COMMS = (
    "all_reduce", "reduce", "all_gather", "gather", "scatter", "broadcast", "all_to_all", "reduce_scatter",
    "reduce_scatter_block", "barrier",
)  # fmt: skip
MOST_MESSAGE, MOST_CHAKRA = 64 << 20, 256 << 20
"""Most bytes of one message, and of an execution trace, unpacked."""


def read_nsight(path: Path) -> list[Raw]:
    """Read an Nsight Systems export, one `Raw` a GPU; raises InputError for SQLite that is not Nsight's."""
    uri = f"{path.absolute().as_uri()}?mode=ro&immutable=1"
    try:
        with sqlite3.connect(uri, uri=True) as base:
            base.execute("pragma trusted_schema = off")
            base.execute("pragma query_only = on")
            base.text_factory = lambda data: data.decode("utf-8", "replace")
            _check_tables(base, path)
            return _nsight(base, path)
    except InputError:
        raise
    except (sqlite3.Error, TypeError, ValueError, OverflowError) as error:
        raise InputError(
            f"{path.name}: SQLite that cannot be read as an Nsight Systems export ({str(error)[:200]}); "
            "export again "
            "with `nsys export --type sqlite`"
        ) from None
    finally:
        if "base" in locals():
            base.close()


def _columns(base: sqlite3.Connection, table: str) -> set[str]:
    """Columns of a real table; a view or virtual table has none here, so that it is never read."""
    sql = base.execute("select sql from sqlite_master where type = 'table' and name = ?", (table,)).fetchone()
    if not sql or not str(sql[0]).lower().startswith("create table"):
        return set()
    return {row[1] for row in base.execute(f"pragma table_info({table})")}


def _check_tables(base: sqlite3.Connection, path: Path) -> None:
    for table, columns in _NEEDED.items():
        if missing := set(columns) - _columns(base, table):
            raise InputError(
                f"{path.name}: SQLite, but not an Nsight Systems export with GPU kernels: table {table} "
                "lacks "
                f"{', '.join(sorted(missing))}; export with `nsys export --type sqlite` a report with "
                "CUDA traces"
            )


def _nsight(base: sqlite3.Connection, path: Path) -> list[Raw]:
    names = Names()
    texts: dict[int, str] = {}
    for number, text in base.execute("select id, value from StringIds"):
        texts[number] = str(text)
    fields = (
        "start",
        "end",
        "device",
        "stream",
        "name",
        "activity",
        "correlation",
        "bytes",
        "graph",
        "external",
    )
    events = rows(_nsight_activities(base, names, texts), EVENT, fields)
    usable = (events["end"] >= events["start"]) & (np.abs(events["start"]) < 2**62) & (events["end"] < 2**62)
    if not usable.any():
        raise InputError(f"{path.name}: an Nsight Systems export without a kernel that has a usable time")
    lost = int((~usable).sum())
    notes = [f"{lost} activities end before they begin, and were left out"] if lost else []
    events = events[usable]
    host = _nsight_host(base, names, texts)
    raws = []
    processes = events["external"].copy()
    events["external"] = -1
    for process, device in sorted(
        set(zip(processes.tolist(), events["device"].tolist(), strict=True)), key=lambda key: key[1]
    ):
        own = events[(processes == process) & (events["device"] == device)]
        of_process = host["external"] == process >> 24 if process else slice(None)
        mine: RecordArray = host[of_process].copy()
        mine["external"] = -1
        raws.append(
            Raw(
                path.name,
                rank=int(device),
                world=-1,
                events=own,
                host=mine,
                names=list(names),
                notes=list(notes),
            )
        )
    return raws


def _nsight_activities(
    base: sqlite3.Connection, names: Names, texts: dict[int, str]
) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for table, activity in (
        (_KERNELS, KERNEL),
        ("CUPTI_ACTIVITY_KIND_MEMCPY", MEMCPY),
        ("CUPTI_ACTIVITY_KIND_MEMSET", MEMSET),
    ):
        columns = _columns(base, table)
        if not columns:
            continue
        label = "demangledName" if activity == KERNEL else "copyKind" if activity == MEMCPY else "0"
        wanted = [
            label,
            "bytes" if "bytes" in columns else "-1",
            "graphNodeId" if "graphNodeId" in columns else "null",
        ]
        wanted.append("globalPid" if "globalPid" in columns else "0")
        query = f"select start, end, deviceId, streamId, correlationId, {', '.join(wanted)} from {table}"
        for start, end, device, stream, correlation, said, size, graph, process in base.execute(query):
            if activity == KERNEL:
                name = texts.get(said, "?")
            else:
                name = f"Memcpy {_COPY_KINDS.get(said, 'DtoD')}" if activity == MEMCPY else "Memset"
            found.append((
                int(start), int(end), int(device), int(stream), names[name], activity, int(correlation or -1),
                int(size), int(graph is not None), int(process or 0),
            ))  # fmt: skip
    return found


def _nsight_host(base: sqlite3.Connection, names: Names, texts: dict[int, str]) -> RecordArray:
    found = []
    if _columns(base, "CUPTI_ACTIVITY_KIND_RUNTIME"):
        for start, end, thread, correlation, name in base.execute(
            "select start, end, globalTid, correlationId, nameId from CUPTI_ACTIVITY_KIND_RUNTIME"
        ):
            thread = int(thread or 0)
            found.append(
                (start, end, thread, names[texts.get(name, "?")], CALL, int(correlation or -1), thread >> 24)
            )
    if _columns(base, "NVTX_EVENTS"):
        for start, end, thread, text, number in base.execute(
            "select start, end, globalTid, text, textId from NVTX_EVENTS where end is not null and "
            "eventType in (59, 60)"
        ):
            name = str(text if text is not None else texts.get(number, "?"))
            kind = OP if name.startswith(("aten::", "autograd::")) or ", op_id = " in name else ANNOTATION
            name = name.partition(", op_id")[0].partition(", seq = ")[0]
            thread = int(thread or 0)
            found.append((start, end, thread, names[name], kind, -1, thread >> 24))
    return rows(found, HOST, ("start", "end", "thread", "name", "kind", "correlation", "external"))


def read_h800_csv(path: Path) -> Raw:
    """Read our CSV of DeepSeek's H800 timeline (columns of `h800-trace-kernels.csv`, microseconds)."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = set(_CSV) - set(reader.fieldnames or ())
            if missing:
                raise InputError(
                    f"{path.name}: a CSV without the columns {', '.join(sorted(missing))}; the only CSV "
                    "that is read is "
                    "the H800 timeline of kernels"
                )
            lines = list(reader)
    except (UnicodeDecodeError, csv.Error, OSError) as error:
        raise InputError(f"{path.name}: not a readable CSV ({str(error)[:120]})") from None
    names, raw, data = Names(), Raw(path.name, rank=0, world=64, gpu="NVIDIA H800"), []
    for number, line in enumerate(lines, 2):
        try:
            start, length = round(float(line["start_us"]) * 1000), round(float(line["duration_us"]) * 1000)
            stream, layer = int(line["stream"]), int(line["layer_index"] or -1)
            kind = _CSV_CLASSES[line["kernel_class"]]
            if line["kernel_name_truncated"] is None:
                raise ValueError("a line that ends early")
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise InputError(f"{path.name}, line {number}: {error!s} is no value of this column") from None
        if length < 0:
            raise InputError(
                f"{path.name}, line {number}: a duration of {length} ns; it must not be negative"
            )
        phase = line["phase"] or ""
        activity = MEMCPY if line["kernel_class"] == "mem_memcpy" else MEMSET if kind == "memset" else KERNEL
        side = 0 if not phase else 1 if "(F)" in phase else 2
        data.append(
            (
                start,
                start + length,
                0,
                stream,
                names[line["kernel_name_truncated"]],
                activity,
                layer,
                side,
                names[phase],
            )
        )
        raw.classes.append(kind)
    fields = ("start", "end", "device", "stream", "name", "activity", "layer", "phase", "scope")
    raw.events, raw.names = rows(data, EVENT, fields), list(names)
    raw.notes.append("phases, layers and classes stand in the file; it has no host events")
    return raw


# -- Chakra ------------------------------------------------------------------------------------------


class _Work(Struct):
    number: int = 0  # proto3 writes no zeros
    name: str = ""
    kind: int = 0
    needs: list[int] = field(default_factory=list)
    start: int = 0
    length: int = 0
    attributes: dict[str, int | str | bool] = field(default_factory=dict)

    def span_ns(self) -> tuple[int, int]:
        """Start and end; exact where the file says nanoseconds, as ours do, else in whole microseconds."""
        start, length = (self.attributes.get(key) for key in ("start_ns", "duration_ns"))
        if isinstance(start, int) and isinstance(length, int) and self.start:
            return start, start + length
        return self.start * 1000, (self.start + self.length) * 1000


def read_chakra(path: Path) -> Raw:
    """Read a Chakra execution trace (protobuf). Start times are kept where nodes have them.

    Where the file has none, nodes are laid one after another by their dependencies, which is said in a note.
    Raises InputError for cycles, for a node that needs itself, and for a file that is no such trace.
    """
    with opened(path) as file:
        data = file.read(MOST_CHAKRA + 1)
    if len(data) > MOST_CHAKRA:
        raise InputError(f"{path.name}: more than the limit of {MOST_CHAKRA:,} bytes of an execution trace")
    nodes: list[_Work] = []
    notes: list[str] = []
    messages = _messages(data, path, notes)
    first = next(messages, None)
    if first is None:
        raise InputError(f"{path.name}: not a Chakra execution trace: no message could be read")
    for text in messages:
        nodes.append(_node(text, path))
    if not nodes:
        raise InputError(f"{path.name}: a Chakra execution trace without nodes")
    order = _ordered(nodes, path, notes)
    timed = any(node.start for node in nodes)
    if not timed:
        _lay_out(order)
        notes.append(
            "the file has no start times: nodes stand where their dependencies allow, each stream in "
            "order, so idle "
            "and exposed time are of this order and not measured"
        )
    gpu, host, names, comms = [], [], Names(), {}  # type: ignore[var-annotated]
    for node in order:
        start, end = node.span_ns()
        communicates = node.kind in (5, 6, 7)
        if node.attributes.get("is_cpu_op") and not communicates:
            host.append(
                (start, end, int(node.attributes.get("tid", 0)), names[node.name.partition("(")[0]], OP)
            )
            continue
        if node.kind == 1:
            continue
        kind = "send" if node.kind == 5 else "recv" if node.kind == 6 else ""
        number = node.attributes.get("comm_type", -1)
        if node.kind == 7 and isinstance(number, int) and 0 <= number < len(_CHAKRA_COMMS):
            kind = _CHAKRA_COMMS[number]
        size = int(node.attributes.get("comm_size", -1))
        comm = Comm(kind, str(node.attributes.get("pg_name", "")), (), 0, size, size)
        place = comms.setdefault(comm, len(comms)) if kind else -1
        low = node.name.lower()
        activity = MEMCPY if low.startswith("memcpy") else MEMSET if low.startswith("memset") else KERNEL
        gpu.append(
            (start, end, 0, int(node.attributes.get("tid", 0)), names[node.name or kind], activity, place)
        )
    raw = Raw(path.name, names=[], comms=list(comms), notes=notes, timed=timed)
    raw.events = rows(gpu, EVENT, ("start", "end", "device", "stream", "name", "activity", "comm"))
    raw.host = rows(host, HOST, ("start", "end", "thread", "name", "kind"))
    raw.names = list(names)
    number_of = path.name.removesuffix(".gz").split(".")[-2:-1]
    raw.rank = int(number_of[0]) if number_of and number_of[0].isdigit() else -1
    return raw


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise ValueError("a number that does not end")
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at


def _messages(data: bytes, path: Path, notes: list[str]) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        try:
            size, begin = _varint(data, at)
        except ValueError:
            size, begin = MOST_MESSAGE + 1, at
        if size > MOST_MESSAGE or begin + size > len(data):
            if at == 0:
                return
            notes.append(
                f"broken at byte {at:,}: a message ends beyond the file; the nodes before it were read"
            )
            return
        yield data[begin : begin + size]
        at = begin + size


def _fields(text: bytes, path: Path) -> Iterator[tuple[int, int | bytes]]:
    at = 0
    try:
        while at < len(text):
            key, at = _varint(text, at)
            wire = key & 7
            if wire == 0:
                value, at = _varint(text, at)
                yield key >> 3, value
            elif wire == 2:
                size, at = _varint(text, at)
                if at + size > len(text):
                    raise ValueError("a field that ends beyond its message")
                yield key >> 3, text[at : at + size]
                at += size
            elif wire in (1, 5):
                size = 8 if wire == 1 else 4
                yield key >> 3, text[at : at + size]
                at += size
            else:
                raise ValueError(f"wire type {wire}")
    except ValueError as error:
        raise InputError(f"{path.name}: not a Chakra execution trace ({error})") from None


def _node(text: bytes, path: Path) -> _Work:
    node = _Work()
    for key, value in _fields(text, path):
        if key == 1 and isinstance(value, int):
            node.number = value
        elif key == 2 and isinstance(value, bytes):
            node.name = value.decode("utf-8", "replace")
        elif key == 3 and isinstance(value, int):
            node.kind = value
        elif key == 5:  # data dependencies order the execution; control dependencies name parents
            node.needs += [value] if isinstance(value, int) else _packed(value)
        elif key == 6 and isinstance(value, int):
            node.start = value
        elif key == 7 and isinstance(value, int):
            node.length = value
        elif key == 10 and isinstance(value, bytes):
            _attribute(node, value, path)
    return node


def _packed(text: bytes) -> list[int]:
    found, at = [], 0
    while at < len(text):
        value, at = _varint(text, at)
        found.append(value)
    return found


def _attribute(node: _Work, text: bytes, path: Path) -> None:
    name, value = "", None
    for key, item in _fields(text, path):
        if key == 1 and isinstance(item, bytes):
            name = item.decode("utf-8", "replace")
        elif isinstance(item, int):
            value = item if item < 1 << 62 else -1
        elif key == 29:
            value = item.decode("utf-8", "replace")  # type: ignore[assignment]
    if value is not None:
        node.attributes[name] = value


def _ordered(nodes: list[_Work], path: Path, notes: list[str]) -> list[_Work]:
    """Nodes so that each stands behind what it needs."""
    by_number = {node.number: node for node in nodes}
    if len(by_number) < len(nodes):
        raise InputError(f"{path.name}: {len(nodes) - len(by_number)} nodes have the number of another node")
    waits, users, lost = {}, {}, 0  # type: ignore[var-annotated]
    for node in nodes:
        known = {need for need in node.needs if need in by_number}
        lost += len(set(node.needs)) - len(known)
        waits[node.number] = len(known)
        for need in known:
            users.setdefault(need, []).append(node.number)
    ready, order = deque(node.number for node in nodes if not waits[node.number]), []
    while ready:
        number = ready.popleft()
        order.append(by_number[number])
        for user in users.get(number, ()):
            waits[user] -= 1
            if not waits[user]:
                ready.append(user)
    if len(order) < len(nodes):
        stuck = sorted(number for number, count in waits.items() if count)[:5]
        raise InputError(
            f"{path.name}: a cycle of dependencies: {len(nodes) - len(order)} nodes wait for each other, "
            "such as "
            f"{', '.join(map(str, stuck))}; convert the trace again"
        )
    if lost:
        notes.append(f"{lost} dependencies name nodes that are not in the file (missing edges)")
    return order


def _lay_out(order: list[_Work]) -> None:
    ends: dict[int, int] = {}
    lanes: dict[tuple[bool, object], int] = {}
    for node in order:
        lane = (bool(node.attributes.get("is_cpu_op")), node.attributes.get("tid", 0))
        gpu_waits = not lane[0]
        needs = [ends.get(need, 0) for need in node.needs] if gpu_waits else []
        node.start = max([lanes.get(lane, 0), *needs])
        ends[node.number] = lanes[lane] = node.start + node.length
