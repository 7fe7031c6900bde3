"""The page Planner: searches for better plans, each of which opens as a scenario."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pandas as pd
import streamlit as st
from pandas.io.formats.style import Styler

from moesim.app import forms, long_work, page_switch, predictions, state, widgets
from moesim.app.charts import differences as charts
from moesim.app.texts import escaped, money, written
from moesim.app.views import headline
from moesim.hwmodels.units import in_unit
from moesim.simulator.planner.result import PlanResult, PlanRow, place_text
from moesim.simulator.planner.space import all_precisions
from moesim.simulator.scenario import Scenario
from moesim.simulator.schedules import SCHEDULES
from moesim.simulator.trainers.registry import TRAINERS, trainer_of

# -- plan table --------------------------------------------------------------------------------------
# The table of plans on the page Planner, and how sure their distances from the best are.

DISTANCE = ["behind best", "P10 to P90"]
"""Columns that are grey where the distance from the best may as well be none."""

GREY = {"light": "color: #6b7280", "dark": "color: #9ca3af"}
"""By theme, each with at least 4.5 to 1 against its page."""


def choice(rows: Sequence[PlanRow], name: str) -> PlanRow | None:
    """Draw plans as a table and return the chosen one."""
    hidden = ["place"] if rows[0].place is None else []
    hidden += ["P10 to P90"] if all(row.behind is None for row in rows) else []
    event: Any = st.dataframe(
        styled(rows, st.context.theme.type or "light"),
        hide_index=True,
        key=f"table {name}",
        on_select="rerun",
        selection_mode="single-row",
        column_config={
            # A table cuts off what does not fit, without a sign of it.
            "plan": st.column_config.TextColumn(width=max(24 + 7 * len(row.label) for row in rows)),
            "step (s)": st.column_config.NumberColumn(format="%.3f"),
            "GiB": st.column_config.NumberColumn(format="%.1f"),
            "behind best": st.column_config.NumberColumn(format="percent"),
            **dict.fromkeys(hidden),
            "from": None if all(row.source == "simulated" for row in rows) else st.column_config.TextColumn(),
        },
    )
    chosen = event["selection"]["rows"] if event else []
    return rows[chosen[0]] if chosen and chosen[0] < len(rows) else None


def styled(rows: Sequence[PlanRow], theme: str) -> Styler:
    """The table, with the distances grey that may as well be none; `theme`: "light" or "dark"."""
    bands = [row.behind for row in rows]
    sure = [
        "" if band is None else f"{'' if band.has_sign else 'uncertain, '}{band.p10:+.1%} to {band.p90:+.1%}"
        for band in bands
    ]
    columns = {
        "place": [place_text(row, rows) for row in rows],
        "plan": [row.label for row in rows],
        "step (s)": [row.time_s for row in rows],
        "from": [row.source for row in rows],
        "behind best": [row.margin for row in rows],
        "P10 to P90": sure,
        "GiB": [in_unit(row.memory_bytes, "GiB", "bytes") for row in rows],
        "memory": [row.verdict for row in rows],
        "cost": [money(row.cost_usd) for row in rows],
        "precision": [row.precision for row in rows],
        "recompute": [row.recompute for row in rows],
        "ZeRO": [row.zero_stage for row in rows],
        "SMs": [row.sms for row in rows],
    }
    table = pd.DataFrame(columns)
    grey = GREY.get(theme, GREY["light"])
    colours = [grey if band is not None and not band.has_sign else "" for band in bands]
    return table.style.apply(lambda _: colours, subset=DISTANCE)


OBJECTIVES = {
    "time": "shortest step",
    "cost": "cheapest run",
    "deadline": "cheapest run within a number of days",
    "memory": "most free memory",
    "energy": "least energy",
}
HEADROOM = {"kept": "safe plans only", "none": "plans at risk too"}
"""What may be asked of the memory."""
ANY = "any"
"""Choice of no training framework."""
KEPT = {
    "precision": "precision",
    "recompute": "recompute",
    "microbatch": "micro-batch",
    "zero_stage": "ZeRO stage",
    "sms": "communication SMs",
}
"""Keys of a plan space that may keep the scenario's value."""


ALWAYS_KEPT = ("precision", "sms")
"""Those that keep it unless the visitor says otherwise."""

TOP = 6
"""Families of plans that are simulated."""

SEARCH = "plan.search"
"""Form field with the name of the search whose answer is shown; it outlives the scenario it began with."""


