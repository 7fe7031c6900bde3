"""The page Start: what this is, how well it predicts, and the ways in."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

import streamlit as st

import moesim
from moesim.app import (
    forms,
    jobs,
    page_switch,
    predictions,
    scenario_store,
    state,
    texts,
    upload_files,
    uploads,
    visitors,
    widgets,
)
from moesim.app.pages import HOME
from moesim.app.texts import escaped, written
from moesim.app.views import planner
from moesim.hwmodels.errors import InputError, MoesimError
from moesim.simulator.model.catalogue import shipped_models

MODEL, ACCELERATOR, GPUS, SEQUENCES, LENGTH = (
    "start.model", "start.accelerator", "start.gpus", "start.sequences", "start.length",
)  # fmt: skip
"""Form fields of the three steps."""

FIRST = ("h100-sxm", "h200-sxm", "b200-sxm", "gb200", "b300-sxm", "gb300", "a100-sxm", "h800-sxm", "mi300x")
"""Accelerators that the list begins with; the rest follows by name."""

MOST_GPUS = 1_000_000
REFUSED = "start refused"
"""Session key with the reason why the last upload on this page was refused."""

CARDS_A_ROW = 3


CHOICES = f"choices/{moesim.__version__}"
"""Key of the job that reads what is shipped."""


def begin() -> None:
    """Start the jobs whose results the page will show, without waiting for them."""
    jobs.submit(CHOICES, predictions.choices, ahead=True)


def show() -> None:
    """Draw the page."""
    st.title("How long will it train, and what will it cost?", anchor=False)
    st.markdown(
        "moesim predicts the time of a training step, and the length and price of a run, for large MoE and "
        "dense models on a cluster, event by event, and says where each number comes from."
    )
    left, right = st.columns([5, 4], gap="large")
    with right:  # first, so that its numbers are what the browser draws first
        _home()
    with left, st.container(border=True, key="path-card"):
        st.markdown("**Your model on your GPUs: find a plan**")
        choices = state.compute(CHOICES, "Reading the shipped hardware", predictions.choices)
        model = _model()
        accelerator, n_gpus = _gpus(choices.gpus_per_node)
        sequences, length = _batch()
        missing = model is None
        if st.button(
            "Find a plan", type="primary", icon=":material/route:", key="find a plan", disabled=missing
        ):
            _find(str(model), accelerator, n_gpus, sequences, length)
        if missing:
            st.caption("Step 1 is missing: give a config.json, or choose a model.")
    with right:
        _recent()
    widgets.numbers_first()
    st.header("Start from a scenario", anchor=False)
    _presets()


def _home() -> None:
    """Draw the headline: the home case against what was published."""
    with st.container(border=True, key="home-card"):
        st.markdown("**How well does it predict?** DeepSeek-V3 on 2,048 H800, never fitted to the result:")
        scenario = state.build(HOME, ())
        result = state.result_of(scenario, "Predicting DeepSeek-V3's step")
        row = next(r for r in moesim.published(scenario, result) if r.quantity == "time per step")
        columns = st.columns(3)
        columns[0].metric("Predicted step", written("step_time_s", row.predicted))
        columns[1].metric("Published step", written("step_time_s", row.published))
        columns[2].metric("Error", f"{row.relative_error:+.1%}")
        st.caption(f"{texts.badge(result.confidence)} {escaped(row.source)}")
        with st.container(horizontal=True):
            if st.button("Open it", key="open home", icon=":material/speed:"):
                state.open_scenario(HOME, (), new=True)
                page_switch.go("result")
            if st.button("Every figure and its error", key="open evidence", type="tertiary"):
                page_switch.go("evidence")


# -- your model on your GPUs ---------------------------------------------------------------------------


def _model() -> str | None:
    """Inputs of step 1; returns a shipped name or an upload's token."""
    st.markdown("**1** &nbsp; Model")
    left, right = st.columns(2)
    with left:
        st.file_uploader(
            "Your config.json (Hugging Face)",
            type=[ending.lstrip(".") for ending in uploads.ENDINGS["model"]],
            key="start upload",
            max_upload_size=uploads.MAX_BYTES["model"] // 10**6,
            on_change=_uploaded,
        )
    chosen = forms.value(MODEL, None, lambda found: isinstance(found, str))
    names = list(shipped_models())
    if isinstance(chosen, str) and chosen not in names:
        if not uploads.TOKEN.fullmatch(chosen) or not (uploads.folder() / chosen).is_file():
            chosen = None
        else:
            names = [chosen, *names]
    places = {"index": None, "placeholder": f"{len(shipped_models())} models"}
    show: dict[str, Any] = {"format_func": uploads.with_names, "key": "start model", **places}
    forms.one_of(right.selectbox, "or a shipped model", MODEL, names, None, **show)
    if REFUSED in st.session_state:
        st.error(escaped(st.session_state[REFUSED]), icon=":material/error:")
    return chosen if isinstance(chosen, str) else None


