"""Reads Kineto and Chrome JSON as a stream: a piece of whole events at a time, columns as it goes.

The stream is cut where a separator between events may stand; a cut that is none (inside a text or a nested
value) fails to parse and the one before it is tried, so that no cut is ever believed unseen. Pieces are
decoded by msgspec into the fields that are used, others are skipped unread. Its time beside orjson and
ijson: docs/trace.md.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, cast

import msgspec
import numpy as np
import zstandard

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
    OVERHEAD,
    Comm,
    Names,
    Raw,
    blank,
    rows,
)  # fmt: skip

UNREADABLE = (OSError, EOFError, zlib.error, zstandard.ZstdError)
"""What a file, or its packing, that cannot be read raises."""
PIECE = 4 << 20
"""Bytes that are read at once."""
MOST_EVENT = 64 << 20
"""Most bytes of one event; a longer one is refused as hostile."""
MOST_BREAKS = 1000
"""Broken places after which reading stops."""
MOST_HEADER = 256 << 20
MOST_EVENTS, MOST_KEPT = 200_000_000, 10_000_000
"""Events that are read, and spans that are kept, one of a GPU as four: more would not fit two gigabytes."""

_SEPARATOR = re.compile(rb"\}\s*,\s*(?=\{)")
_EVENT_START = re.compile(rb'\{\s*"(?:ph|name|cat|pid|ts)"\s*:')
_EVENTS_KEY = re.compile(rb'"traceEvents"\s*:\s*\[')
_HOST_KINDS = {
    "cpu_op": OP, "user_annotation": ANNOTATION, "cuda_runtime": CALL, "cuda_driver": CALL,
    "overhead": OVERHEAD,
    "operator": OP, "runtime": CALL, "python_function": ANNOTATION, "hip_runtime": CALL,
}  # fmt: skip
_GPU_KINDS = {"kernel": KERNEL, "gpu_memcpy": MEMCPY, "gpu_memset": MEMSET}
_BYTES = {
    "Byte": 1, "Char": 1, "Bool": 1, "Float8_e4m3fn": 1, "Float8_e5m2": 1, "Half": 2, "BFloat16": 2,
    "Short": 2,
    "Float": 4, "Int": 4, "Double": 8, "Long": 8,
}  # fmt: skip
_LONGEST_SHAPES = 20_000
"""Characters of an operator's input sizes that are kept; longer lists of tensors count as not recorded."""
_EVENT_FIELDS = (
    "start", "end", "device", "stream", "name", "activity", "correlation", "external", "bytes", "comm",
    "graph",
)  # fmt: skip
_HOST_FIELDS = ("start", "end", "thread", "name", "kind", "correlation", "external", "sequence", "shape")

Word = int | float | str | None


class _Args(msgspec.Struct, gc=False):
    external: Word = msgspec.field(default=None, name="External id")
    external_old: Word = msgspec.field(default=None, name="external id")
    correlation: Word = None
    device: Word = None
    stream: Word = None
    bytes: Word = None
    graph: Word = msgspec.field(default=None, name="graph id")
    sequence: Word = msgspec.field(default=None, name="Sequence number")
    dims: msgspec.Raw = msgspec.field(default=msgspec.Raw(b""), name="Input Dims")
    types: msgspec.Raw = msgspec.field(default=msgspec.Raw(b""), name="Input type")
    collective: Any = msgspec.field(default=None, name="Collective name")
    elements_in: Word = msgspec.field(default=None, name="In msg nelems")
    elements_out: Word = msgspec.field(default=None, name="Out msg nelems")
    size: Word = msgspec.field(default=None, name="Group size")
    dtype: Any = None
    group: Any = msgspec.field(default=None, name="Process Group Name")
    ranks: Any = msgspec.field(default=None, name="Process Group Ranks")


class _Event(msgspec.Struct, gc=False):
    ph: str = ""
    cat: str | None = None
    name: Any = ""
    ts: Word = None
    dur: Word = None
    pid: Word = None
    tid: Word = None
    args: _Args | None = None