_KEY = re.compile(r"plan/[0-9a-f]{32}")


def show() -> None:
    """Draw the page."""
    scenario = state.current()
    space, options = _question(scenario)
    key = _key(scenario, space, options)
    shown = forms.value(
        SEARCH, key, lambda found: isinstance(found, str) and _KEY.fullmatch(found) is not None
    )
    if shown != key and not long_work.known(shown):
        shown = key  # the answer is no longer in the cache
    work_args = (predictions.plan, scenario, space, options)
    if shown != key:
        left, right = st.columns([5, 2], vertical_alignment="center")
        left.info("These plans are for an earlier scenario or earlier settings.")
        right.button("Search again", key="search anew", on_click=_anew, args=(key, *work_args))
    found: PlanResult | None
    if shown == key:
        found = widgets.long_work("plan", key, "Search", *work_args)
    else:
        found = long_work.taken_up("plan", shown)
    if long_work.known(shown):
        forms.put(SEARCH, shown)
    if found is not None:
        _answer(found)


def begin(scenario: Scenario) -> None:
    """Start a search with the default question, whose answer the page will show."""
    forms.clear("plan.")
    st.session_state[page_switch.PAGE] = "planner"  # where the answer will be shown
    space, options = _space(scenario, [], list(ALWAYS_KEPT)), {"objective": "time", "top": TOP}
    _anew(_key(scenario, space, options), predictions.plan, scenario, space, options)


def _key(scenario: Scenario, space: dict[str, Any], options: dict[str, Any]) -> str:
    asked = f"{state.cache_key(scenario)}/{sorted(space.items())}/{sorted(options.items())}"
    return f"plan/{hashlib.sha256(asked.encode()).hexdigest()[:32]}"


def _anew(key: str, *work_args: Any) -> None:
    long_work.start_on_click("plan", key, *work_args)
    forms.put(SEARCH, key)


def _question(scenario: Scenario) -> tuple[dict[str, Any], dict[str, Any]]:
    left, right = st.columns(2)
    names, kinds = list(OBJECTIVES), list(SCHEDULES)
    show: dict[str, Any] = {"format_func": OBJECTIVES.__getitem__, "key": "objective"}
    objective = forms.one_of(left.selectbox, "Look for", "plan.objective", names, names[0], **show)
    days = None
    if objective == "deadline":
        days = forms.number(left.number_input, "Deadline (days)", "plan.days", 1.0, 1e4, 60.0, key="deadline")
    show = {"placeholder": "all", "help": "None chosen: all of them", "key": "schedules"}
    schedules = forms.some_of(right.multiselect, "Schedules", "plan.schedules", kinds, **show)
    left, middle, right = st.columns(3)
    trainer = forms.one_of(
        left.selectbox,
        "Training framework",
        "plan.trainer",
        [ANY, *TRAINERS],
        ANY,
        key="framework",
        format_func=lambda name: name if name == ANY else trainer_of(name).label,
        help="Only plans that it can run are searched, priced as it runs them",
    )
    headroom = forms.one_of(
        middle.selectbox,
        "Plans that fit",
        "plan.headroom",
        list(HEADROOM),
        "kept",
        key="head-room",
        format_func=HEADROOM.__getitem__,
        help="A plan is safe where all that framework and allocator may reserve fits, and at risk where only "
        "the bytes in use fit",
    )
    kept = forms.some_of(
        right.multiselect,
        "Keep as it is",
        "plan.keep",
        list(KEPT),
        ALWAYS_KEPT,
        key="kept keys",
        format_func=KEPT.__getitem__,
        help="The more is kept, the faster the search",
    )
    options: dict[str, Any] = {"objective": objective, "top": TOP}
    if headroom == "none":
        options["headroom"] = 0.0
    if trainer != ANY:
        options["trainer"] = trainer
    if days is not None:
        options["deadline_days"] = days
    return _space(scenario, schedules, kept), options


def _space(scenario: Scenario, schedules: Sequence[str], kept: Sequence[str]) -> dict[str, Any]:
    """The keys of a PlanSpace that are not searched."""
    own: dict[str, Any] = {
        "precision": scenario.precision,
        "recompute": scenario.recompute,
        "microbatch": scenario.parallel.microbatch,
        "zero_stage": scenario.parallel.zero_stage,
        "sms": scenario.communication.sms,
    }
    space: dict[str, Any] = {name: (own[name],) for name in kept if name != "sms" or own[name]}
    if "precision" not in kept and scenario.fleet is None:  # else a stated one would stay
        space["precision"] = all_precisions(scenario, scenario.machine)
    return {**space, "schedule": tuple(schedules)} if schedules else space


