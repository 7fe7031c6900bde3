"""The page Trace: a profiler's trace of a step, what it is made of, and what it has beside a prediction."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import streamlit as st
from streamlit.runtime.scriptrunner import get_script_run_ctx

from moesim.app import (
    exports,
    forms,
    jobs,
    long_work,
    pages,
    state,
    trace_jobs,
    upload_files,
    uploads,
    widgets,
)
from moesim.app.charts import differences as charts
from moesim.app.components.timeline import canvas
from moesim.app.texts import escaped
from moesim.app.trace_jobs import Download, TraceReading, TraceRequest, TraceView
from moesim.hwmodels.errors import MoesimError
from moesim.hwmodels.units import in_unit

PREDICTION, OTHER, NOTHING = "the prediction", "another trace", "nothing"
REFUSED = "trace refused"
"""Session key with the reason why the files of the last click were not read."""
MOST_NOTES = 8
MOST_BARS = 12
MOST_NAME = 120
TIMES = {
    "Step": ("wall_ns", "from the first to the last GPU activity that belongs to the step"),
    "Busy": ("busy_ns", "at least one kernel or copy runs"),
    "Computing": ("compute_ns", "at least one kernel other than communication runs"),
    "Exposed communication": ("exposed_communication_ns", "communication runs and no kernel computes"),
    "Idle": ("idle_ns", "nothing runs on the GPU"),
}
"""Tiles of a step: key of the figure, and what it counts."""


def show() -> None:
    """Draw the page."""
    st.caption(
        "Kineto or Chrome JSON (plain, gz, zst), Nsight Systems SQLite, Chakra execution traces; one "
        "file, or one per rank. Files stay on this server and are deleted once they are read; what was "
        "read is dropped when you leave. Nothing in a file is executed."
    )
    left, right = st.columns(2)
    with left:
        token = _given("own", "Your trace")
    with right:
        untouched = state.preset() == pages.HOME and not state.overrides()
        choices = [PREDICTION, OTHER, NOTHING]
        beside = forms.one_of(
            st.selectbox,
            "Compare it with",
            "trace.beside",
            choices,
            NOTHING if untouched else PREDICTION,
            key="trace beside",
            help="The prediction is that of the scenario in the bar above; choose or upload yours there.",
        )
        other = _given("other", "The other trace") if beside == OTHER else None
    if REFUSED in st.session_state:
        st.error(escaped(st.session_state.pop(REFUSED)), icon=":material/error:")
    reading = None if token is None else _reading("own", token)
    second = None if other is None else _reading("other", other)
    if token is None or reading is None:
        return
    rank, step = _chosen(reading)
    asked = TraceRequest(str(uploads.folder()), token, other if second else None, None, rank, step)
    # A scenario that cannot be predicted leaves the reading as it is.
    widgets.guard(lambda: _beside(reading, asked, beside))
    _rank_tables(_rank(reading, rank))
    if reading.matched:
        header = ("collective on several ranks", "rank", "kernels", "transfer (ms)", "waiting (ms)")
        rows = [(*row[:3], row[3] / 1e6, row[4] / 1e6) for row in reading.matched]
        widgets.table(header, rows, key="trace matched")
    _notes("Notes on how the trace was read", reading.notes)


# -- uploads and readings ------------------------------------------------------------------------------


def _given(place: str, label: str) -> str | None:
    """Offer an uploader; return the token of the trace of this place that is on the server."""
    key = f"trace {place} upload {st.session_state.get(f'trace {place}', 0)}"
    files = st.file_uploader(
        f"{label}, up to {upload_files.MOST_FILE_MB:,} MB a file",
        key=key,
        accept_multiple_files=True,
        max_upload_size=upload_files.MOST_FILE_MB,
        help="For several ranks, choose all of their files together, then read them.",
    )
    if files:
        text = f"Read {len(files)} ranks" if len(files) > 1 else "Read the trace"
        widgets.button(text, f"read {place}", _take, place, key, type="primary")
    token = forms.value(f"trace.{place}", None, lambda found: isinstance(found, str))
    if token is None:
        return None
    if upload_files.trace_folder(token) is None:
        try:  # a refused trace is gone as well, and the reason of its job is told first
            long_work.taken_up(f"trace {place}", _work(token)[0])
        except MoesimError as error:
            forms.put(f"trace.{place}", None)
            st.session_state[REFUSED] = str(error)
            return None
        st.info("The trace of this link is no longer on this server: upload it again.")
        return None
    upload_files.hold_trace(token, _session())
    return str(token)


def _session() -> str:
    return getattr(get_script_run_ctx(), "session_id", "")


def _take(place: str, key: str) -> None:
    """Move the uploaded files together and start reading them; the uploader is empty again."""
    try:
        token = upload_files.keep_trace(st.session_state[key], _session())
    except MoesimError as error:
        st.session_state[REFUSED] = str(error)
    else:
        for name in ("rank", "step"):
            forms.put(f"trace.{name}", None)
        forms.put(f"trace.{place}", token)
        long_work.start_on_click(f"trace {place}", *_work(token))
    st.session_state[f"trace {place}"] = st.session_state.get(f"trace {place}", 0) + 1


def _work(token: str) -> tuple[Any, ...]:
    return f"trace/{token}", trace_jobs.read_trace, str(uploads.folder()), token


def _reading(place: str, token: str) -> TraceReading | None:
    """What was read, or None while it is read; raises what was wrong with the files and forgets them."""
    try:
        key, *work = _work(token)
        found: TraceReading | None = long_work.long_work(f"trace {place}", key, "Read the trace again", *work)
        return found
    except MoesimError:
        upload_files.drop_trace(token)
        forms.put(f"trace.{place}", None)
        raise


def _chosen(reading: TraceReading) -> tuple[int | None, int | None]:
    """The rank and step that the visitor chose; None for the one of the rule."""
    ranks = [rank["rank"] for rank in reading.ranks]
    left, right = st.columns(2)
    rank = step = None
    if len(ranks) > 1:
        show: dict[str, Any] = {
            "format_func": lambda number: (
                "the rank that others wait for" if number is None else f"rank {number}"
            ),
            "key": "trace rank",
        }
        rank = forms.one_of(left.selectbox, "Rank", "trace.rank", [None, *ranks], None, **show)
    names = {row["number"]: str(row["name"]) for row in _rank(reading, rank)["steps"]}
    if len(names) > 1:
        show = {
            "format_func": lambda number: (
                "the step of median time" if number is None else escaped(names[number])
            ),
            "key": "trace step",
        }
        step = forms.one_of(right.selectbox, "Step", "trace.step", [None, *names], None, **show)
    return rank, step


def _rank(reading: TraceReading, number: int | None) -> Mapping[str, Any]:
    return next((rank for rank in reading.ranks if rank["rank"] == number), reading.ranks[0])


# -- a step, and what stands beside it -----------------------------------------------------------------


def _beside(reading: TraceReading, asked: TraceRequest, beside: str) -> None:
    """The step's figures, its time line, and its comparison where there is one."""
    scenario = state.current() if beside == PREDICTION else None
    asked = TraceRequest(asked.folder, asked.token, asked.other, scenario, asked.rank, asked.step)
    texts = (asked.token, asked.other, scenario and state.cache_key(scenario), asked.rank, asked.step)
    key = f"trace view/{hashlib.sha256(repr(texts).encode()).hexdigest()}"
    try:
        found: TraceView | None = long_work.value("trace", key, "comparing the steps", trace_jobs.view, asked)
    except MoesimError as error:
        if asked.other is None and scenario is None:
            raise
        st.error(f"No comparison: {escaped(error)}", icon=":material/error:")
        _beside(reading, TraceRequest(asked.folder, asked.token, rank=asked.rank, step=asked.step), NOTHING)
        return
    if found is None:
        return
    rank = _rank(reading, found.rank)
    step = next((row for row in rank["steps"] if str(row["name"]) == found.step), None)
    st.header(f"{escaped(found.step)} of rank {found.rank}", anchor=False)
    if step is not None:
        with st.container(key="tiles-trace"):
            for place, (label, (name, meaning)) in zip(st.columns(len(TIMES)), TIMES.items(), strict=True):
                place.metric(label, _ms(step[name]), help=f"Time in which {meaning}")
        causes = [f"{k.replace('_', ' ')} {_ms(ns)}" for k, ns in step["idle_by_cause_ns"].items() if ns]
        if causes:
            st.caption(f"Idle by cause: {', '.join(causes)}.")
    comparison = found.comparison
    if comparison is not None:
        _comparison(comparison)
    st.header("Time line", anchor=False)
    if not found.lines.whole:
        st.caption(f"The longest {found.lines.events:,} events of the step; the trace has all.")
    with st.container(key="trace-canvas"):
        canvas.draw(found.lines, -1, key="trace canvas")
    if comparison is not None:
        _unpriced(comparison["unpriced"])
    _downloads(key, asked, reading, comparison)
    if comparison is not None:
        _notes("How the two steps were matched", [n for n in found.notes if n not in reading.notes])


