"""The page Serving: what users of a served model wait for, what a GPU gives, and where requests are."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import streamlit as st

import moesim
from moesim.app import exports, jobs, long_work, serving_jobs, state, texts, upload_files, uploads, widgets
from moesim.app.charts import serving as charts
from moesim.app.components.timeline import canvas
from moesim.app.serving_jobs import ServedView, TraceKind
from moesim.app.texts import badge, escaped, money, plain, span
from moesim.hwmodels.confidence import confidence
from moesim.hwmodels.errors import InfeasibleError, MoesimError
from moesim.simulator.scenario import Scenario
from moesim.simulator.scenario.serving import ServingPool
from moesim.simulator.serving.deployment import engines
from moesim.simulator.serving.results import Intervals, ServingResult, figure, goodput_text, stable_text
from moesim.simulator.serving.typical import TypicalStep

FORMATS = ("bf16", "fp8", "nvfp4", "mxfp4")
ROUTERS = ("least_loaded", "round_robin", "prefix_aware")
PERCENTILES = ("p50", "p90", "p99", "mean")
LATENCIES = {
    "ttft_s": ("TTFT", "From arrival to the first token"),
    "tpot_request_s": ("TPOT, by request", "A request's mean time between tokens after the first"),
    "end_to_end_s": ("End to end", "From arrival to the last token"),
    "queue_s": ("Queue", "From arrival to the first step that works on the request"),
    "transfer_s": ("Transfer", "From the first token until the KV cache is in the decode pool"),
}
"""Times with percentiles: title and definition."""
LOADS: Mapping[str, Mapping[str, Any]] = {
    "rate": {"rate_per_s": 10},
    "concurrency": {"arrivals": "concurrency", "concurrency": 64},
}
"""What a kind of load begins with."""
GZIP = "application/gzip"
REFUSED = "serving refused"
"""Session key with the reason why the last log was refused."""


def show() -> None:
    """Draw the page."""
    scenario = state.form()
    if scenario.serving is None:
        begin(scenario)
        return
    form(scenario)
    current = state.current()  # raises for what the form shows as refused
    key = state.cache_key(current)
    found: ServedView | None = long_work.value(
        "serving",
        f"serving/{key}",
        "serving the load request by request",
        serving_jobs.served,
        folder(),
        current,
    )
    if found is not None:
        _answer(current, key, found)


def folder() -> str:
    """The folder of uploads, which jobs may read."""
    return str(uploads.folder())


# -- the question --------------------------------------------------------------------------------------


def begin(scenario: Scenario) -> None:
    """Offer what can be served: the shipped scenarios, and the current model on the current cluster."""
    st.info(
        "This scenario does not describe serving. Start from one of these; you can change everything "
        "afterwards."
    )
    for name in moesim.presets(serving=True):
        with st.container(horizontal=True, vertical_alignment="center"):
            widgets.button(name, f"serve {name}", partial(state.open_scenario, name, new=True))
            st.caption(escaped(moesim.load(name).description))
    label = f"Serve {escaped(scenario.shape.name)} on {escaped(scenario.machine.accelerator.name)}"
    if st.button(label, key="serve own", type="primary"):
        key = f"serving fit/{state.cache_key(scenario)}"
        fitting = state.compute(key, "Looking for GPUs", serving_jobs.fitting, folder(), scenario)
        state.set_override("serving", fitting.to_dict()["serving"])
        st.rerun()


def form(scenario: Scenario) -> None:
    """Draw the inputs of pools, load and limits."""
    serving = scenario.serving
    assert serving is not None
    with st.expander("Deployment", expanded=True):
        first, second, third, fourth = st.columns(4)
        with first:
            widgets.choice(scenario, "serving.engine", "Engine", list(engines()))
        for place, key, label in (
            (second, "weights", "Weights"), (third, "experts", "Experts"), (fourth, "cache", "KV cache"),
        ):  # fmt: skip
            with place:
                _optional_choice(scenario, f"serving.{key}", label, FORMATS)
        _pool(scenario, "serving", "" if serving.prefill is None else "Decode pool")
        split = "serving.prefill"
        own = {"replicas": serving.replicas, "tp": serving.tp, "dp": serving.dp, "ep": serving.ep}
        st.checkbox(
            "Separate prefill pool",
            key=widgets.place(split, serving.prefill is not None),
            on_change=lambda: state.set_override(split, own if serving.prefill is None else "null"),
            help="Replicas that only prefill, and send the KV cache to those that decode",
        )
        if serving.prefill is not None:
            _pool(scenario, split, "Prefill pool")
    load_form(scenario)


def load_form(scenario: Scenario) -> None:
    """Draw the inputs of load and limits."""
    with st.expander("Load and limits", expanded=True):
        _load(scenario)
        columns = st.columns(4)
        for place, key, label in zip(
            columns,
            ("ttft_s", "tpot_s", "end_to_end_s", "percentile"),
            ("TTFT limit (s)", "TPOT limit (s)", "End-to-end limit (s)", "Kept by % of requests"),
            strict=True,
        ):
            with place:
                number(scenario, f"serving.limits.{key}", label)


def _pool(scenario: Scenario, at: str, title: str) -> None:
    if title:
        st.markdown(f"**{title}**")
    columns = st.columns(4)
    fields = [
        ("replicas", "Replicas", 1, 100_000), ("tp", "Tensor (TP)", 1, 4096), ("dp", "Data (DP)", 1, 4096),
        ("ep", "Expert (EP)", 1, 4096), ("max_num_seqs", "Sequences per rank, at most", 1, 100_000),
        ("max_num_batched_tokens", "Tokens per step and rank, at most", 1, 1_000_000),
    ]  # fmt: skip
    fields += [] if at.endswith("prefill") else [("draft_tokens", "Draft tokens", 0, 16)]
    for n, (name, label, least, most) in enumerate(fields):
        with columns[n % 4]:
            note = (ServingPool.model_fields[name].description or "").strip() or None
            widgets.number(scenario, f"{at}.{name}", label, least, most, note)
    with columns[3]:
        widgets.toggle(scenario, f"{at}.two_batch_overlap", "Two-batch overlap")


def _load(scenario: Scenario) -> None:
    serving = scenario.serving
    assert serving is not None
    load, key = serving.load, "serving.load"
    kind = "log" if load.log else "concurrency" if load.concurrency else "rate"
    first, second, third, fourth = st.columns(4)
    name = widgets.place("serving load", kind)
    with first:
        st.selectbox(
            "Load", ["rate", "concurrency", *(["log"] if load.log else [])], key=name,
            on_change=lambda: _load_chosen(st.session_state[name], load.input_tokens, load.output_tokens),
            help="Arrivals per second, or a fixed number of requests in flight; a log can be uploaded below",
        )  # fmt: skip
    with second:
        field = (
            ("concurrency", "Requests in flight")
            if kind == "concurrency"
            else ("rate_per_s", "Requests per second")
        )
        number(scenario, f"{key}.{field[0]}", field[1])
    with third:
        _whole(scenario, f"{key}.requests", "Requests", "Empty: all of a log, or 1,000")
    with fourth:
        widgets.choice(scenario, "serving.router", "Router", ROUTERS)
    if kind != "log":
        columns = st.columns(4)
        for place, part, label in zip(columns, ("input", "output"), ("Prompt", "Answer"), strict=False):
            with place:
                widgets.number(scenario, f"{key}.{part}_tokens", f"{label} (tokens, mean)")
        with columns[2]:
            number(scenario, f"{key}.length_spread", "Spread of lengths (sigma of their logarithm)")
    st.file_uploader(
        "A log of requests: JSON lines of Mooncake, or CSV with arrival_s, input_tokens, output_tokens",
        type=[ending.lstrip(".") for ending in uploads.ENDINGS["load"]] + ["gz"],
        key="upload load",
        max_upload_size=uploads.MAX_BYTES_HISTOGRAM // 10**6,
        on_change=_uploaded,
    )
    if REFUSED in st.session_state:
        st.error(escaped(st.session_state.pop(REFUSED)), icon=":material/error:")


def _load_chosen(kind: str, prompt: int, answer: int) -> None:
    if kind in LOADS:
        lengths = {"input_tokens": prompt, "output_tokens": answer}
        state.set_override("serving.load", {**LOADS[kind], **lengths})


def _uploaded() -> None:
    try:
        given = upload_files.given(st.session_state["upload load"])
        if given is not None:
            state.set_override("serving.load", {"log": state.accept("load", *given).token})
    except MoesimError as error:
        st.session_state[REFUSED] = str(error)


def number(scenario: Scenario, key: str, label: str, note: str | None = None) -> None:
    """Draw an input for a number above 0 that may be absent."""
    value = widgets.value_of(scenario, key)
    known = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    name = widgets.place(key, float(value) if known else None)
    st.number_input(
        label, min_value=0.0, value=None, step=None, format="%g", key=name, help=note, placeholder="none",
        on_change=lambda: state.set_override(key, _plain(st.session_state[name])),
    )  # fmt: skip


def _whole(scenario: Scenario, key: str, label: str, note: str) -> None:
    value = widgets.value_of(scenario, key)
    name = widgets.place(key, value if isinstance(value, int) else None)
    st.number_input(
        label, min_value=1, max_value=10**9, value=None, step=1, key=name, help=note, placeholder="all",
        on_change=lambda: state.set_override(key, _plain(st.session_state[name])),
    )  # fmt: skip


def _plain(value: float | None) -> Any:
    """A number as a scenario has it; the text that takes a key away for none."""
    if value is None:
        return "null"
    return int(value) if float(value).is_integer() else value


def _optional_choice(scenario: Scenario, key: str, label: str, options: Sequence[str]) -> None:
    value = widgets.value_of(scenario, key)
    name = widgets.place(key, value if value in options else None)
    st.selectbox(
        label, options, index=None, key=name, placeholder="as published",
        on_change=lambda: state.set_override(key, st.session_state[name] or "null"),
    )  # fmt: skip


# -- the answer ----------------------------------------------------------------------------------------


def _answer(scenario: Scenario, key: str, found: ServedView) -> None:
    result = found.result
    infeasible(result)
    band = _ends(scenario, key)
    st.markdown(f"**{escaped(result.deployment)}**, {escaped(result.engine)}")
    st.caption(
        f"{result.requests:,} requests in {span(result.duration_s)}: {plain(result.requests_per_s)}/s served "
        + (
            f"in the steady window from {span(result.window.start_s)} to {span(result.window.end_s)}"
            if result.window.steady
            else "over the whole run, of which no part is steady"
        )
        + ("" if result.offered_per_s is None else f", {plain(result.offered_per_s)}/s offered")
    )
    _figures(scenario, result, band)
    _latencies(result, band)
    if found.step is not None:
        _step(found.step)
    st.header("Running and waiting", anchor=False)
    widgets.figure(
        charts.sequences(result.timeline), "Running and waiting sequences over time", "serving counts"
    )
    st.header("Requests", anchor=False)
    first = "" if found.shown == result.requests else f" The first {found.shown:,} of {result.requests:,}."
    st.caption(
        "One row per request: queue, prompt, hand-over, decode. W and S zoom, A and D pan, ? lists "
        f"keys.{first}"
    )
    with st.container(key="serving-canvas"):
        canvas.draw(found.lives, -1, key="serving canvas")
    _downloads(scenario, key, result)
    for note in result.warnings:
        st.caption(escaped(note))


def infeasible(result: ServingResult) -> None:
    """Say, before any figure, that the load never drains, or that no request keeps the limits."""
    if not result.drains:
        st.error(
            f"The load never drains: the queue grows without end; {escaped(stable_text(result))}. Every "
            "figure here depends on how long the load lasts.",
            icon=":material/hourglass_disabled:",
        )
    elif result.goodput is not None and not result.goodput.met:
        st.warning(escaped(goodput_text(result.goodput)), icon=":material/timer_off:")


def _ends(scenario: Scenario, key: str) -> Intervals | None:
    """The intervals of the load's figures; None while a job serves it, and where it cannot."""
    try:
        found: Intervals | None = long_work.value(
            "serving ends", f"serving ends/{key}", "the intervals are being computed", serving_jobs.ends,
            folder(), scenario,
        )  # fmt: skip
    except InfeasibleError as error:
        st.caption(f"No interval: {escaped(error)}")
        return None
    return found


