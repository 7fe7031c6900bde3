"""Where dispatch and combine spend their time by number of SMs, and what engine and link allow.

    python -m moesim.kernels.calibrate.studies.link_pushes -o OUT.json --seconds 250 --before DIR

Every GPU of the machine is a rank with 4,096 tokens of 7,168, top-8 of 256 experts. Parts, written out one by
one: `dispatch` and `combine` time the kernels over SMs twice, by turns with those of DIR (dispatch.ptx with entry
dispatch_sys_v2, combine.ptx with entry combine_sys_v1) where given; `one_gpu` times them with eight ranks on one
GPU, which takes the link out and leaves what an SM can do; `stamps` adds clock marks of each CTA to the
same kernels; `copies` copies one way and both ways; `engine` only stores or only loads.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from moesim.kernels.calibrate.all_to_all import EXPERTS, HIDDEN, TOP_K
from moesim.kernels.catalog import KERNELS, SHARED_MEMORY_LIMIT_BYTES
from moesim.kernels.copy import copy_bulk, make_pairs
from moesim.kernels.expert_parallel import CombineRing, DispatchTuning, ExpertParallel, Shape
from moesim.kernels.inputs import bf16_rows, routing
from moesim.kernels.launch import GpuGroup, address
from moesim.kernels.loader import cupy
from moesim.kernels.machine import read_machine
from moesim.kernels.timing import StartGate, time_collective

SMS = (2, 4, 6, 8, 10, 12, 14, 16, 20, 24, 32)
COPY_SMS = (1, 2, 4, 6, 7, 8, 9, 10, 12, 16, 20, 24, 32)
PUSHERS = (6, 7, 8, 9, 10, 11, 12, 16, 32)
TUNINGS = {
    "fp8": ((1, 30, 8), (2, 30, 8), (3, 30, 4), (2, 30, 4), (4, 30, 4), (2, 30, 2)),
    "bf16": ((1, 16, 8), (1, 16, 4), (2, 16, 4), (2, 16, 2), (4, 16, 2), (1, 16, 2)),
}
"""Sending warps, ring rows and stores in flight, tried beside the default."""
ENGINE_PTX = Path(__file__).with_name("link_engine.ptx")
STAMP_WORDS = 16
"""64-bit words that a CTA's marks take, behind the first 64 bytes of the status block."""
MARKS = {
    "dispatch": {
        "start": ("    setp.ne.u32         %p, %warp, 0;\n    @%p bra             SENDER;\n", 0, "before"),
        "peers_done": ("    // Nothing is left for peers", 0, "before"),
        "loaded": ("LOADER_END:\n", 0, "after"),
        "sent": ("DRAIN:\n", 32, "after"),
        "written": ("    fence.proxy.async.global;\n\n", 32, "after"),
        "joined": ("    barrier.cta.sync    0;\n    setp.ge.u32         %p, %thread, %ranks;", 0, "before"),
        "released": ("    setp.ne.u32         %p, %cta, 0;\n    @%p bra             DONE;\n\n", 0, "before"),
        "end": ("    ret;\n}", 0, "before"),
        "end_of_lane_1": ("    ret;\n}", 1, "before"),
    },
    "combine": {
        "start": ("    mov.u32             %item, %cta;\n", 0, "before"),
        "ready": ("READY:\n", 0, "after"),
        "loaded": ("    ret;\n}", 0, "before"),
        "reduced": ("    ret;\n}", 32, "before"),
    },
}
"""Marks by kernel: where (text), by which thread of the CTA, on which side of the text."""


