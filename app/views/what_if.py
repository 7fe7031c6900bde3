"""The page What if: sliders that change the current scenario, and the tornado of its uncertain inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import streamlit as st

from moesim.app import forms, predictions, scenario_links, state, widgets
from moesim.app.charts import differences as charts
from moesim.app.texts import escaped
from moesim.app.views import headline
from moesim.hwmodels import format_quantity
from moesim.hwmodels.errors import MoesimError
from moesim.simulator.predict.result import Result
from moesim.simulator.predict.work_size import Band
from moesim.simulator.scenario import Scenario
from moesim.simulator.studies.compare import changes, waterfall
from moesim.simulator.studies.curves import faster_links
from moesim.simulator.studies.uncertainty import Sensitivity

SHOWN = {"step_time_s": False, "tokens_per_s_per_gpu": True, "days": False, "cost_usd": False}
"""Figures of the page, and whether a larger value is better."""
FACTORS = (0.25, 0.5, 1.0, 1.5, 2.0, 4.0)
"""Factors of a bandwidth, each a button."""


def show() -> None:
    """Draw the page."""
    scenario = state.current()
    if scenario.fleet is not None:  # an error inside a fragment is not caught by the page
        raise scenario.needs_one_cluster()
    base = state.result_of(scenario)
    _explore(scenario, base)
    _tornado(scenario, base)


@st.fragment
def _explore(scenario: Scenario, base: Result) -> None:
    """Draw the sliders and their effect; only this part of the page is redrawn when one moves."""
    left, right = st.columns([4, 7], gap="large")
    with left:
        moved = [*_kernels(scenario), *_links(scenario), *_load(scenario)]
        price = _price(scenario)
    state.publish()  # the address holds the sliders
    with right:
        problem: MoesimError | None = None
        with st.container(key="progress-line", gap=None):  # as high as one line, whatever it says
            try:
                changed = scenario.overridden(*moved, *price)
                result = state.result_of(changed)
            except MoesimError as error:
                problem = error
            else:
                bands = headline.changes("what if", (scenario, base), (changed, result))
                if bands is not None:
                    st.caption("Below each figure P10 to P90 of its difference from the current scenario.")
        if problem is not None:
            st.error(escaped(problem), icon=":material/error:")
            return
        _tiles(base, result, bands)
        widgets.numbers_first()
        # The same parts whatever is moved, and the changes last: nothing jumps under the pointer.
        note = "" if moved or price else "Nothing is changed: move a slider"
        if st.button("Make this the current scenario", key="adopt", disabled=bool(note), help=note or None):
            state.adopt(changed)
            forms.clear("what-if.")
            st.rerun(scope="app")
        widgets.figure(
            charts.waterfall(
                "now",
                base.step.time_s,
                [(row.cause, row.seconds[1] - row.seconds[0]) for row in waterfall([base, result])],
                "what if",
                result.step.time_s,
                sure=headline.sure("step_time_s", bands)[0],
            ),
            f"From {base.step.time_s:.3f} s to {result.step.time_s:.3f} s by cause",
            "what if",
        )
        st.code("\n".join((*moved, *price)) or "# nothing is changed", language=None)


def _kernels(scenario: Scenario) -> list[str]:
    accelerator = scenario.machine.accelerator
    if accelerator.compute_units is None or accelerator.communication_engine is not None:
        return []
    now = scenario.communication.sms
    most = accelerator.compute_units.n - 1
    label, key = f"Communication {escaped(accelerator.unit_name)}s", f"what if sms {now}"
    sms = forms.number(st.slider, label, "what-if.sms", 0, most, now, key=key)
    return [] if sms == now else [f"communication.sms={sms}"]


def _links(scenario: Scenario) -> list[str]:
    """Buttons for slower and faster links, so that twice the bandwidth is one click."""
    node = scenario.machine.node
    scale_up = scenario_links.scale_up_name(scenario.machine)
    chosen = {}
    for name, label, figure in (
        ("nic", "NIC", node.nic_bandwidth),
        ("scale_up", scale_up, node.accelerator.scale_up_bandwidth),
    ):
        if figure is not None:
            value = figure.value * (node.n_nics_per_gpu if name == "nic" else 1)
            found = forms.one_of(
                st.segmented_control,
                f"{label} bandwidth, now {format_quantity(value, 'bytes_per_s')} a GPU and direction",
                f"what-if.{name}",
                FACTORS,
                1.0,
                key=f"what if {name} {value:g}",
                format_func=lambda factor: f"x{factor:g}",
            )
            chosen[name] = 1.0 if found is None else found  # a second click on a button takes it back
    return list(faster_links(scenario, **chosen))


def _load(scenario: Scenario) -> list[str]:
    now = float(scenario.routing.expert_load_cv.value)
    spread = forms.number(
        st.slider,
        "Spread of expert load (CV)",
        "what-if.cv",
        0.0,
        max(1.0, now),
        now,
        step=0.02,
        key=f"what if cv {now:g}",
        help="From micro-batch to micro-batch",
    )
    found = [] if spread == now else [f"routing.expert_load_cv={spread:g}"]
    if scenario.routing.load is None:
        more: dict[str, Any] = {
            "step": 0.05,
            "key": "what if zipf",
            "help": "0: all experts are equally popular",
        }
        label = "Lasting imbalance (Zipf exponent)"
        zipf = forms.number(st.slider, label, "what-if.zipf", 0.0, 1.0, 0.0, **more)
        if zipf:
            found.append(f"routing.load={{kind: zipf, exponent: {zipf:g}}}")
    return found


def _price(scenario: Scenario) -> list[str]:
    stated = scenario.machine.price_per_gpu_hour
    now = 0.0 if stated is None else round(stated.value, 2)
    more: dict[str, Any] = {
        "step": 0.05,
        "help": "Arithmetic on the predicted hours: nothing is simulated again",
    }
    label = f"Price ($ per GPU-hour; now: {headline.price_words(scenario)})"
    most, key = max(12.0, now), f"what if price {now:g}"
    price = forms.number(st.slider, label, "what-if.price", 0.0, most, now, key=key, **more)
    return [] if price == now else [f"cluster.price_per_gpu_hour=${price:g}/h"]


def _tiles(base: Result, result: Result, bands: Mapping[str, Band] | None) -> None:
    headline.shortage(result)
    differ = changes(base, result)
    shown = [tile for tile in headline.tiles(result) if tile[2] in SHOWN]
    for place, (label, value, name) in zip(st.columns(2) + st.columns(2), shown, strict=True):
        by, shade = differ.get(name) or 0.0, headline.colour(name, bands, SHOWN[name])
        # A difference and its interval always have their lines, so that nothing moves with a slider.
        place.metric(label, value, headline.change(name, by), delta_color=shade if by else "off")
        words = headline.sure(name, bands)[1] if by else "no difference"
        mark = "" if result.memory.fits else f":red[{headline.DOES_NOT_FIT}], "
        place.caption(f"{mark}{words or headline.WAITING}")


def _tornado(scenario: Scenario, base: Result) -> None:
    st.header("What matters most")
    st.markdown("How far the step moves when one uncertain input alone is at its 10 % or 90 % point.")
    key, work = f"sensitivity/{state.cache_key(scenario)}", (predictions.sensitivity, scenario)
    found: Sensitivity | None = widgets.long_work("tornado", key, "Rank the uncertain inputs", *work)
    if found is None:
        return
    rows = [
        (row["source"], f"{row['low']}, {row['high']}", row["step_low_s"], row["step_high_s"])
        for row in found.rows()
    ]
    widgets.figure(
        charts.tornado(rows, base.step.time_s), "Step time with each uncertain input at its ends", "tornado"
    )