def _interval(band: Intervals | None, key: str, text: Callable[[float], str]) -> str:
    """The interval of a figure in words."""
    if band is None:
        return "interval: being computed"
    known = band.figures.get(key)
    if known is None:
        return "no interval"
    return f"80 %: {text(known.low)} to {text(known.high)}{'' if band.slow_drains else ', overload'}"


def _figures(scenario: Scenario, result: ServingResult, band: Intervals | None) -> None:
    level = confidence(scenario.machine, scenario.calibration, scenario.recipe.linear)
    goodput = result.goodput
    window = "steady window" if result.window.steady else "whole run"
    rate = f"Over the {window}, {span(result.window.start_s)} to {span(result.window.end_s)}"
    tiles: dict[str, tuple[str, Callable[[float], str], str]] = {
        "Goodput": (
            "goodput.requests_per_s",
            lambda v: f"{plain(v)}/s",
            f"Requests per second that stay within every stated limit. {rate}",
        ),
        "Output tokens/s/GPU": (
            "output_tokens_per_s_per_gpu", lambda v: f"{v:,.0f}", f"All GPUs. {rate}",
        ),
        "Input tokens/s/GPU": (
            "input_tokens_per_s_per_gpu", lambda v: f"{v:,.0f}", f"All GPUs. {rate}",
        ),
        "$ per M output tokens": (
            "cost.usd_per_million_output_tokens", money,
            "Output tokens carry the whole cost of a single pool; with two pools, that of the decode pool. "
            f"{rate}",
        ),
        "$ per M tokens": (
            "cost.usd_per_million_tokens", money, f"All GPUs over input and output. {rate}",
        ),
        "J per output token": (
            "cost.joules_per_output_token", lambda v: f"{plain(v)} J",
            f"At the power limit of the boards, without hosts and cooling. {rate}",
        ),
        "Prefix hits": ("cached_share", lambda v: f"{v:.1%}", "Input tokens found in the cache"),
        "TPOT, all tokens": (
            "tpot_token_s", span,
            "Mean time between tokens over all requests together, so that long answers count more",
        ),
    }  # fmt: skip
    muted = "roofline" if texts.muted(level) else "tiles"
    of_all = ("Prefix hits", "TPOT, all tokens")
    items = list(tiles.items())
    with st.container(key=f"{muted}-serving"):
        for start in range(0, len(items), 4):
            for place, (label, (key, text, note)) in zip(
                st.columns(4), items[start : start + 4], strict=False
            ):
                value = figure(result, key)
                none = "no limits" if label == "Goodput" and goodput is None else "not known"
                place.metric(label, none if value is None else text(value), help=note)
                of = "all requests" if label in of_all else window
                place.caption(
                    f"{badge(level)} over the {of}  \n{'' if value is None else _interval(band, key, text)}"
                )
        st.caption(
            f"Step times come from the profile {escaped(scenario.calibration.name)}; the entries behind "
            "each part are below. An interval is what the load gives with all step times at their P10 "
            "and at their P90."
        )