def _uploaded() -> None:
    st.session_state.pop(REFUSED, None)
    try:
        given = upload_files.given(st.session_state["start upload"])
        if given is not None:
            forms.put(MODEL, state.accept("model", *given).token)
    except MoesimError as error:
        st.session_state[REFUSED] = str(error)


def _gpus(known: dict[str, int]) -> tuple[str, int]:
    """Inputs of step 2."""
    st.markdown("**2** &nbsp; GPUs")
    left, right = st.columns(2)
    names = [*(name for name in FIRST if name in known), *sorted(set(known) - set(FIRST))]
    accelerator = forms.one_of(
        left.selectbox,
        "Accelerator",
        ACCELERATOR,
        names,
        names[0],
        key="start accelerator",
        format_func=lambda name: name.upper().replace("-", " "),
    )
    note = (
        f"In nodes of {known[accelerator]:,}. Rules choose network, price and calibration profile; the "
        "result lists them."
    )
    more: dict[str, Any] = {"step": known[accelerator], "help": note, "key": "start gpus"}
    n_gpus = forms.number(right.number_input, "GPUs", GPUS, 1, MOST_GPUS, 512, **more)
    return accelerator, int(n_gpus)


def _batch() -> tuple[int, int]:
    """Inputs of the batch of one step, with values that runs of this size use."""
    with st.expander("Batch: sequences a step, and their length"):
        left, right = st.columns(2)
        count, size = left.number_input, right.number_input
        sequences = forms.number(
            count, "Sequences a step", SEQUENCES, 1, 1_000_000, 4096, step=256, key="start sequences"
        )
        length = forms.number(
            size, "Tokens a sequence", LENGTH, 1, 10_000_000, 4096, step=1024, key="start length"
        )
        st.caption("4,096 x 4,096 tokens unless you say otherwise; the whole run's tokens are on Run & cost.")
    return int(sequences), int(length)


def _find(model: str, accelerator: str, n_gpus: int, sequences: int, length: int) -> None:
    """Open the scenario, begin the search and go to the planner, or say here what is wrong."""
    try:
        scenario: Any = jobs.submit(
            f"scenario for/{model}/{accelerator}/{n_gpus}/{sequences}/{length}/{moesim.__version__}",
            predictions.scenario_for,
            str(uploads.folder()), model, accelerator, n_gpus, sequences, length,
            lane="read",
        ).result(jobs.MOST_WAITING * jobs.READ_S)  # fmt: skip
    except InputError as error:
        st.error(escaped(error), icon=":material/error:")
        for value in error.nearest if error.key == "gpus" else ():
            widgets.button(f"{value:,} GPUs", f"nearest {value}", forms.put, GPUS, value)
        return
    except MoesimError as error:
        st.error(escaped(error), icon=":material/error:")
        return
    state.open_scenario(uploads.keep(scenario), (), scenario, new=True)
    planner.begin(state.current())
    page_switch.go("planner")


# -- scenarios -----------------------------------------------------------------------------------------


def _recent() -> None:
    """Draw the visitor's scenarios, the one changed last first."""
    found = scenario_store.recent(visitors.current())
    if not found:
        return
    with st.container(border=True, key="recent-card"):
        st.markdown("**Where you were**")
        for entry in found[:6]:
            name, ago, cross = st.columns([6, 3, 1], vertical_alignment="center")
            label = ": ".join(filter(None, (entry.title, entry.figures)))
            if name.button(escaped(label), key=f"open {entry.number}", type="tertiary"):
                scenario_store.open_recent(entry.number)
                page_switch.go("result")
            ago.caption(_ago(time.time() - entry.changed_s))
            note, number = f"Remove {escaped(entry.title)} from this list", entry.number
            with cross:
                widgets.button(
                    ":material/close:",
                    f"forget {number}",
                    scenario_store.forget,
                    number,
                    type="tertiary",
                    help=note,
                )


def _ago(seconds: float) -> str:
    for size, unit in ((86_400, "day"), (3_600, "hour"), (60, "minute")):
        if seconds >= size:
            count = int(seconds // size)
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"


def _presets() -> None:
    """Draw a card for every shipped scenario, best evidence first."""
    with suppress(MoesimError):
        rows = state.compute(CHOICES, "Reading the shipped scenarios", predictions.choices).presets
        order = list(texts.WORDS)
        rows = sorted(rows, key=lambda row: (row.preset != HOME, order.index(row.confidence), row.preset))
        for begin in range(0, len(rows), CARDS_A_ROW):
            for place, row in zip(st.columns(CARDS_A_ROW), rows[begin : begin + CARDS_A_ROW], strict=False):
                with place.container(border=True, height="stretch"):
                    st.markdown(
                        f"**{escaped(row.model)}** on {row.n_gpus:,} {escaped(row.accelerator)}  \n"
                        f"{texts.badge(row.confidence)}"
                    )
                    st.caption(escaped(row.description.split(". ")[0].rstrip(".") + "."))
                    if st.button("Open", key=f"preset {row.preset}", help=row.preset):
                        state.open_scenario(row.preset, (), new=True)
                        page_switch.go("result")
