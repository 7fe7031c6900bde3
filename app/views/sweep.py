"""The page Sweep: the scenario at every combination of some values, in a store that outlives each run."""

from __future__ import annotations

import hashlib
import json
import re

import streamlit as st

from moesim.app import forms, jobs, long_work, state, sweeps, upload_memory, uploads, visitors
from moesim.app.escaping import escaped
from moesim.app.tray import tray
from moesim.app.views import sweep_answer
from moesim.hwmodels.errors import MoesimError
from moesim.simulator.scenario import Scenario
from moesim.simulator.schedules import SCHEDULES
from moesim.simulator.studies.survey import Survey

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
            chosen = st.selectbox(
                f"Key {number}",
                options,
                format_func=lambda key: f"{KEYS[key]} ({key})" if key in KEYS else key,
                **forms.one_of(f"sweep.key{number}", options, options[0], f"sweep key {number}"),
            )
            if chosen == NONE:
                continue
            key = chosen
            if chosen == OTHER:
                key = st.text_input(
                    f"Name of key {number}",
                    placeholder="cluster.node.nic_bandwidth",
                    max_chars=80,
                    **forms.text(f"sweep.name{number}", "", 80, f"sweep name {number}"),
                ).strip()
            text = st.text_input(
                f"Values of key {number}",
                max_chars=MOST_TEXT,
                **forms.text(
                    f"sweep.{number}.{chosen}",
                    _values(scenario, key),
                    MOST_TEXT,
                    f"sweep values {number} {chosen}",
                ),
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
    folder = str(uploads.folder())
    found: Survey = state.compute(
        f"survey/{visitor}/{name}/{sweeps.stamp(store)}",
        "Looking for known points",
        sweeps.surveyed,
        folder,
        scenario,
        texts,
        store,
    )
    if _may_start(scenario, found, name):
        jobs.cache.drop(key)
        sweeps.make_room(store)
        long_work.start(
            "sweep",
            key,
            sweeps.swept,
            folder,
            scenario,
            texts,
            store,
            with_progress=True,
            title=f"Sweep of {' x '.join(key.rpartition('.')[2] for key in texts)}",
            budget_s=sweeps.BUDGET_S,
        )
        st.rerun()
    if any(point.figures for point in found.points):
        sweep_answer.show(scenario, found)
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
        st.download_button(
            "Store (SQLite)",
            lambda: sweeps.contents(store),
            "sweep.sqlite",
            "application/vnd.sqlite3",
            key="store download",
            on_click="ignore",
        )
    file = st.file_uploader(
        "Take over the points of another store", type=["sqlite", "db"], key="store upload", max_upload_size=4
    )
    try:
        given = upload_memory.given(file)
        if file is None or given is None:
            return
        _, data = given
        taken = state.compute(
            f"store/{visitors.current()}/{hashlib.sha256(data).hexdigest()}",
            "Reading the store",
            sweeps.taken_over,
            data,
            store,
        )
    except MoesimError as error:
        st.error(escaped(error), icon=":material/error:")
        return
    damaged = f"; {taken.damaged:,} were damaged and left out" if taken.damaged else ""
    st.success(f"{taken.new:,} points are new, {taken.known:,} were known{damaged}.", icon=":material/check:")
    if taken.new and st.session_state.get("store taken") != file.file_id:
        st.session_state["store taken"] = file.file_id
        st.rerun()
