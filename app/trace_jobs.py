"""What job processes do for the page Trace: read an upload once, then set its steps beside others.

A read trace is kept in its folder for as long as a session shows it, so that another rank, step or scenario
needs no second reading; the files that were uploaded are deleted once they are read.
"""

from __future__ import annotations

import gzip
import json
import pickle
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from moesim.app import jobs, upload_files
from moesim.app.components.timeline.packing import PackedStep, packed_sides
from moesim.app.predictions import Progress, read_below
from moesim.hwmodels.errors import InputError
from moesim.simulator.scenario import Scenario
from moesim.simulator.trace import StepTrace, compare_output, read
from moesim.simulator.trace.compare import TraceComparison, compare, compare_with
from moesim.simulator.trace.partition import side_of

READ = "read.pickle"
"""Name of the read trace in the folder of a trace; only jobs write it."""
MOST_SHOWN_STEPS = 200

Download = Literal["json", "csv", "html", "perfetto"]


class TraceReading(Struct, frozen=True):
    """What the page shows of a trace: for each rank the tables of `StepTrace.table` that a person reads.

    `matched`: (class, rank, events, transfer ns, waiting ns) of collectives that several ranks hold.
    """

    source: str
    ranks: tuple[Mapping[str, Any], ...]
    matched: tuple[tuple[str, int, int, int, int], ...]
    notes: tuple[str, ...]


class TraceRequest(Struct, frozen=True):
    """A step of a trace, and what it is set beside: another trace, a scenario's prediction, or nothing.

    `rank` and `step`: None for those that `moesim trace compare` chooses.
    """

    folder: str
    token: str
    other: str | None = None
    scenario: Scenario | None = None
    rank: int | None = None
    step: int | None = None


class TraceView(Struct, frozen=True):
    """The chosen step of the chosen rank, drawn, and its comparison where there is one.

    `comparison`: as `TraceComparison.table` gives it.
    """

    rank: int
    step: str
    lines: PackedStep
    comparison: Mapping[str, Any] | None
    notes: tuple[str, ...]


def read_trace(folder: str, token: str, progress: Progress) -> TraceReading:
    """Read an uploaded trace, keep what was read, and delete the files; those of a refused one too."""
    read_below(folder)
    place = upload_files.trace_folder(token)
    if place is None:
        raise upload_files.forgotten()
    (inside,) = (path for path in place.iterdir() if path.name != READ)
    files = list(inside.iterdir())
    begun = 0

    def say(text: str) -> None:
        nonlocal begun
        begun += text.startswith("reading ") and ": " not in text
        progress((begun - 1) / len(files) if len(files) > 1 else None, text)

    try:
        trace = read(inside if len(files) > 1 else files[0], None, say)
        kept = place / f"{READ}.part"
        kept.write_bytes(pickle.dumps(trace, 5))
        kept.replace(place / READ)
        shutil.rmtree(inside, ignore_errors=True)
    except InputError as error:
        upload_files.drop_trace(token)
        raise InputError(str(error).replace(f"{inside}/", "").replace(str(inside), inside.name)) from None
    except OSError as error:
        upload_files.drop_trace(token)
        raise InputError(f"the server cannot keep the trace: {error.strerror or error}") from None
    return _summary(trace)


def _summary(trace: StepTrace) -> TraceReading:
    table, matched = trace.table(), dict[tuple[str, int], list[int]]()
    for row in trace.matched:
        into = matched.setdefault((row["class"], row["rank"]), [0, 0, 0])
        for place, value in enumerate((1, row["transfer_ns"], row["waiting_ns"])):
            into[place] += value
    shown = ("rank", "source", "gpu", "events", "how", "whole", "coverage", "classes", "communication")
    ranks = [
        {**{key: rank[key] for key in shown}, "steps": rank["steps"][:MOST_SHOWN_STEPS]}
        for rank in table["ranks"]
    ]
    rows = tuple((*key, *values) for key, values in sorted(matched.items()))
    return TraceReading(trace.source, tuple(ranks), rows, trace.notes)  # type: ignore[arg-type]


def kept_trace(folder: str, token: str) -> StepTrace:
    """A trace that was read; raises InputError where it is not on this server any more."""
    read_below(folder)
    place = upload_files.trace_folder(token)
    path = Path(folder) / "none" if place is None else place / READ
    try:
        trace: StepTrace = pickle.loads(path.read_bytes())
    except OSError:
        raise upload_files.forgotten() from None
    return trace


def _compared(trace: StepTrace, asked: TraceRequest) -> TraceComparison | None:
    chosen: dict[str, Any] = {"rank": asked.rank, "step": asked.step}
    if asked.other is not None:
        return compare(trace, kept_trace(asked.folder, asked.other), **chosen)
    if asked.scenario is not None:
        return compare_with(trace, jobs.admit(asked.scenario), **chosen)
    return None


def view(asked: TraceRequest) -> TraceView:
    """Draw a step of a trace, beside another one where that is asked; raises InputError as `compare` does."""
    trace = kept_trace(asked.folder, asked.token)
    found = _compared(trace, asked)
    if found is None:
        notes: list[str] = []
        side = side_of(trace, asked.rank, asked.step, notes)
        lines = packed_sides({"measured": side})
        return TraceView(side.rank.raw.rank, str(side.step["name"]), lines, None, tuple(notes))
    one, two = found.measured, found.other
    lines = packed_sides({"measured": one, "predicted" if asked.scenario is not None else "other": two})
    return TraceView(one.rank.raw.rank, str(one.step["name"]), lines, found.table(), found.notes)


def download(asked: TraceRequest, kind: Download) -> bytes:
    """A file of a comparison, or without one the whole reading as JSON."""
    trace = kept_trace(asked.folder, asked.token)
    found = _compared(trace, asked)
    if found is None:
        return (json.dumps(trace.table(), indent=1) + "\n").encode()
    if kind == "perfetto":
        text = json.dumps(compare_output.perfetto(found), separators=(",", ":"))
        return gzip.compress(text.encode(), compresslevel=6, mtime=0)
    texts = {"csv": compare_output.bars_csv, "html": compare_output.page}
    return (texts[kind](found) if kind in texts else json.dumps(found.table(), indent=1) + "\n").encode()