def _answer(result: PlanResult) -> None:
    _best(result)
    counts = st.columns(4)
    counts[0].metric("Plans considered", f"{result.considered:,}")
    counts[1].metric("Legal and fits", f"{result.fitting:,}")
    counts[2].metric("Simulated", f"{result.simulated:,}")
    counts[3].metric("Place of the current plan", "-" if result.own_rank is None else f"{result.own_rank:,}")
    if result.kept:
        st.caption(escaped(". ".join(result.kept)))
    if result.trainer is not None:
        st.caption(escaped(" ".join((*result.trainer.replaced, *result.trainer.sentences))))
    st.header("The best plans")
    if any(row.place != n for n, row in enumerate(result.ranked, 1)):
        st.caption("= marks tied plans: P10 to P90 of their difference contains zero.")
    row = choice(result.ranked, "ranked")
    if row is not None:
        _offer(row, "ranked")
    st.header("Trade-offs")
    st.caption("No other plan beats one of these in time, GPU-hours and memory together.")
    event = widgets.figure(
        charts.pareto(
            [_point(row) for row in result.pareto],
            None if result.own is None else _point(result.own),
            "memory of the fullest GPU (GiB)",
        ),
        "Pareto front: step time against memory",
        "pareto",
        on_select="rerun",
        selection_mode="points",
    )
    points = event["selection"]["points"] if event else []
    chosen = next((p["point_index"] for p in points if p["curve_number"] == 0), None)
    if chosen is not None and chosen < len(result.pareto):
        _offer(result.pareto[chosen], "pareto")
    else:
        st.caption("Choose a point, or a row of the table, to open its plan.")
        with st.expander("The same as a table"):
            row = choice(result.pareto, "front")
            if row is not None:
                _offer(row, "front")
    st.header("Refused")
    st.dataframe(
        [{"reason": row.reason, "plans": row.count, "for example": row.example} for row in result.refused],
        hide_index=True,
        column_config={"plans": st.column_config.NumberColumn(format="localized")},
    )
    for note in result.notes:
        st.caption(escaped(note))


def _best(result: PlanResult) -> None:
    """Draw the best plan, which opens on the page Result."""
    best = result.best
    with st.container(border=True, key="best-plan"):
        st.markdown(f"**The best plan:** {escaped(best.label)}, {escaped(best.precision)}")
        tiles: dict[str, tuple[Callable[[float], str], float | None]] = {
            "Step time": (partial(written, "step_time_s"), best.time_s),
            "Duration": (partial(written, "days"), best.days),
            "Cost": (money, best.cost_usd),
        }
        *places, last = st.columns(4)
        for place, (label, (as_text, value)) in zip(places, tiles.items(), strict=True):
            place.metric(label, money(None) if value is None else as_text(value))
        last.metric("Memory", f"{in_unit(best.memory_bytes, 'GiB', 'bytes'):.1f} GiB")
        colour, icon = headline.VERDICTS[best.verdict]
        last.caption(f":{colour}-badge[:material/{icon}: {best.verdict}]")
        for place, (as_text, value) in zip(places, tiles.values(), strict=True):
            if best.spread is not None and value is not None:  # all are proportional to the step time
                low, high = best.spread.p10, best.spread.p90
                place.caption(f"P10 to P90: {as_text(value * low)} to {as_text(value * high)}")
        places[-1].caption(headline.price_words(best.scenario))
        if st.button("Open the best plan", type="primary", icon=":material/open_in_new:", key="open best"):
            state.adopt(best.scenario)
            page_switch.go("result")


def _point(row: PlanRow) -> tuple[str, float, float]:
    return row.label, row.time_s, in_unit(row.memory_bytes, "GiB", "bytes")


def _offer(row: PlanRow, name: str) -> None:
    st.markdown(f"**{escaped(row.label)}**, {row.time_s:.3f} s a step ({row.source})")
    st.button(
        "Open as the scenario", key=f"open {name}", on_click=state.adopt, args=(row.scenario,), type="primary"
    )
    for trainer in map(trainer_of, TRAINERS):
        with st.expander(f"{trainer.label}: its arguments for this plan"):
            st.code(trainer.arguments(row.scenario).text(), language="bash")