def _latencies(result: ServingResult, band: Intervals | None) -> None:
    st.header("Latency", anchor=False)
    header, rows = (
        [
            "latency",
            *(name.upper() if name != "mean" else name for name in PERCENTILES),
            "80 % interval of P90",
            "meaning",
        ],
        [],
    )
    for name, (label, meaning) in LATENCIES.items():
        own = getattr(result, name)
        if own is not None:
            cells = [span(getattr(own, key)) for key in PERCENTILES]
            rows.append([label, *cells, _interval(band, f"{name}.p90", span).removeprefix("80 %: "), meaning])
    widgets.table(header, rows, key="serving latencies")
    if result.goodput is not None:
        st.caption(escaped(goodput_text(result.goodput)))


def _step(step: TypicalStep) -> None:
    cost = step.cost
    st.header("A decode step", anchor=False)
    st.caption(
        f"The load's average step, {escaped(step.words)}: **{span(cost.seconds)}** (80 %: {span(cost.low)} "
        f"to {span(cost.high)}). Time hidden behind other work is not in the bar."
    )
    widgets.figure(
        charts.decode_step(cost.parts), f"Parts of a decode step of {span(cost.seconds)}", "serving step"
    )
    with st.expander("Every part and its source"):
        rows = [
            (
                part.name,
                part.kind,
                part.exposed_s * 1e6,
                part.busy_s * 1e6,
                part.launches,
                _sources(part.evidence),
            )
            for part in sorted(cost.parts, key=lambda part: -part.exposed_s)
        ]
        formats = dict.fromkeys(("exposed (us)", "busy (us)"), st.column_config.NumberColumn(format="%.1f"))
        header = ("part", "kind", "exposed (us)", "busy (us)", "kernels", "entries and assumptions")
        widgets.table(header, rows, column_config=formats, key="serving parts")


def _sources(evidence: Any) -> str:
    return "; ".join([*sorted(evidence.entries), *sorted(evidence.notes)])


def _downloads(scenario: Scenario, key: str, result: ServingResult) -> None:
    def made(kind: TraceKind) -> bytes:
        name = f"serving trace/{key}/{kind}"
        data: bytes = jobs.submit(name, serving_jobs.trace, folder(), scenario, kind, lane="beside").result(
            jobs.LONG_S
        )
        return data

    kinds: Mapping[TraceKind, str] = {"requests": "Perfetto: requests", "step": "Perfetto: a decode step"}
    with st.container(horizontal=True):
        for kind, label in kinds.items():
            name = exports.file_name(f"{scenario.name}-{kind}", ".trace.json.gz")
            widgets.download(label, partial(made, kind), name, GZIP, key=f"serving trace {kind}")
        name, text = exports.file_name(scenario.name, ".json"), result.model_dump_json(indent=2)
        widgets.download("Result (JSON)", text, name, "application/json")
