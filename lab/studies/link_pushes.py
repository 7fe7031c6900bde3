"""Where dispatch and combine spend their time by number of SMs, and what engine and link allow.

    python -m lab.studies.link_pushes -o OUT.json --seconds 250 --before DIR

Every GPU of the machine is a rank with 4,096 tokens of 7,168, top-8 of 256 experts. Parts, written out one by
one: `dispatch` and `combine` time the kernels over SMs twice, by turns with those of DIR where given
(dispatch.ptx with entry dispatch_sys_v3, combine.ptx with entry combine_sys_v1); `one_gpu` times them with
eight ranks on one GPU, which takes the link out and leaves what an SM can do; `stamps` adds clock marks of
each CTA to the kernels; `copies` copies one way and both ways; `engine` only stores or only loads. Dispatch
is also timed without own rows, and with all tokens of the own rank copied by a copy engine beside it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lab.studies.link_copies import copies, engine
from lab.studies.link_kernels import (
    MARKS,
    STAMP_WORDS,
    OwnRowsCopy,
    combine_by,
    dispatch_by,
    set_up,
    stamped,
)
from moesim.kernels.calibrate.links import HIDDEN
from moesim.kernels.catalog import KERNELS
from moesim.kernels.expert_parallel import CombineRing, DispatchTuning, ExpertParallel
from moesim.kernels.launch import GpuGroup
from moesim.kernels.launch import cupy
from moesim.kernels.machine import read_machine
from lab.benchmarks.collective_times import time_collective
from moesim.kernels.timing import StartGate

SMS = (2, 4, 6, 8, 10, 12, 14, 16, 20, 24, 32)
TUNINGS = {
    "fp8": ((1, 8, 2, 2), (2, 15, 4, 2), (2, 30, 8, 1), (2, 7, 2, 4), (2, 4, 1, 2)),
    "bf16": ((1, 8, 2, 1), (2, 16, 4, 1), (2, 8, 2, 2), (2, 5, 2, 1)),
}
"""Sending warps, ring stages, stages left unread and tokens a stage, tried beside the default."""
BEFORE = {"fp8": DispatchTuning(2, 30, 8), "bf16": DispatchTuning(1, 16, 8)}
"""The rings of dispatch_sys_v3."""


class LinkStudy:
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
        """Time one case on the slowest rank and keep a row; a failure loses only this row."""
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


def previous(study: LinkStudy, name: str) -> str | None:
    """The text of a kernel before the change, where a folder was given."""
    path = study.before / f"{name}.ptx" if study.before else None
    return path.read_text() if path and path.exists() else None


def dispatches(study: LinkStudy) -> Iterator[tuple[str, ExpertParallel, int]]:
    """Payloads in turn: name, buffers, bytes over the busiest link."""
    for payload in ("fp8", "bf16"):
        ep, rows = set_up(study.group, payload == "fp8")
        yield payload, ep, rows * (ep.shape.row_bytes + ep.shape.side_bytes)
        del ep
        for device in study.group.devices:
            with cupy().cuda.Device(device):
                cupy().get_default_memory_pool().free_all_blocks()


def time_dispatch(study: LinkStudy) -> None:
    """Notify and dispatch over SMs, twice: before and now, and now with other rings."""
    for payload, ep, n_bytes in dispatches(study):
        tag, base = {"payload": payload}, ep.shape.dispatch_tuning(study.group.ranks)
        engine_copy = OwnRowsCopy(study.group, ep)
        align = lambda i: study.group.barrier()  # noqa: E731
        study.time("nothing", 0, 0, lambda i: None, align, **tag)
        study.time("notify", 0, 0, partial(_notify, ep), align, **tag)
        for turn in range(2):
            for sms in SMS:
                _dispatch_row(study, ep, "before", sms, n_bytes, BEFORE[payload], turn=turn, **tag)
                for version in ("now", "now without own rows"):
                    _dispatch_row(study, ep, version, sms, n_bytes, base, turn=turn, **tag)
                work = partial(_with_copy, ep, engine_copy, sms)
                what = "dispatch now, own rows by copy engine"
                study.time(what, sms, n_bytes, work, align, turn=turn, **tag)
        for shape in TUNINGS[payload]:
            for sms in (4, 8, 16):
                tuning = DispatchTuning(*shape)
                _dispatch_row(study, ep, "tuned", sms, n_bytes, tuning, ring=list(shape), **tag)
        study.save()


def _with_copy(ep: ExpertParallel, copy: OwnRowsCopy, sms: int, i: int) -> None:
    ep.notify()
    copy.start()
    ep.dispatch(sms, own=False)
    copy.join()


def _notify(ep: ExpertParallel, i: int) -> None:
    ep.notify()


def _dispatch_row(
    study: LinkStudy,
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
            ep.dispatch(sms, tuning=tuning, own="without own" not in version)
        else:
            dispatch_by(study.group, ep, text, sms, tuning, study.group.status)

    study.time(f"dispatch {version}", sms, n_bytes, work, lambda i: study.group.barrier(), **tags)


def time_combine(study: LinkStudy) -> None:
    """Combine over SMs, twice: before, now, and now with other teams and pieces."""
    ep, rows = set_up(study.group, fp8=False)
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
    study: LinkStudy, ep: ExpertParallel, version: str, sms: int, rows: int, ring: CombineRing, **tags: Any
) -> None:
    """Time a combine of one version; nothing where the text before the change is not given."""
    text = previous(study, "combine") if version == "before" else None
    if version == "before" and text is None:
        return

    def work(i: int) -> None:
        if text is None:
            ep.combine(sms, ring=ring)
        else:
            combine_by(study.group, ep, text, sms, ring, study.group.status)

    tags |= {"teams": ring.teams, "parts": ring.parts, "stages": ring.stages}
    align = lambda i: study.group.barrier()  # noqa: E731
    study.time(f"combine {version}", sms, rows * 2 * HIDDEN, work, align, **tags)


def one_gpu(study: LinkStudy, ranks: int = 8) -> None:
    """Dispatch and combine of eight ranks on one GPU, before and now, where no link is in the way."""
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
                for version, tuning in (
                    ("before", BEFORE[payload]),
                    ("now", ep.shape.dispatch_tuning(ranks)),
                ):
                    _dispatch_row(study, ep, version, sms, n_bytes, tuning, **tag)
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


def _stamped_row(study: LinkStudy, name: str, sms: int, queue: Callable[[], None], **more: Any) -> None:
    """Run a stamped kernel five times and keep the last marks of each CTA, in us after the first start."""
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


def stamp(study: LinkStudy) -> None:
    """Marks of every CTA of rank 0: where the time of a launch goes."""
    for payload, ep, _ in dispatches(study):
        for version, text in (("before", previous(study, "dispatch")), ("now", KERNELS["dispatch"].source())):
            for sms in (8, 16, 20, 24):
                queue = partial(_dispatch_stamped, study, ep, text or "", sms)
                if text is not None:
                    _stamped_row(study, "dispatch", sms, queue, payload=payload, version=version)
        if payload == "fp8":
            continue
        rings = {"before": CombineRing(1, 1, 2 * HIDDEN, 16), "now": ep.shape.combine_ring(study.group.ranks)}
        for version, text in (("before", previous(study, "combine")), ("now", KERNELS["combine"].source())):
            for sms in (4, 8, 16, 24):
                queue = partial(_combine_stamped, study, ep, text or "", sms, rings[version])
                if text is not None:
                    _stamped_row(study, "combine", sms, queue, version=version)
    study.save()


def _dispatch_stamped(study: LinkStudy, ep: ExpertParallel, text: str, sms: int) -> None:
    ep.notify()
    marked = stamped("dispatch", text)
    old = "dispatch_sys_v3" in text
    tuning = BEFORE["fp8" if ep.shape.fp8 else "bf16"] if old else ep.shape.dispatch_tuning(study.group.ranks)
    dispatch_by(study.group, ep, marked, sms, tuning, study.stamps)


def _combine_stamped(study: LinkStudy, ep: ExpertParallel, text: str, sms: int, ring: CombineRing) -> None:
    combine_by(study.group, ep, stamped("combine", text), sms, ring, study.stamps)


PARTS: dict[str, Callable[[LinkStudy], None]] = {
    "dispatch": time_dispatch,
    "combine": time_combine,
    "one_gpu": one_gpu,
    "stamps": stamp,
    "copies": lambda study: copies(study.group, study.time),
    "engine": lambda study: engine(study.group, study.time),
}


def show(rows: list[dict[str, Any]]) -> None:
    """Print one line for every series over SMs, and a summary of the marks."""
    series: dict[str, list[str]] = {}
    for row in rows:
        tags = {
            k: v
            for k, v in row.items()
            if k in ("payload", "teams", "parts", "ring", "both", "chunk", "warps", "one_gpu", "turn")
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
    study = LinkStudy(options)
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