class Study:
    """The group, its gate, the rows measured so far, and where they are written."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Make a group of all GPUs."""
        self.deadline = time.monotonic() + options.seconds
        self.path, self.repeats, self.before = options.output, options.repeats, options.before
        self.group = GpuGroup(range(cupy().cuda.runtime.getDeviceCount()))
        self.gate = StartGate(self.group)
        self.stamps = self.group.symmetric((16 + 2 * STAMP_WORDS * 132,), "u4")
        self.rows: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self.result: dict[str, Any] = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": " ".join(sys.argv),
            "machine": str(read_machine()),
            "kernels_sha256": {name: KERNELS[name].digest() for name in ("dispatch", "combine", "notify")},
        }

    def time(
        self,
        what: str,
        sms: int,
        n_bytes: float,
        work: Callable[[int], None],
        before: Any = None,
        **more: Any,
    ) -> None:
        """Time one case on the slowest rank and keep a row; n_bytes gives GB/s. A failure loses this row only."""
        if time.monotonic() > self.deadline:
            self.notes.append(f"no time left for {what} with {sms} SMs")
            return
        try:
            ranks = more.pop("ranks", None)
            found = time_collective(
                self.group, work, repeats=self.repeats, gate=self.gate, before=before, ranks=ranks
            )
        except Exception as error:
            self.notes.append(f"{what} with {sms} SMs: {error!r}"[:400])
            return
        row = {"what": what, "sms": sms, **more, "us": round(found.median_s * 1e6, 2)}
        row |= {"iqr_us": round(found.iqr_s * 1e6, 2), "least_us": round(found.least_s * 1e6, 2)}
        row |= {"gb_per_s": round(n_bytes / found.median_s / 1e9, 1)}
        self.rows.append(row)

    def save(self) -> None:
        """Write everything measured so far."""
        self.result |= {"rows": self.rows, "notes": self.notes, "machine_after": str(read_machine())}
        self.path.write_text(json.dumps(self.result, indent=1))


@lru_cache(maxsize=64)
def _function(source: str, device: int) -> Any:
    """The only entry of a PTX text, on one device, with the largest shared memory."""
    name = re.findall(r"^\.visible \.entry (\w+)\(", source, re.MULTILINE)[0]
    folder = Path(tempfile.mkdtemp(prefix="moesim-study-"))
    (folder / f"{name}.ptx").write_text(source)
    with cupy().cuda.Device(device):
        function = cupy().RawModule(path=str(folder / f"{name}.ptx")).get_function(name)
        function.max_dynamic_shared_size_bytes = SHARED_MEMORY_LIMIT_BYTES
    return function


def launch(
    group: GpuGroup, rank: int, source: str, grid: int, block: int, arguments: tuple[Any, ...], shared: int
) -> None:
    """Queue a kernel of a PTX text on a rank's stream."""
    function = _function(source, group.devices[rank])
    with cupy().cuda.Device(group.devices[rank]), group.streams[rank]:
        function((grid,), (block,), arguments, shared_mem=shared)


def packed(text: str, values: tuple[int, ...]) -> tuple[Any, ...]:
    """Values as the types of "u64 a b; u32 c" in this order."""
    kinds = [kind for part in text.split(";") for kind, *names in [part.split()] for _ in names]
    types = {"u32": np.uint32, "u64": np.uint64}
    return tuple(types[kind](value) for kind, value in zip(kinds, values, strict=True))


def stamped(name: str, source: str) -> str:
    """The kernel's text with a clock mark at every place of MARKS[name] that it has, and the SM's number."""
    for slot, (mark, (text, thread, side)) in enumerate(MARKS[name].items()):
        if text not in source:
            if mark != "peers_done":
                raise ValueError(f"{name}: the place of mark {mark!r} is gone")
            continue
        code = _mark(8 * slot, thread, "mov.u64 %zv, %globaltimer;")
        if mark == "start":
            code += _mark(8 * (STAMP_WORDS - 1), thread, "mov.u32 %zc, %smid; cvt.u64.u32 %zv, %zc;")
        source = source.replace(text, code + text if side == "before" else text + code, 1)
    return source


def _mark(offset: int, thread: int, value: str) -> str:
    return (
        "{ .reg .pred %zp; .reg .b32 %zc; .reg .b64 %zv, %za;\n"
        f"    setp.eq.u32 %zp, %thread, {thread}; mov.u32 %zc, %ctaid.x; mad.wide.u32 %za, %zc, "
        f"{8 * STAMP_WORDS}, %status; {value}\n    @%zp st.global.u64 [%za + {64 + offset}], %zv; }}\n"
    )


