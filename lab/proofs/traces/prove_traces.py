"""Draws GPU activities of traces to judge their classes by hand, spoils traces of every format, builds one of
1 GB and measures how it is read.

    python lab/proofs/traces/prove_traces.py draw OUT.json TRACES...     300 activities, --seed 34
    python lab/proofs/traces/prove_traces.py fuzz FOLDER [--cases 2000]  small bases of every format, spoilt
    python lab/proofs/traces/prove_traces.py large FOLDER TRACE.json.gz  1 GB; whole, cut and interleaved
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import re
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from moesim.hwmodels.errors import InputError
from moesim.simulator.trace import CLASSES, PHASES, RankTrace, attribute, read

DRAWN = 300


def draw(out: Path, sources: list[Path], seed: int) -> None:
    """Activities of every trace in equal number, half of them drawn by count and half by time."""
    taken: list[Any] = []
    original = attribute._launches
    attribute._launches = lambda raw, result: taken.append(original(raw, result)) or taken[-1]
    picker = np.random.default_rng(seed)
    rows: list[dict[str, Any]] = []
    for place, source in enumerate(sources):
        taken.clear()
        rank = read(source).ranks[0]
        left = (DRAWN - len(rows)) // (len(sources) - place)
        length = (rank.events["end"] - rank.events["start"]).astype(float)
        by_count = picker.choice(len(length), left // 2, replace=False)
        rest = np.setdiff1d(np.flatnonzero(length > 0), by_count)
        by_time = picker.choice(rest, left - left // 2, replace=False, p=length[rest] / length[rest].sum())
        drawn = [(int(n), "count") for n in by_count] + [(int(n), "time") for n in by_time]
        rows += [_row(source, rank, taken[0][n], n, how) for n, how in drawn]
    out.write_text(json.dumps(rows, indent=1))


def _row(source: Path, rank: RankTrace, path: tuple[int, ...], n: int, how: str) -> dict[str, Any]:
    event, names = rank.events[n], rank.names

    def near(step: int) -> list[str]:
        own = np.flatnonzero(rank.events["stream"] == event["stream"])
        at = int(np.searchsorted(own, n))
        places = own[max(0, at - 4) : at][::-1] if step < 0 else own[at + 1 : at + 5]
        return [CLASSES[rank.events["cls"][m]] for m in places]

    return {
        "trace": source.name, "event": n, "drawn_by": how, "ns": int(event["end"] - event["start"]),
        "kernel": names[event["name"]], "launched_by": [names[part] if part >= 0 else "recomputed" for part in path],
        "shape": names[event["shape"]] if event["shape"] >= 0 else "", "phase": PHASES[event["phase"]],
        "before": near(-1), "after": near(1), "class": CLASSES[event["cls"]],
    }  # fmt: skip


def _bases(folder: Path) -> Iterator[tuple[str, bytes]]:
    """One small trace of each format."""
    kernel = {"ph": "X", "cat": "kernel", "name": "nvjet_a", "pid": 0, "tid": 7, "ts": 10.5, "dur": 5}
    call = {
        "ph": "X",
        "cat": "cuda_runtime",
        "name": "cudaLaunchKernel",
        "pid": 1,
        "tid": 1,
        "ts": 3,
        "dur": 1,
    }
    events: list[dict[str, Any]] = [
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1, "dur": 9,
         "args": {"Sequence number": 5, "Input Dims": [[64, 16], [16, 32]]}},
        {**call, "args": {"correlation": 1}},
        {**kernel, "args": {"correlation": 1, "stream": 7, "device": 0, "Collective name": "allreduce",
                            "Process Group Ranks": "[0, 1]", "In msg nelems": 9, "dtype": "Float"}},
        {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#3", "pid": 1, "tid": 1, "ts": 0, "dur": 99},
    ] * 3  # fmt: skip
    text = json.dumps({"distributedInfo": {"rank": 0, "world_size": 2}, "traceEvents": events}).encode()
    yield "t.json", text
    yield "t.json.gz", gzip.compress(text)
    base = folder / "base.sqlite"
    base.unlink(missing_ok=True)
    with closing(sqlite3.connect(base)) as opened, opened:
        opened.execute("create table StringIds (id, value)")
        opened.execute("insert into StringIds values (1, 'nvjet_a')")
        columns = "start, end, deviceId, streamId, correlationId, demangledName"
        opened.execute(f"create table CUPTI_ACTIVITY_KIND_KERNEL ({columns})")
        opened.executemany(
            "insert into CUPTI_ACTIVITY_KIND_KERNEL values (?, ?, 0, 7, ?, 1)",
            [(n, n + 5, n) for n in range(40)],
        )
        opened.execute("create table NVTX_EVENTS (start, end, globalTid, text, textId, eventType)")
        opened.execute("insert into NVTX_EVENTS values (0, 9, 1, 'step 1', null, 59)")
    yield "t.sqlite", base.read_bytes()
    nodes = b""
    for number in range(1, 9):
        body = bytes([8, number, 18, 6]) + b"kernel" + bytes([24, 4, 42, 1, number - 1, 56, 3])
        nodes += bytes([len(body)]) + body
    yield "t.0.et", b"\x08\x0a\x06schema" + nodes
    head = "kernel_class,phase,layer_index,stream,start_us,duration_us,kernel_name_truncated\n"
    yield "t.csv", (head + "gemm_fp8_dense,attn(F),0,7,1,5,a\ncopy,attn(B),0,7,9,5,b\n" * 5).encode()


ODD = (
    b"NaN", b"-1", b"1e300", b"9" * 40, b"null", b"[]", b"{}", b'"', b"\\ud800", b"\xff\xfe", b"\x00", b"[" * 999,
    b"true", b'"x"', b"-0.0", b"9223372036854775807", b"2147483648",
)  # fmt: skip


def _spoilt(data: bytes, picker: random.Random) -> bytes:
    """One to four changes: bytes flipped, cut out, doubled, or replaced by something odd, also whole numbers."""
    for _ in range(picker.randint(1, 4)):
        at = picker.randrange(max(len(data), 1))
        size = picker.choice((1, 2, 8, 64))
        kind = picker.randrange(6)
        if kind == 0:
            data = data[:at] + bytes(picker.randrange(256) for _ in range(size)) + data[at + size :]
        elif kind == 1:
            data = data[:at] + data[at + size :]
        elif kind == 2:
            data = data[:at] + data[at : at + size] * 2 + data[at + size :]
        elif kind == 3:
            data = data[:at] if picker.random() < 0.2 else data[:at] + picker.choice(ODD) + data[at:]
        elif numbers := list(re.finditer(rb"-?\d+(?:\.\d+)?", data)):
            found = picker.choice(numbers)
            data = data[: found.start()] + picker.choice(ODD) + data[found.end() :]
    return data


def fuzz(folder: Path, cases: int) -> int:
    """Read spoilt traces; whatever is no InputError, or takes ten seconds, is a finding."""
    folder.mkdir(parents=True, exist_ok=True)
    resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
    findings = 0
    for name, data in list(_bases(folder)):
        counts = {"read": 0, "refused": 0, "broken": 0}
        for case in range(cases):
            picker = random.Random(f"{name} {case}")
            path = folder / name
            path.write_bytes(gzip.compress(_spoilt(gzip.decompress(data), picker)) if name.endswith("gz") and case % 2
                             else _spoilt(data, picker))  # fmt: skip
            signal.alarm(10)
            try:
                json.dumps(read(path).table(), allow_nan=False, ensure_ascii=False).encode()
                counts["read"] += 1
            except InputError:
                counts["refused"] += 1
            except Exception as error:
                counts["broken"] += 1
                shutil.copy(path, folder / f"finding-{case}-{name}")
                print(f"{name} case {case}: {error!r}"[:300])
            signal.alarm(0)
        findings += counts["broken"]
        print(f"{name}: {counts}", flush=True)
    return findings


def large(folder: Path, source: Path) -> None:
    """Copies of a step one after another up to 1 GB; the reader in a process of its own, thrice."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = folder / "whole.json"
    text = json.loads(gzip.decompress(source.read_bytes()))
    events = text.pop("traceEvents")
    span = max(event.get("ts", 0) for event in events) - min(
        event["ts"] for event in events if event.get("ts")
    )
    head = json.dumps({**text, "traceEvents": []})[:-2]
    with whole.open("w") as file:
        file.write(head)
        copy = 0
        while file.tell() < 1_000_000_000:
            for event in events:
                args = event.get("args") or {}
                moved = {
                    key: args[key] + 10_000_000 * copy
                    for key in ("correlation", "External id")
                    if key in args
                }
                name = event.get("name", "").replace("ProfilerStep#13", f"ProfilerStep#{13 + copy}")
                row = {
                    **event,
                    "name": name,
                    "ts": event.get("ts", 0) + copy * span * 1.01,
                    "args": {**args, **moved},
                }
                file.write((",\n" if file.tell() > len(head) else "") + json.dumps(row))
            copy += 1
        file.write("]}")
    size = whole.stat().st_size
    print(f"{copy} copies, {size:,} bytes, {copy * len(events):,} events")
    _measure(whole)
    with whole.open("r+b") as file:
        file.truncate(size * 9 // 10 + 7)
        _measure(whole)
        file.seek(size // 2)
        file.write(b'"nvj{"ph": "X", ')
    _measure(whole)
    whole.unlink()


def _measure(path: Path) -> None:
    code = (
        "import sys; from moesim.simulator.trace import read\n"
        f"t = read({str(path)!r}, said=lambda text: print(text, file=sys.stderr))\n"
        "print(len(t.ranks[0].events), len(t.ranks[0].steps), [n[:140] for n in t.notes if 'byte' in n][:3])"
    )
    begin, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    said = done.stderr.count("reading")
    print(f"{done.stdout.strip() or done.stderr[-300:]}: {time.perf_counter() - begin:.1f} s wall, {cpu:.1f} s CPU, "
          f"{after.ru_maxrss / 1e6:.2f} GB at most so far, progress {said} times", flush=True)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("draw", "fuzz", "large"))
    parser.add_argument("out", type=Path)
    parser.add_argument("traces", type=Path, nargs="*")
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=34)
    chosen = parser.parse_args()
    if chosen.part == "draw":
        draw(chosen.out, chosen.traces, chosen.seed)
    elif chosen.part == "large":
        large(chosen.out, chosen.traces[0])
    return fuzz(chosen.out, chosen.cases) if chosen.part == "fuzz" else 0


if __name__ == "__main__":
    raise SystemExit(main())