def _ms(ns: int) -> str:
    return f"{in_unit(ns / 1e9, 'ms', 's'):,.2f} ms"


def _comparison(found: Mapping[str, Any]) -> None:
    one, other, gap = found["measured"], found["other"], found["gap_ns"]
    st.header("Where the difference comes from", anchor=False)
    st.markdown(
        f"**{_ms(one['wall_ns'])}** measured, **{_ms(other['wall_ns'])}** in {escaped(other['label'])}: "
        f"**{gap / 1e6:+,.2f} ms**, the sum of the bars."
    )
    bars = [(_part(row), row["difference_ns"] / 1e9) for row in found["bars"] if row["difference_ns"]]
    chart = charts.waterfall(
        escaped(other["label"])[:30],
        other["wall_ns"] / 1e9,
        bars,
        "measured",
        one["wall_ns"] / 1e9,
        MOST_BARS,
    )
    chart.update_xaxes(title="part of the step")
    widgets.figure(chart, f"Waterfall from {other['label']} to the measured step", key="trace waterfall")
    for number, row in enumerate(found["findings"], 1):
        size = f", {row['ns'] / 1e6:+,.2f} ms" if row["ns"] else ""
        st.markdown(f"{number}. **{row['role'].capitalize()}**{size}: {escaped(row['text'])}")
        st.caption(f":material/build: {escaped(row['check'])}")
    if not found["findings"]:
        st.info("No part of the steps differs by more than 0.2 % of the measured step.")
    with st.expander("Every part and every class"):
        header = ("part", "kind", "measured (ms)", "other (ms)", "difference (ms)")
        keys = ("measured_ns", "other_ns", "difference_ns")
        rows = [(row["part"], row["kind"], *(row[key] / 1e6 for key in keys)) for row in found["bars"]]
        widgets.table(header, rows, key="trace parts")
        header = ("class", "measured (ms)", "other (ms)", "kernels", "kernels, other")
        rows = [
            (
                row["class"],
                row["measured_ns"] / 1e6,
                row["other_ns"] / 1e6,
                row["measured_events"],
                row["other_events"],
            )
            for row in found["classes"]
        ]
        widgets.table(header, rows, key="trace classes compared")