def set_up(study: Study, fp8: bool) -> tuple[ExpertParallel, int]:
    """(buffers with random rows, routing and results after one dispatch; rows that cross the busiest link)."""
    group = study.group
    ep = ExpertParallel(group, Shape(4096, HIDDEN, TOP_K, EXPERTS, fp8))
    s, cp = ep.shape, cupy()
    for rank in range(group.ranks):
        rng = np.random.default_rng(7 + rank)
        block = bf16_rows(512, s.hidden, rng)
        with cp.cuda.Device(group.devices[rank]), group.streams[rank]:
            ep.topk_idx[rank].set(routing("balanced", s.tokens, s.k, s.experts, group.ranks, rng))
            ep.topk_w[rank].set(rng.random((s.tokens, s.k), dtype=np.float32))
            ep.weights[rank].set(rng.random((s.tokens, group.ranks), dtype=np.float32))
            ep.x[rank].set(rng.integers(0, 256, ep.x[rank].shape, dtype=np.uint8))
            for first in range(0, ep.capacity, 512):
                ep.results[rank][first : first + 512].set(block)
        group.streams[rank].synchronize()
    ep.layout()
    remote = np.array(ep.copies())
    np.fill_diagonal(remote, 0)
    ep.notify()
    ep.dispatch(8)
    group.synchronize()
    return ep, int(max(remote.sum(axis=0).max(), remote.sum(axis=1).max()))


def dispatch_by(
    study: Study, ep: ExpertParallel, source: str, sms: int, tuning: DispatchTuning, status: list[Any]
) -> None:
    """Queue a dispatch of another text, of today's parameters or those of dispatch_sys_v2, on every rank."""
    s, group, old = ep.shape, study.group, "dispatch_sys_v2" in source
    expected = ep.next_arrivals(sms)
    sizes = {"stages": tuning.stages, "row_bytes": s.row_bytes, "side_bytes": s.side_bytes}
    shared = KERNELS["dispatch"].shared_bytes(sizes)
    for rank in range(group.ranks):
        arrays = [ep.x, ep.side, ep.lists, ep.rank_counts, ep.bases, ep.dispatch_table]
        arrays += [] if old else [ep.claims]
        values = (
            *(address(a[rank]) for a in arrays), s.tokens, group.ranks, rank, s.row_bytes, s.side_bytes,
            tuning.stages, tuning.depth, 0 if old else tuning.pushers, expected, group.timeout_ns,
            address(status[rank]),
        )  # fmt: skip
        text = f"u64 {'a ' * len(arrays)}; u32 a b c d e f g h i; u64 t s"
        launch(group, rank, source, sms, 32 * (1 + tuning.warps), packed(text, values), shared)


def combine_by(
    study: Study, ep: ExpertParallel, source: str, sms: int, ring: CombineRing, status: list[Any]
) -> None:
    """Queue a weighted combine of another text on every rank; that of combine_sys_v1 has one ring and 480 threads."""
    group, old = study.group, "combine_sys_v1" in source
    epoch = ep.next_combine()
    for rank in range(group.ranks):
        arrays = (ep.combine_table, ep.slots, ep.bases, ep.weights, ep.out)
        values = (
            *(address(a[rank]) for a in arrays), ep.shape.tokens, group.ranks, rank, ring.part_bytes,
            ring.parts, ring.stages, epoch, group.timeout_ns, address(status[rank]),
        )  # fmt: skip
        block = 480 if old else 256 * ring.teams
        arguments = packed("u64 a b c d e; u32 a b c d e f g; u64 t s", values)
        launch(group, rank, source, sms, block, arguments, ring.shared_bytes)


def previous(study: Study, name: str) -> str | None:
    """The text of a kernel before the change, where a folder was given."""
    return (study.before / f"{name}.ptx").read_text() if study.before else None


