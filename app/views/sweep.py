"""The page Sweep: the scenario at every combination of some values, in a store that outlives each run."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import streamlit as st

from moesim.app import (
    exports,
    forms,
    jobs,
    long_work,
    predictions,
    state,
    sweeps,
    upload_files,
    uploads,
    visitors,
    widgets,
)
from moesim.app.charts import sweep as charts
from moesim.app.texts import escaped, written
from moesim.app.tray import tray
from moesim.app.views import headline
from moesim.hwmodels.errors import MoesimError
from moesim.hwmodels.units import in_unit
from moesim.simulator.predict.figures import POWERS
from moesim.simulator.predict.work_size import Band
from moesim.simulator.scenario import Scenario
from moesim.simulator.schedules import SCHEDULES
from moesim.simulator.studies.sweep import Survey, SweepPoint

# -- sweep answer ------------------------------------------------------------------------------------
# The answer of a sweep: its picture, its best point, and its points as a table that can be filtered.

FIGURES: dict[str, tuple[str, bool]] = {
    "step_time_s": ("step time (s)", False),
    "tokens_per_s_per_gpu": ("tokens/s/GPU", True),
    "mfu_causal": ("MFU, causal", True),
    "cost_usd": ("cost ($ M)", False),
    "days": ("days", False),
    "memory_bytes": ("memory (GiB)", False),
    "bubble_s": ("bubble (s)", False),
    "exposed_communication_s": ("exposed comm. (s)", False),
}
"""Figures that can be drawn, with their titles, and whether more is better."""
MILLION = 1e6
FORMATS = {
    "step_time_s": "%.3f",
    "tokens_per_s_per_gpu": "%.0f",
    "mfu_causal": "percent",
    "cost_usd": "%.2f",
    "days": "%.1f",
    "memory_bytes": "%.1f",
    "bubble_s": "%.3f",
    "exposed_communication_s": "%.3f",
}
"""Formats of the table's columns."""


MOST_BANDS = 8
"""Points, the best first, whose intervals are computed."""


def show_answer(scenario: Scenario, found: Survey) -> None:
    """Draw the known points of a sweep, the best first."""
    names = [n for n in FIGURES if any(p.figures.get(n) is not None for p in found.points)]
    paid = headline.price_words(scenario)
    show: dict[str, Any] = {
        "format_func": lambda n: f"{FIGURES[n][0]}, {paid}" if n == "cost_usd" else FIGURES[n][0],
        "key": "sweep figure",
    }
    name = forms.one_of(st.selectbox, "Figure", "sweep.figure", names, names[0], **show)
    ranked = _ranked(found.points, name)
    best = ranked[0] if ranked[0].status == "ok" and ranked[0].figures.get(name) is not None else None
    bands = _bands(scenario, ranked, name)
    _picture(scenario, found, name, best)
    if best is not None:
        with st.container(horizontal=True, vertical_alignment="center"):
            band = bands.get(best.key)
            ends = f" ({headline.interval(name, band[0])})" if band is not None else ""
            st.markdown(f"Best: **{escaped(_text(best))}**, {_told(best, name)}{escaped(ends)}")
            _offer(best, "best")
        ties = [p for p in ranked[1:] if (band := bands.get(p.key)) and not band[1].has_sign]
        if ties:
            told = "; ".join(_text(point) for point in ties)
            st.caption(
                "Not distinguishable from the best, as P10 to P90 of the difference contains zero: "
                f"{escaped(told)}."
            )
    elif found.points:
        st.warning("No point computed so far fits into memory.")
    _table(ranked, name, bands)


def _ranked(points: Sequence[SweepPoint], name: str) -> list[SweepPoint]:
    """The points by a figure, the best first; then those that do not fit, and those without the figure."""
    sign = -1.0 if FIGURES[name][1] else 1.0

    def place(point: SweepPoint) -> tuple[int, float]:
        if point.figures.get(name) is None:
            return 2, 0.0
        return int(point.status != "ok"), sign * _number(point, name)

    return sorted(points, key=place)


def _bands(scenario: Scenario, ranked: Sequence[SweepPoint], name: str) -> dict[str, tuple[Band, Band]]:
    """Intervals of the best points and of their distances from the best, by point; none while computed."""
    best = [p for p in ranked if p.status == "ok" and p.figures.get(name) is not None][:MOST_BANDS]
    if name not in POWERS or not best or scenario.fleet is not None or scenario.stages.blocks is not None:
        return {}
    points = tuple((dict(p.values), float(p.figures[name] or 0.0)) for p in best)
    asked = hashlib.sha256(json.dumps([name, [p.key for p in best]]).encode()).hexdigest()
    key = f"point bands/{state.cache_key(scenario)}/{asked}"
    try:
        what, work = "intervals of the best points follow", (predictions.point_bands, scenario, points, name)
        found = long_work.value("sweep bands", key, what, *work)
    except MoesimError as error:
        st.caption(f"No intervals: {escaped(error)}")
        return {}
    return {p.key: band for p, band in zip(best, found or (), strict=False) if band is not None}