def _part(row: Mapping[str, Any]) -> str:
    """The name of a bar; a class that computes and waits has two."""
    name = str(row["part"]).replace("_", " ")
    return name if row["kind"] == "compute" else f"{name}, {row['kind'].replace('communication', 'comm.')}"


def _unpriced(rows: Sequence[Mapping[str, Any]]) -> None:
    if not rows:
        return
    with st.expander(f"Kernels that the other side does not have ({len(rows)})"):
        cells = [(row["kernel"][:MOST_NAME], row["class"], row["ns"] / 1e6, row["events"]) for row in rows]
        widgets.table(("kernel", "class", "ms", "kernels"), cells, key="trace unpriced")


def _downloads(
    key: str, asked: TraceRequest, reading: TraceReading, comparison: Mapping[str, Any] | None
) -> None:
    kinds: dict[Download, tuple[str, str, str]] = {"json": ("JSON", "json", "application/json")}
    if comparison is not None:
        kinds |= {
            "csv": ("Bars (CSV)", "csv", "text/csv"),
            "html": ("Page (HTML)", "html", "text/html"),
            "perfetto": ("Perfetto, both steps", "trace.json.gz", "application/gzip"),
        }

    def made(kind: Download) -> bytes:
        data: bytes = jobs.submit(f"{key}/{kind}", trace_jobs.download, asked, kind).result(jobs.SHORT_S)
        return data

    with st.container(horizontal=True):
        for kind, (label, ending, mime) in kinds.items():
            name = exports.file_name(f"{reading.source}-compared" if comparison else reading.source, ending)
            widgets.download(label, lambda kind=kind: made(kind), name, mime, key=f"trace {kind}")


# -- the reading alone ---------------------------------------------------------------------------------


def _rank_tables(rank: Mapping[str, Any]) -> None:
    """Classes and communication of a rank over its whole trace."""
    st.header(f"What rank {rank['rank']} ran", anchor=False)
    how, share = rank["how"], rank["coverage"]
    st.caption(
        f"{rank['events']:,} GPU events on {escaped(rank['gpu'] or 'a GPU that the trace does not name')}; "
        f"{share['classified']:.1%} of GPU time has a known class, {share['not_in_model']:.1%} no part in "
        f"our model. Steps: {escaped(how['steps'])}. Layers: {escaped(how['layers'])}."
    )
    header = ("class", "ms", "kernels", "share", "phases (ms)")
    rows = [
        (
            row["class"], row["ns"] / 1e6, row["events"], row["share"],
            ", ".join(f"{phase} {ns / 1e6:,.2f}" for phase, ns in row["phases_ns"].items()),
        )
        for row in rank["classes"]
    ]  # fmt: skip
    formats = {
        "ms": st.column_config.NumberColumn(format="%.3f"),
        "share": st.column_config.NumberColumn(format="percent"),
    }
    widgets.table(header, rows, column_config=formats, key="trace classes")
    name = exports.file_name(f"{rank['source']}-classes", "csv")
    widgets.download("Classes (CSV)", exports.csv_text(header, rows), name, key="trace classes csv")
    if rank["communication"]:
        header = ("communication", "where", "kernels", "ms", "GB/s")
        talks = [
            (
                row["class"],
                row["where"],
                row["events"],
                row["ns"] / 1e6,
                (row["bytes_per_s"] or 0.0) / 1e9 or None,
            )
            for row in rank["communication"]
        ]
        widgets.table(header, talks, column_config={"GB/s": st.column_config.NumberColumn(format="%.1f")})


def _notes(title: str, notes: Sequence[str]) -> None:
    if not notes:
        return
    st.header(title, anchor=False)
    st.markdown("\n".join(f"- {escaped(note)}" for note in notes[:MOST_NOTES]))
    if len(notes) > MOST_NOTES:
        with st.expander(f"{len(notes) - MOST_NOTES} more"):
            st.markdown("\n".join(f"- {escaped(note)}" for note in notes[MOST_NOTES:200]))