def dispatches(study: Study) -> Iterator[tuple[str, ExpertParallel, int]]:
    """Payloads in turn: name, buffers, bytes over the busiest link."""
    for payload in ("fp8", "bf16"):
        ep, rows = set_up(study, payload == "fp8")
        yield payload, ep, rows * (ep.shape.row_bytes + ep.shape.side_bytes)
        del ep
        for device in study.group.devices:
            with cupy().cuda.Device(device):
                cupy().get_default_memory_pool().free_all_blocks()


def time_dispatch(study: Study) -> None:
    """Notify and dispatch over SMs, twice: before, now, and now with other numbers of pushing CTAs and rings."""
    for payload, ep, n_bytes in dispatches(study):
        tag, base = {"payload": payload}, ep.shape.dispatch_tuning
        align = lambda i: study.group.barrier()  # noqa: E731
        study.time("nothing", 0, 0, lambda i: None, align, **tag)
        study.time("notify", 0, 0, lambda i, e=ep: e.notify(), align, **tag)
        for turn in range(2):
            for sms in SMS:
                _dispatch_row(study, ep, "before", sms, n_bytes, base, turn=turn, **tag)
                for n in PUSHERS:
                    if n == base.pushers or (6 < sms and n <= max(sms, 16)):
                        _dispatch_row(
                            study, ep, "now", sms, n_bytes, replace(base, pushers=n),
                            turn=turn, pushers=n, default=n == base.pushers, **tag,
                        )  # fmt: skip
        for shape in TUNINGS[payload]:
            for sms in (4, 8, 16):
                tuning = DispatchTuning(*shape)
                _dispatch_row(study, ep, "tuned", sms, n_bytes, tuning, ring=list(shape), **tag)
        study.save()


def _dispatch_row(
    study: Study,
    ep: ExpertParallel,
    version: str,
    sms: int,
    n_bytes: int,
    tuning: DispatchTuning,
    **tags: Any,
) -> None:
    """Time notify and dispatch of one version; nothing where the text before the change is not given."""
    text = previous(study, "dispatch") if version == "before" else None
    if version == "before" and text is None:
        return

    def work(i: int) -> None:
        ep.notify()
        if text is None:
            ep.dispatch(sms, tuning=tuning)
        else:
            dispatch_by(study, ep, text, sms, tuning, study.group.status)

    study.time(f"dispatch {version}", sms, n_bytes, work, lambda i: study.group.barrier(), **tags)


def time_combine(study: Study) -> None:
    """Combine over SMs, twice: before, now, and now with other teams and pieces."""
    ep, rows = set_up(study, fp8=False)
    base = ep.shape.combine_ring(study.group.ranks)
    others = [
        ep.shape.combine_ring(study.group.ranks, teams, parts) for teams, parts in ((1, 1), (3, 1), (2, 2))
    ]
    for turn in range(2):
        for sms in SMS:
            _combine_row(study, ep, "before", sms, rows, CombineRing(1, 1, 2 * HIDDEN, 16), turn=turn)
            for ring in (base, *others):
                _combine_row(study, ep, "now", sms, rows, ring, turn=turn, default=ring == base)
    study.save()


def _combine_row(
    study: Study, ep: ExpertParallel, version: str, sms: int, rows: int, ring: CombineRing, **tags: Any
) -> None:
    """Time a combine of one version; nothing where the text before the change is not given."""
    text = previous(study, "combine") if version == "before" else None
    if version == "before" and text is None:
        return

    def work(i: int) -> None:
        if text is None:
            ep.combine(sms, ring=ring)
        else:
            combine_by(study, ep, text, sms, ring, study.group.status)

    tags |= {"teams": ring.teams, "parts": ring.parts, "stages": ring.stages}
    align = lambda i: study.group.barrier()  # noqa: E731
    study.time(f"combine {version}", sms, rows * 2 * HIDDEN, work, align, **tags)