_decode = msgspec.json.Decoder(list[_Event]).decode
_decode_one = msgspec.json.Decoder(_Event).decode


def opened(path: Path) -> IO[bytes]:
    """The bytes of a file, decompressed where its first bytes say gzip or zstandard."""
    with path.open("rb") as file:
        magic = file.read(4)
    if magic[:2] == b"\x1f\x8b":
        return cast("IO[bytes]", gzip.open(path, "rb"))
    if magic == b"\x28\xb5\x2f\xfd":
        return zstandard.open(path, "rb")  # type: ignore[no-any-return]
    return path.open("rb")


def _ns(microseconds: Word) -> int:
    """Nanoseconds; whole and broken part apart, since times since 1970 times 1000 fit no float."""
    if isinstance(microseconds, int):
        return microseconds * 1000
    whole = float(microseconds)  # type: ignore[arg-type]
    return int(whole) * 1000 + round((whole - int(whole)) * 1000)


def _number(value: Word, missing: int = -1) -> int:
    if value is None:
        return missing
    if isinstance(value, int):
        return value if -(2**62) < value < 2**62 else missing
    try:
        return int(value)
    except (ValueError, OverflowError):
        return missing


class _Columns:
    """Rows of one file on their way into arrays."""

    def __init__(self) -> None:
        self.names = Names()
        self.comms: dict[Comm, int] = {}
        self.events: list[Any] = []
        self.host: list[Any] = []
        self.threads: dict[tuple[Word, Word], int] = {}
        self.count = self.kept = self.skipped = 0
        self.first_bad = ""

    def take(self, listed: list[_Event], place: str) -> None:
        """Add the GPU and host spans among events; others (flows, counters, Python frames) are not kept."""
        gpu, host = [], []
        for event in listed:
            kind = event.cat
            if event.ph != "X" or kind is None:
                continue
            activity = _GPU_KINDS.get(kind) if kind in _GPU_KINDS else _GPU_KINDS.get(kind.lower())
            host_kind = None if activity is not None else _HOST_KINDS.get(kind.lower())
            if activity is None and host_kind is None:
                continue
            name = event.name
            if type(name) is not str:
                name = str(name)
            if kind == "python_function" and not name.startswith("nn.Module"):
                continue
            ts, dur = event.ts, event.dur
            try:
                start, length = _ns(ts), 0 if dur is None else _ns(dur)
            except (TypeError, ValueError, OverflowError):
                self._bad(place, f"time {ts!r}, duration {dur!r}")
                continue
            if length < 0 or not -(2**62) < start < 2**62 or length > 2**60:
                self._bad(place, f"time {ts!r}, duration {dur!r}")
                continue
            if activity is not None:
                gpu.append(self._gpu(event, name, start, length, activity))
            else:
                host.append(self._host(event, name, start, length, host_kind))
        self.count += len(listed)
        self.kept += 4 * len(gpu) + len(host)  # a row of the GPU takes four times the memory in the end
        if self.count > MOST_EVENTS or self.kept > MOST_KEPT:
            raise InputError(
                f"{place}: more than the limit of {MOST_EVENTS:,} events, {MOST_KEPT // 4:,} of them on GPUs "
                f"or {MOST_KEPT:,} on hosts; profile fewer steps"
            )
        if gpu:
            self.events.append(rows(gpu, EVENT, _EVENT_FIELDS))
        if host:
            self.host.append(rows(host, HOST, _HOST_FIELDS))

    def _bad(self, place: str, what: str) -> None:
        self.skipped += 1
        self.first_bad = self.first_bad or f"{place}: {what}"

    def _gpu(self, event: _Event, name: str, start: int, length: int, activity: int) -> tuple[Any, ...]:
        args = event.args or _Args()
        comm = -1
        if args.collective is not None:
            comm = self._comm(args)
        external = args.external if args.external is not None else args.external_old
        device = args.device if args.device is not None else event.pid
        stream = args.stream if args.stream is not None else event.tid
        return (
            start, start + length, _number(device), _number(stream), self.names[name], activity,
            _number(args.correlation), _number(external), _number(args.bytes), comm,
            bool(_number(args.graph, 0)),
        )  # fmt: skip

    def _host(self, event: _Event, name: str, start: int, length: int, kind: int | None) -> tuple[Any, ...]:
        args = event.args or _Args()
        shape = -1
        if 0 < len(args.dims) < _LONGEST_SHAPES:
            shape = self.names[
                f"{str(args.dims, 'utf-8', 'replace')}\t{str(args.types, 'utf-8', 'replace')[:400]}"
            ]
        thread = self.threads.setdefault((event.pid, event.tid), len(self.threads))
        external = args.external if args.external is not None else args.external_old
        return (
            start, start + length, thread, self.names[name], kind, _number(args.correlation),
            _number(external),
            _number(args.sequence), shape,
        )  # fmt: skip

    def _comm(self, args: _Args) -> int:
        ranks = args.ranks
        if isinstance(ranks, str):
            ranks = re.findall(r"\d+", ranks)
        width = _BYTES.get(str(args.dtype), 0)
        known = tuple(_number(rank) for rank in ranks) if isinstance(ranks, list) else ()
        size_in, size_out = _number(args.elements_in), _number(args.elements_out)
        comm = Comm(
            str(args.collective).lower(), str(args.group or ""), known, _number(args.size, 0),
            size_in * width if size_in >= 0 and width else -1,
            size_out * width if size_out >= 0 and width else -1,
        )  # fmt: skip
        return self.comms.setdefault(comm, len(self.comms))


