"""A comparison as CSV, as one HTML page that loads nothing, and as a Perfetto trace of both steps."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from moesim.simulator.predict.trace import microseconds, trace_path, write_events
from moesim.simulator.trace.classes import CLASSES
from moesim.simulator.trace.compare import TraceComparison
from moesim.simulator.trace.events import PHASES
from moesim.simulator.trace.partition import StepSide


def bars_csv(found: TraceComparison) -> str:
    """The bars as CSV, with the steps' wall times in the last row; nanoseconds."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["part", "kind", "measured_ns", "other_ns", "difference_ns"])
    for row in found.bars:
        writer.writerow([row[key] for key in ("part", "kind", "measured_ns", "other_ns", "difference_ns")])
    writer.writerow(["step", "wall", found.measured.wall_ns, found.other.wall_ns, found.gap_ns])
    return text.getvalue()


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<style>body{{font:15px/1.45 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem}}
table{{border-collapse:collapse;width:100%}}td,th{{padding:.2rem .5rem;border-bottom:1px solid #ddd;text-align:left}}
td.n{{text-align:right;font-variant-numeric:tabular-nums}}.bar{{height:.8rem}}.more{{background:#c0392b}}
.less{{background:#2e86ab}}.cause{{font-weight:600}}small{{color:#555}}</style></head><body>
<h1>{title}</h1><p>{summary}</p>
<h2>Why</h2><ol>{findings}</ol>
<h2>Waterfall</h2><table><tr><th>part<th>kind<th>measured, ms<th>other, ms<th>difference, ms<th></tr>{bars}</table>
<h2>Kernels that the other side does not have</h2><table><tr><th>kernel<th>class<th>ms<th>events</tr>{unpriced}</table>
<h2>Notes</h2><ul>{notes}</ul></body></html>
"""  # noqa: E501 - one line of markup each


def page(found: TraceComparison) -> str:
    """The comparison as one HTML page; every name is escaped, nothing is loaded or run."""
    one, two = found.measured, found.other
    widest = max((abs(row["difference_ns"]) for row in found.bars), default=0) or 1
    bars = "".join(
        f"<tr><td>{escape(row['part'])}<td>{row['kind']}"
        + "".join(
            f"<td class=n>{row[key] / 1e6:,.3f}" for key in ("measured_ns", "other_ns", "difference_ns")
        )
        + f"<td><div class='bar {'more' if row['difference_ns'] > 0 else 'less'}' "
        f"style='width:{100 * abs(row['difference_ns']) / widest:.1f}%'></div></tr>"
        for row in found.bars
    )
    findings = "".join(
        f"<li><span class=cause>{finding.role}</span>, {finding.ns / 1e6:+,.2f} ms: {escape(finding.text)}"
        f"<br><small>{escape(finding.check)}</small></li>"
        for finding in found.findings
    )
    unpriced = "".join(
        f"<tr><td>{escape(row['kernel'])}<td>{escape(row['class'])}<td class=n>{row['ns'] / 1e6:,.3f}"
        f"<td class=n>{row['events']}</tr>"
        for row in found.unpriced
    )
    summary = (
        f"{one.label}, rank {one.rank.raw.rank}, {one.step['name']}: {one.wall_ns / 1e6:,.3f} ms; "
        f"{two.label}: {two.wall_ns / 1e6:,.3f} ms; gap {found.gap_ns / 1e6:+,.3f} ms, the sum of the bars."
    )
    notes = "".join(f"<li>{escape(note)}</li>" for note in found.notes)
    title = escape(f"{one.label} beside {two.label}")
    return _PAGE.format(
        title=title, summary=escape(summary), findings=findings, bars=bars, unpriced=unpriced, notes=notes
    )


def perfetto(found: TraceComparison) -> dict[str, Any]:
    """Both steps as Trace Event Format, process 1 measured and 2 the other, aligned at their starts."""
    events: list[dict[str, Any]] = []
    for pid, side in enumerate((found.measured, found.other), 1):
        name = f"{'measured' if pid == 1 else 'other'}: {side.label}, rank {side.rank.raw.rank}"
        for what, args in (("process_name", {"name": name}), ("process_sort_index", {"sort_index": pid})):
            events.append({"ph": "M", "pid": pid, "tid": 0, "name": what, "args": args})
        events += _tracks(side, pid)
    return {"schemaVersion": 1, "displayTimeUnit": "ms", "traceEvents": events}


def _tracks(side: StepSide, pid: int) -> Iterator[dict[str, Any]]:
    """Events of a side by stream; those that overlap on a stream get a lane of their own."""
    begin, names = int(side.step["start_ns"]), side.rank.names
    free: dict[tuple[int, int], int] = {}
    tracks: dict[tuple[int, int], int] = {}
    columns = (
        side.events[key].tolist() for key in ("start", "end", "stream", "name", "cls", "phase", "layer")
    )
    for start, end, stream, name, cls, phase, layer in sorted(zip(*columns, strict=True)):
        lane = 0
        while free.get((stream, lane), start) > start:
            lane += 1
        free[stream, lane] = end
        if (stream, lane) not in tracks:
            tracks[stream, lane] = len(tracks) + 1
            text = f"stream {stream}" + f", lane {lane + 1}" * bool(lane)
            yield {"ph": "M", "pid": pid, "tid": tracks[stream, lane], "name": "thread_name",
                   "args": {"name": text}}  # fmt: skip
        if end > start:
            yield {
                "ph": "X", "cat": "kernel", "pid": pid, "tid": tracks[stream, lane],
                "name": names[name] if name >= 0 else CLASSES[cls],
                "ts": microseconds(start - begin), "dur": microseconds(end - start),
                "args": {"class": CLASSES[cls], "phase": PHASES[phase], "layer": layer, "stream": stream},
            }  # fmt: skip


def write_perfetto(path: Path, found: TraceComparison) -> None:
    """Write `perfetto` to a .json or .json.gz file; raises InputError for other names, missing folders."""
    trace = perfetto(found)
    write_events(
        trace_path(path), {key: trace[key] for key in trace if key != "traceEvents"}, trace["traceEvents"]
    )