def one_gpu(study: Study, ranks: int = 8) -> None:
    """Dispatch and combine of eight ranks on one GPU, before and now: what an SM does where no link is in the way."""
    group, gate = study.group, study.gate
    study.group = GpuGroup([0] * ranks)
    study.gate = StartGate(study.group)
    try:
        for payload, ep, _ in dispatches(study):
            for sms in (2, 4, 6, 8, 10, 12, 16):
                tag: dict[str, Any] = {"payload": payload, "one_gpu": ranks}
                n_bytes = int(np.array(ep.copies()).sum(axis=1).max()) * (
                    ep.shape.row_bytes + ep.shape.side_bytes
                )
                for version in ("before", "now"):
                    _dispatch_row(study, ep, version, sms, n_bytes, ep.shape.dispatch_tuning, **tag)
                if payload == "fp8":
                    continue
                rows = n_bytes // (ep.shape.row_bytes + ep.shape.side_bytes)
                for version in ("before", "now"):
                    ring = (
                        ep.shape.combine_ring(ranks)
                        if version == "now"
                        else CombineRing(1, 1, 2 * HIDDEN, 16)
                    )
                    _combine_row(study, ep, version, sms, rows, ring, one_gpu=ranks)
    finally:
        study.group, study.gate = group, gate
    study.save()


def _stamped_row(study: Study, name: str, sms: int, queue: Callable[[], None], **more: Any) -> None:
    """Run a stamped kernel five times and keep the last marks of each CTA, in us after the first CTA's start."""
    try:
        for _ in range(5):
            study.group.fill(study.stamps, 0)
            study.group.barrier()
            queue()
            study.group.synchronize()
        words = study.stamps[0].get().view(np.uint64)[8:].reshape(-1, STAMP_WORDS)[:sms]
    except Exception as error:
        study.notes.append(f"stamps of {name} with {sms} SMs: {error!r}"[:400])
        return
    first = int(words[:, 0].min())
    marks = {
        mark: [(int(v) - first) / 1e3 if v else None for v in words[:, slot]]
        for slot, mark in enumerate(MARKS[name])
    }
    study.rows.append(
        {"what": f"stamps of {name}", "sms": sms, **more, "sm": words[:, -1].tolist(), "marks_us": marks}
    )


def stamp(study: Study) -> None:
    """Marks of every CTA of rank 0: where the time of a launch goes."""
    for payload, ep, _ in dispatches(study):
        for version, text in (("before", previous(study, "dispatch")), ("now", KERNELS["dispatch"].source())):
            if text is None:
                continue
            source = stamped("dispatch", text)
            for sms in (8, 16, 20, 24):
                base = ep.shape.dispatch_tuning
                for pushers in (base.pushers, sms) if version == "now" else (base.pushers,):
                    tuning = replace(base, pushers=pushers)

                    def queue(n: int = sms, t: DispatchTuning = tuning, text: str = source) -> None:
                        ep.notify()
                        dispatch_by(study, ep, text, n, t, study.stamps)

                    _stamped_row(
                        study, "dispatch", sms, queue, payload=payload, version=version, pushers=pushers
                    )
        if payload == "fp8":
            continue
        for version, text in (("before", previous(study, "combine")), ("now", KERNELS["combine"].source())):
            if text is None:
                continue
            one = version == "before"
            ring = CombineRing(1, 1, 2 * HIDDEN, 16) if one else ep.shape.combine_ring(study.group.ranks)
            source = stamped("combine", text)
            for sms in (4, 8, 16, 24):
                _stamped_row(
                    study, "combine", sms,
                    lambda n=sms, r=ring, t=source: combine_by(study, ep, t, n, r, study.stamps),
                    version=version,
                )  # fmt: skip
    study.save()


def copies(study: Study, n_bytes: int = 64 << 20) -> None:
    """Plain bulk copies between two GPUs: local, push and pull, one way and both ways at once."""
    group = study.group
    rng = np.random.default_rng(1)
    noise = rng.integers(0, 256, n_bytes, dtype=np.uint8)
    source, target = group.to_ranks([noise] * group.ranks), group.symmetric((n_bytes,), "u1", 0xEE)
    ways = {"local": lambda r, o: (source[r], target[r]), "push": lambda r, o: (source[r], target[o])}
    ways["pull"] = lambda r, o: (source[o], target[r])
    for way, pick in ways.items():
        pairs = [make_pairs(group, r, [pick(r, (r + 1) % group.ranks)]) for r in range(group.ranks)]
        for used in ([0], list(range(group.ranks))):
            for sms in COPY_SMS:

                def work(i: int, n: int = sms, on: list[int] = used, p: Any = pairs) -> None:
                    for rank in on:
                        copy_bulk(group, rank, p[rank], n)

                align = (lambda i: group.barrier()) if len(used) > 1 else None
                study.time(f"copy {way}", sms, n_bytes, work, align, both=len(used) > 1, ranks=used)
    study.save()