def read_kineto(path: Path, said: Callable[[str], None] = lambda text: None) -> Raw:
    """Read one rank of Kineto or Chrome JSON (plain, gzip, zstandard); `said` is told the progress.

    A broken place is noted with its byte, and what stands before and after it is read. Raises InputError for
    a file without trace events and for hostile JSON.
    """
    columns = _Columns()
    notes: list[str] = []
    with opened(path) as file:
        stream = _Stream(file, path, said)
        header = stream.header()
        tail = b""
        for piece, offset in stream.pieces():
            _take(piece, offset, columns, path, notes)
        tail = stream.rest
        if stream.cut:
            notes.append(stream.cut)
    raw = Raw(path.name, names=[], comms=list(columns.comms), notes=notes)
    _headers(raw, header + tail)
    raw.names = list(columns.names)
    raw.events = cast("RecordArray", np.concatenate(columns.events)) if columns.events else blank(0, EVENT)
    raw.host = cast("RecordArray", np.concatenate(columns.host)) if columns.host else blank(0, HOST)
    if columns.skipped:
        notes.append(
            f"{columns.skipped} events without a usable time were left out; first at {columns.first_bad}"
        )
    if len(raw.events) and abs(int(raw.events["start"][0])) > 2**53:
        notes.append(
            "times are absolute, in microseconds with a fraction: the file holds them to about 0.25 us"
        )
    if not columns.count:
        raise InputError(
            f"{path.name}: no trace events{': ' + notes[0] if notes else ''}; a Kineto or Chrome trace has a "
            "list 'traceEvents'"
        )
    return raw