def _told(point: SweepPoint, name: str) -> str:
    if name == "memory_bytes":
        return f"{_number(point, name):.1f} GiB"
    return written(name, float(point.figures[name] or 0.0))


def _number(point: SweepPoint, name: str) -> float:
    """A figure in the unit of its title."""
    value = float(point.figures[name] or 0.0)
    if name == "cost_usd":
        return value / MILLION
    return in_unit(value, "GiB", "bytes") if name == "memory_bytes" else value


def _picture(scenario: Scenario, found: Survey, name: str, best: SweepPoint | None) -> None:
    keys = list(dict.fromkeys(key for point in found.points for key in point.values))
    title = FIGURES[name][0]
    have = [p for p in found.points if p.figures.get(name) is not None]
    if len(keys) == 1:
        now: Any = scenario
        for part in keys[0].split("."):
            now = getattr(now, part, None)
        now = getattr(now, "value", now)
        now = now if isinstance(now, str | int | float | bool) else None  # else it cannot be drawn
        chart = charts.line(
            keys[0],
            title,
            [(_shown(p.values[keys[0]]), _number(p, name), p.status == "ok") for p in have],
            None if best is None else _shown(best.values[keys[0]]),
            now,
        )
        widgets.figure(chart, f"{title} over {keys[0]}", key="sweep picture")
        return
    across, up, *rest = keys
    points = list(found.points)
    if rest:
        slices = list(dict.fromkeys(str(p.values[rest[0]]) for p in have))
        start = slices[0] if best is None else str(best.values[rest[0]])
        chosen = st.segmented_control(rest[0], slices, default=start, key=f"sweep slice {rest[0]}") or start
        points = [p for p in points if str(p.values[rest[0]]) == chosen]
        if best is not None and str(best.values[rest[0]]) != chosen:
            st.caption(f"The best point has {escaped(rest[0])} = {escaped(best.values[rest[0]])}.")
            best = None
    chart = charts.grid(
        (across, up),
        title,
        [
            (
                _shown(p.values[across]),
                _shown(p.values[up]),
                None if p.figures.get(name) is None else _number(p, name),
                p.status,
            )
            for p in points
        ],
        None if best is None else (_shown(best.values[across]), _shown(best.values[up])),
    )
    widgets.figure(chart, f"{title} over {across} and {up}", key="sweep picture")


def _shown(value: Any) -> charts.Value:
    return value if isinstance(value, str | int | float | bool) else str(value)


def _text(point: SweepPoint) -> str:
    return ", ".join(f"{key} = {value}" for key, value in point.values.items())


def _offer(point: SweepPoint, name: str) -> None:
    widgets.button("Open as the scenario", f"open sweep {name}", _open, point, type="primary")


def _open(point: SweepPoint) -> None:
    for key, value in point.values.items():
        state.set_override(key, value)


def _table(points: Sequence[SweepPoint], name: str, bands: Mapping[str, tuple[Band, Band]]) -> None:
    """The points, ranked by the chosen figure; a plan that does not fit has no place."""
    st.header("Points")
    places = {
        p.key: n for n, p in enumerate(points, 1) if p.status == "ok" and p.figures.get(name) is not None
    }
    kinds = list(dict.fromkeys(point.status for point in points))
    chosen = kinds
    if len(kinds) > 1:
        chosen = st.pills("Show", kinds, selection_mode="multi", key="sweep status") or kinds
    shown = [point for point in points if point.status in chosen]
    header = ["place", *dict.fromkeys(key for p in points for key in p.values), "status"]
    ends = [f"{FIGURES[name][0]}, P10 to P90"] if bands else []
    figures = [n for n in FIGURES if any(p.figures.get(n) is not None for p in points)]
    rows: list[list[exports.Cell]] = [
        [
            places.get(p.key),
            *(_shown(p.values.get(key, "")) for key in header[1:-1]),
            p.status,
            *(None if p.figures.get(n) is None else _number(p, n) for n in figures),
            *((headline.interval(name, bands[p.key][0])[12:] if p.key in bands else "",) if bands else ()),
            p.reason,
        ]
        for p in shown
    ]
    titles = [*header, *(FIGURES[n][0] for n in figures), *ends, "reason"]
    formats = {FIGURES[n][0]: st.column_config.NumberColumn(format=FORMATS[n]) for n in figures}
    more = {"key": "sweep table", "on_select": "rerun", "selection_mode": "single-row"}
    event = widgets.table(titles, rows, column_config=formats, **more)
    picked = event["selection"]["rows"] if event else []
    if picked and picked[0] < len(shown):
        point = shown[picked[0]]
        with st.container(horizontal=True, vertical_alignment="center"):
            st.markdown(escaped(_text(point)))
            _offer(point, "row")
    else:
        st.caption("Choose a row to open its plan.")
    with st.container(horizontal=True):
        widgets.download("Points (CSV)", exports.csv_text(titles, rows), "sweep.csv")
        texts = [
            [v if len(header) <= n < len(header) + len(figures) else str(v) for n, v in enumerate(row)]
            for row in rows
        ]
        parquet = exports.table_parquet(titles, texts) or exports.NO_PARQUET
        widgets.download("Points (Parquet)", parquet, "sweep.parquet", "application/octet-stream")