def engine(study: Study) -> None:
    """Bulk stores without loads and loads without stores, to the own memory and to the next rank's."""
    group, source = study.group, ENGINE_PTX.read_text()
    areas = group.symmetric((96 << 20,), "u1", 0x5A)
    for where, shift in (("local", 0), ("peer", 1)):
        for is_load in (0, 1):
            for used in ([0], list(range(group.ranks))):
                for chunk in (3584, 7168, 14336) if len(used) == 1 else (7168,):
                    for sms in (1, 2, 4, 8, 12, 16, 20):
                        for warps in (1, 2):
                            n_bytes = (64 << 20) // (chunk * sms * warps) * chunk * sms * warps

                            def work(i: int, n: int = sms, w: int = warps, b: int = n_bytes, c: int = chunk,
                                     load: int = is_load, on: list[int] = used, by: int = shift) -> None:  # fmt: skip
                                for rank in on:
                                    area = address(areas[(rank + by) % group.ranks])
                                    arguments = packed("u64 a b; u32 c d", (area, b, c, load))
                                    launch(group, rank, source, n, 32 * w, arguments, w * 4 * (c + 8))

                            align = (lambda i: group.barrier()) if len(used) > 1 else None
                            study.time(
                                f"engine {'load' if is_load else 'store'} {where}", sms, n_bytes, work, align,
                                chunk=chunk, warps=warps, both=len(used) > 1, ranks=used,
                            )  # fmt: skip
    study.save()


PARTS: dict[str, Callable[[Study], None]] = {
    "dispatch": time_dispatch,
    "combine": time_combine,
    "one_gpu": one_gpu,
    "stamps": stamp,
    "copies": copies,
    "engine": engine,
}


def show(rows: list[dict[str, Any]]) -> None:
    """Print one line for every series over SMs, and a summary of the marks."""
    series: dict[str, list[str]] = {}
    for row in rows:
        tags = {
            k: v
            for k, v in row.items()
            if k
            in ("payload", "pushers", "teams", "parts", "ring", "both", "chunk", "warps", "one_gpu", "turn")
        }
        if "marks_us" not in row:
            name = f"{row['what']} {' '.join(f'{k}={v}' for k, v in tags.items())}"
            series.setdefault(name, []).append(f"{row['sms']}:{row['us']:.0f}({row['gb_per_s']:.0f})")
            continue
        parts = [f"stamps {row['what']} {row['version']} sms={row['sms']} {tags}"]
        for mark, values in row["marks_us"].items():
            kept = [v for v in values if v is not None]
            if kept:
                parts.append(f"{mark} {min(kept):.0f}/{statistics.median(kept):.0f}/{max(kept):.0f}")
        print("; ".join(parts))
    for name, values in series.items():
        print(name, " ".join(values))


def main() -> None:
    """Measure the parts named, print a table and write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=250.0, help="no case starts after this time")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--before", type=Path, help="folder with the kernels' texts before the change")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of: {', '.join(PARTS)}")
    options = parser.parse_args()
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # a queue for each rank where many share a GPU
    study = Study(options)
    for part in options.parts.split(","):
        began = time.monotonic()
        try:
            PARTS[part](study)
        except Exception:
            study.notes.append(f"part {part}: {traceback.format_exc()[-1500:]}")
        study.notes.append(f"part {part} took {time.monotonic() - began:.1f} s")
        study.save()
    show(study.rows)
    print("\n".join(study.notes))


if __name__ == "__main__":
    main()