class _Stream:
    """A file as pieces that hold whole events."""

    def __init__(self, file: IO[bytes], path: Path, said: Callable[[str], None]) -> None:
        self.file, self.path, self.said = file, path, said
        self.buffer = b""
        self.offset = 0
        self.cut = ""
        self.rest = b""
        self.ended = False

    def _read(self) -> bytes:
        """The next PIECE bytes; where the packing breaks, what was unpacked before is kept."""
        parts: list[bytes] = []
        size = 0
        try:
            while size < PIECE and (part := self.file.read1(PIECE - size)):  # type: ignore[attr-defined]
                parts.append(part)
                size += len(part)
            self.ended = not size
        except (*UNREADABLE, ValueError) as error:
            self._stop(f"the compressed stream breaks ({str(error)[:120]})", size)
        return b"".join(parts)

    def _stop(self, why: str, size: int) -> None:
        self.ended = True
        place = self.offset + len(self.buffer) + size
        self.cut = f"{why} after byte {place:,} of the JSON; what stands before was read"

    def header(self) -> bytes:
        """What stands before the list of events; the stream is left at its first event."""
        while True:
            data = self._read()
            self.buffer += data
            text = self.buffer.lstrip(b"\xef\xbb\xbf \t\r\n")
            if text[:1] == b"[":
                skipped = len(self.buffer) - len(text) + 1
                self.buffer, self.offset = self.buffer[skipped:], skipped
                return b""
            found = _EVENTS_KEY.search(self.buffer)
            if found:
                head = self.buffer[: found.start()]
                self.offset, self.buffer = found.end(), self.buffer[found.end() :]
                return head
            if text[:1] != b"{" and text:
                raise InputError(f"{self.path.name}: not a JSON trace: it begins with {text[:20]!r}")
            if not data:
                raise InputError(
                    f"{self.path.name}: no list 'traceEvents' in {len(self.buffer):,} bytes"
                    f"{'; ' + self.cut if self.cut else ''}; give a Kineto or Chrome trace"
                )
            if len(self.buffer) > MOST_HEADER:
                raise InputError(
                    f"{self.path.name}: no list 'traceEvents' in the first {MOST_HEADER:,} bytes"
                )

    def pieces(self) -> Iterator[tuple[bytes, int]]:
        """Texts that end with a whole event, with the byte at which each begins; sets `rest` to the tail."""
        while not self.ended:
            self.buffer += self._read()
            if self.ended:
                break
            for found in _last_separators(self.buffer):
                cut = found
                break
            else:
                if len(self.buffer) > MOST_EVENT:
                    raise InputError(
                        f"{self.path.name}: no event ends within {MOST_EVENT:,} bytes after byte "
                        f"{self.offset:,}"
                    )
                continue
            yield self.buffer[: cut + 1], self.offset
            skipped = self.buffer.index(b"{", cut)
            self.offset += skipped
            self.buffer = self.buffer[skipped:]
            self.said(f"reading {self.path.name}: {self.offset / 1e6:,.0f} MB")
        yield from self._last()

    def _last(self) -> Iterator[tuple[bytes, int]]:
        text = self.buffer
        end = text.rfind(b"]")
        for _ in range(1000):
            if end < 0 or (text[:end].rstrip()[-1:] in (b"}", b"") and _is_list(b"[" + text[: end + 1])):
                break
            end = text.rfind(b"]", 0, end)
        else:
            end = -1
        if end >= 0:
            self.rest = b"{" + text[end + 1 :].lstrip().lstrip(b",")
            if text[:end].strip():
                yield text[:end], self.offset
        elif not text.strip().strip(b"]}, \n"):
            return
        else:
            found = next(_last_separators(text), -1)
            begin = max(text.find(b"{", found + 1), 0)
            end = begin + _length(text[begin:], f"{self.path.name}, byte {self.offset + begin:,}")
            if text[end:].lstrip()[:1] != b"]":
                self.cut = self.cut or (
                    f"the file ends inside its list of events, at byte {self.offset + len(text):,}; "
                    "what stands before was read"
                )
            whole = text[:end] if end > begin else text[: found + 1]
            if whole.strip():
                yield whole, self.offset


def _length(text: bytes, place: str) -> int:
    """Bytes of the JSON value at the beginning, in which NaN may stand; 0 where none is whole."""
    words = text.decode("utf-8", "replace")
    try:
        return len(words[: json.JSONDecoder().raw_decode(words)[1]].encode())
    except RecursionError:
        raise InputError(f"{place}: nested too deeply; a trace's events are flat") from None
    except ValueError:
        return 0