NONE, OTHER = "none", "another key"
"""Choices beside the keys."""
KEYS = {
    "communication.sms": "communication SMs",
    "parallel.ep": "expert parallelism",
    "parallel.pp": "pipeline parallelism",
    "parallel.tp": "tensor parallelism",
    "parallel.microbatch": "micro-batch",
    "parallel.zero_stage": "ZeRO stage",
    "batch.sequences": "sequences a step",
    "batch.sequence_length": "sequence length",
    "cluster.nodes": "nodes",
    "routing.expert_load_cv": "spread of expert load",
    "schedule": "schedule",
    "recompute": "recompute",
    "precision": "precision",
}
"""Keys to choose from, with their names."""
_KEY = re.compile(r"[a-z][a-z0-9_]{0,40}(?:\.[a-z0-9_]{1,40}){0,6}")
MOST_TEXT = 150


def show() -> None:
    """Draw the page."""
    scenario = state.current()
    st.caption(
        "Predicts the scenario at every combination of the values. Write values as `8,16,32`, a range as "
        "`8..32:4` (steps of four) or `8..256:x2` (doubling). Points stay in your store: what is known is "
        "not computed again."
    )
    texts = _space(scenario)
    if texts:
        _sweep(scenario, texts)
    else:
        st.info("Choose a key and give it values.")
    with st.expander("Your store of points"):
        _store(scenario)


# -- the question ---------------------------------------------------------------------------------------


def _space(scenario: Scenario) -> dict[str, str]:
    """The keys and the texts of their values."""
    found: dict[str, str] = {}
    for number, column in enumerate(st.columns(sweeps.MOST_KEYS), start=1):
        with column:
            options = [*([] if number == 1 else [NONE]), *KEYS, OTHER]
            chosen = forms.one_of(
                st.selectbox,
                f"Key {number}",
                f"sweep.key{number}",
                options,
                options[0],
                key=f"sweep key {number}",
                format_func=lambda key: f"{KEYS[key]} ({key})" if key in KEYS else key,
            )
            if chosen == NONE:
                continue
            key, place = chosen, {"placeholder": "cluster.node.nic_bandwidth", "key": f"sweep name {number}"}
            if chosen == OTHER:
                label, field = f"Name of key {number}", f"sweep.name{number}"
                key = forms.text(st.text_input, label, field, "", 80, **place).strip()
            text = forms.text(
                st.text_input,
                f"Values of key {number}",
                f"sweep.{number}.{chosen}",
                _values(scenario, key),
                MOST_TEXT,
                key=f"sweep values {number} {chosen}",
            ).strip()
            if not key or not text:
                continue
            if not _KEY.fullmatch(key):
                st.error(f"{escaped(key)} is no key: a key has a form such as parallel.ep.")
            elif key in found:
                st.error(f"{escaped(key)} stands here twice; choose another key.")
            else:
                found[key] = text
    return found


def _values(scenario: Scenario, key: str) -> str:
    """Values to begin with, around those of the scenario."""
    batch, nodes = scenario.batch.sequences, max(machine.nodes for machine in scenario.machines)
    return {
        "communication.sms": "8..32:4",
        "parallel.ep": "8..64:x2",
        "parallel.pp": "4..16:x2",
        "parallel.tp": "1,2,4",
        "parallel.microbatch": "1,2",
        "parallel.zero_stage": "0..2",
        "batch.sequences": f"{max(1, batch // 2)},{batch},{2 * batch}",
        "batch.sequence_length": "4096,8192",
        "cluster.nodes": f"{max(1, nodes // 2)},{nodes}",
        "routing.expert_load_cv": "0..0.4:0.1",
        "schedule": ",".join(spec.name for spec in SCHEDULES.values() if spec.advised),
        "recompute": "none,selective,full",
        "precision": "fp8,bf16",
    }.get(key, "")


# -- the work -------------------------------------------------------------------------------------------


def _sweep(scenario: Scenario, texts: dict[str, str]) -> None:
    visitor = visitors.current()
    store = sweeps.store_of(visitor)
    asked = json.dumps([state.cache_key(scenario), list(texts.items())])
    name = hashlib.sha256(asked.encode()).hexdigest()[:32]
    key = f"sweep/{visitor}/{name}"
    long_work.taken_up("sweep", key)
    entry = tray.find(visitor, key)
    if entry is not None and entry.is_open:
        st.caption("Points are stored as they are found: a sweep that you stop goes on where it stopped.")
        return
    survey_key = f"survey/{visitor}/{name}/{sweeps.stamp(store)}"
    work = (str(uploads.folder()), scenario, texts, store)
    found: Survey = state.compute(survey_key, "Looking for known points", sweeps.surveyed, *work)
    if _may_start(scenario, found, name):
        jobs.cache.drop(key)
        sweeps.make_room(store)
        title = f"Sweep of {' x '.join(key.rpartition('.')[2] for key in texts)}"
        long_work.start("sweep", key, sweeps.swept, *work, title=title, budget_s=sweeps.BUDGET_S)
        st.rerun()
    if any(point.figures for point in found.points):
        show_answer(scenario, found)
    elif found.points and not found.missing:
        st.warning(f"No point is legal. The first: {escaped(found.points[0].reason)}")


def _may_start(scenario: Scenario, found: Survey, name: str) -> bool:
    """Say how much is to be done, and return whether the visitor starts it."""
    illegal = sum(not point.figures for point in found.points)
    counts = st.columns(4)
    counts[0].metric("Points", f"{found.total:,}")
    counts[1].metric("Known", f"{len(found.points) - illegal:,}")
    counts[2].metric("Refused", f"{illegal:,}")
    counts[3].metric("To compute", f"{len(found.missing):,}")
    if not found.missing:
        return False
    ends = tuple(found.missing[n] for n in sorted({0, len(found.missing) - 1}))
    timed: sweeps.Pace = state.compute(
        f"pace/{name}", "Timing two points", sweeps.pace, str(uploads.folder()), scenario, ends
    )
    expected = timed.seconds * len(found.missing)
    if expected > sweeps.MOST_S:
        st.error(
            f"{len(found.missing):,} points would take about {long_work.duration(expected)}, more than the "
            f"{long_work.duration(sweeps.MOST_S)} of the dashboard: take fewer values, or use the command "
            "line (moesim sweep).",
            icon=":material/error:",
        )
        return False
    left, right = st.columns([1, 3], vertical_alignment="center")
    right.caption(
        f"About {long_work.duration(expected)}: {timed.seconds:.2g} s a point, "
        f"timed on {timed.points} of them."
    )
    label = "Continue" if len(found.points) > illegal else "Start the sweep"
    return left.button(label, type="primary", key="start sweep")


# -- the store ------------------------------------------------------------------------------------------


def _store(scenario: Scenario) -> None:
    store = sweeps.store_of(visitors.current())
    size = store.stat().st_size if store.is_file() else 0
    st.caption(
        f"One SQLite file on the server with every point that you computed ({size / 1e6:.1f} MB of at most "
        f"{sweeps.STORE_BYTES / 1e6:.0f} MB), readable for you alone and gone when the server ends. "
        "`moesim sweep --store` writes and reads the same files."
    )
    if size:
        widgets.download(
            "Store (SQLite)",
            lambda: sweeps.contents(store),
            "sweep.sqlite",
            "application/vnd.sqlite3",
            key="store download",
        )
    file = st.file_uploader(
        "Import the points of another store", type=["sqlite", "db"], key="store upload", max_upload_size=4
    )
    try:
        given = upload_files.given(file)
        if file is None or given is None:
            return
        _, data = given
        key = f"store/{visitors.current()}/{hashlib.sha256(data).hexdigest()}"
        taken = state.compute(key, "Reading the store", sweeps.taken_over, data, store)
    except MoesimError as error:
        st.error(escaped(error), icon=":material/error:")
        return
    damaged = f"; {taken.damaged:,} were damaged and left out" if taken.damaged else ""
    st.success(f"{taken.new:,} points are new, {taken.known:,} were known{damaged}.", icon=":material/check:")
    if taken.new and st.session_state.get("store taken") != file.file_id:
        st.session_state["store taken"] = file.file_id
        st.rerun()