def _is_list(text: bytes) -> bool:
    try:
        msgspec.json.decode(text, type=list[msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


def _last_separators(text: bytes) -> Iterator[int]:
    """Places of the closing braces before a separator, last first; a newline before the next event wins."""
    end = len(text)
    while end > 0:
        start = max(0, end - 65536)
        found = [match.start() for match in _SEPARATOR.finditer(text, start, min(len(text), end + 64))]
        yield from reversed(found)
        end = start


def _take(piece: bytes, offset: int, columns: _Columns, path: Path, notes: list[str]) -> None:
    place = f"byte {offset:,}"
    try:
        listed = _decode(b"[" + piece + b"]")
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        _broken(piece, offset, columns, path, notes)
        return
    for key in (b'"ph":', b'"ts":', b'"dur":'):
        if piece.count(key) > len(listed):
            _check_keys(piece, path, offset)
            break
    columns.take(listed, place)


def _check_keys(piece: bytes, path: Path, offset: int) -> None:
    def pairs(items: list[tuple[str, Any]]) -> None:
        seen = set()
        for key, _ in items:
            if key in seen:
                raise InputError(
                    f"{path.name}: the key {key!r} stands twice in one event after byte {offset:,}; a "
                    "trace whose "
                    "events contradict themselves is not read: export it again"
                )
            seen.add(key)

    json.loads(b"[" + piece + b"]", object_pairs_hook=pairs)


def _broken(piece: bytes, offset: int, columns: _Columns, path: Path, notes: list[str]) -> None:
    """Read the events of a piece one by one; note each break, and go on at the next event."""
    text = piece.decode("utf-8", "replace")
    decoder = json.JSONDecoder()
    at, listed, starts = 0, [], re.compile(_EVENT_START.pattern.decode())
    while at < len(text):
        if text[at] != "{":
            at += 1
            continue
        try:
            value, end = decoder.raw_decode(text, at)
            listed.append(_event(value))
            at = end
        except RecursionError:
            raise InputError(f"{path.name}: nested too deeply after byte {offset + at:,}") from None
        except (ValueError, msgspec.ValidationError) as error:
            where = offset + len(text[:at].encode())
            following = starts.search(text, at + 1)
            count = sum(1 for line in notes if line.startswith("broken"))
            if count > MOST_BREAKS:
                raise InputError(
                    f"{path.name}: broken at more than {MOST_BREAKS} places; not a usable trace"
                ) from None
            notes.append(f"broken at byte {where:,} ({str(error)[:80]}); read on at the next event")
            if following is None:
                break
            at = following.start()
    columns.take(listed, f"byte {offset:,}")


def _event(value: Any) -> _Event:
    """An event from parsed JSON, in which NaN and Infinity of old writers are allowed."""
    if not isinstance(value, dict):
        raise ValueError("an event is no mapping")
    value = {key: item for key, item in value.items() if key in _Event.__struct_fields__}
    args = value.get("args")
    lists = [args.pop(key, None) if isinstance(args, dict) else None for key in ("Input Dims", "Input type")]
    event = msgspec.convert(value, _Event, strict=False)
    event.name = str(event.name).encode("utf-8", "replace").decode()  # a lone surrogate cannot be printed
    for key, found in zip(("dims", "types"), lists, strict=True):
        if found is not None and event.args is not None:
            setattr(event.args, key, msgspec.Raw(json.dumps(found).encode()))
    return event


def _headers(raw: Raw, text: bytes) -> None:
    """Take rank, world and GPU from what stands around the list of events."""
    words = text.decode("utf-8", "replace")
    found = re.search(r'"distributedInfo"\s*:\s*\{', words)
    if found:
        info = words[found.start() : found.start() + 100_000]
        for key in ("rank", "world_size"):
            number = re.search(rf'"{key}"\s*:\s*"?(-?\d{{1,9}})', info)
            if number:
                setattr(raw, "rank" if key == "rank" else "world", int(number[1]))
    devices = re.search(r'"deviceProperties"\s*:\s*\[', words)
    if devices:
        names = re.findall(r'"name"\s*:\s*"([^"]{0,100})"', words[devices.start() : devices.start() + 40_000])
        raw.gpu, raw.gpus_per_node = (names or [""])[0], len(names)
