"""The page Topology: a picture of the cluster, and the load of its links, ranks and experts."""

from __future__ import annotations

import json
from typing import Any

import streamlit as st

from moesim.app import forms, predictions, state, widgets
from moesim.app.charts import step
from moesim.app.texts import badge, escaped
from moesim.simulator.predict.result import Result
from moesim.simulator.scenario import Scenario
from moesim.simulator.studies.reprice import without_prices


def show() -> None:
    """Draw the page."""
    scenario = state.current()
    cluster = scenario.machine
    found: predictions.Drawing = state.compute(
        f"topology/{state.cache_key(scenario)}", "Wiring the cluster", predictions.topology, scenario
    )
    drawn, counted = found.picture, found.inventory
    st.header(escaped(cluster.title), anchor=False)
    widgets.figure(step.picture(drawn), f"{cluster.title}: GPUs, switches and cables", "cluster")
    names = step.NAMES
    shown = [
        *(f"{count:,} {names.get(name, name)}" for name, count in counted.switches.items()),
        *(f"{count:,} cables {names.get(name, name)}" for name, count in counted.cables.items()),
    ]
    left_out = sum(layer.left_out for layer in drawn.layers)
    more = (
        "The picture shows the first nodes and the last one, with the switches that they connect to. "
        if left_out
        else ""
    )
    kind = found.kind.replace("-fat-tree", " fat tree")
    st.caption(f"{more}A {kind} of {found.n_gpus:,} GPUs: {escaped(', '.join(shown))}.")
    st.header("Load of links, ranks and experts")
    asked = scenario.overridden("resolution=full", *_faults(scenario))
    st.caption("Simulates each GPU separately. It takes about ten seconds, during which you can go on.")
    key = f"whole/{state.cache_key(without_prices(asked))}"
    whole: Result | None = widgets.long_work("whole", key, "Simulate every GPU", predictions.interval, asked)
    if whole is not None:
        _maps(whole)
        _faults_cost(whole)


FAULTS: dict[str, tuple[str, str, float | None]] = {
    "nothing": ("", "", None),
    "a network plane is down": ("down", "plane", None),
    "the NICs of a GPU are down": ("down", "nic", None),
    "the NICs of a GPU are slow": ("slow-link", "nic", 0.5),
    "a GPU computes slower": ("slow-gpu", "gpu", 0.8),
    "a node is lost": ("node-loss", "node", None),
}
"""Faults by their label: (kind in a scenario, numbered part, initial fraction that is left or None)."""


def _faults(scenario: Scenario) -> list[str]:
    """The faults that the visitor chose, as overrides; empty where the scenario states faults itself."""
    if scenario.faults:
        st.caption(f"The scenario states {len(scenario.faults)} faults.")
        return []
    what, which, left = st.columns([3, 2, 4])
    kinds = list(FAULTS)
    chosen = forms.one_of(what.selectbox, "What fails", "topology.fault", kinds, kinds[0], key="fault")
    kind, numbered, rest = FAULTS[chosen]
    if not kind:
        return []
    most = (scenario.machine.nodes if numbered == "node" else scenario.machine.n_gpus) - 1
    label = f"Which {numbered if numbered in ('plane', 'node') else 'GPU'} (from 0)"
    field, key = f"topology.{numbered}", f"fault {numbered}"
    number = forms.number(which.number_input, label, field, 0, most, 0, key=key)
    fault: dict[str, Any] = {"kind": kind}
    if kind in ("down", "slow-link"):
        fault["link"] = f"{numbered}:{number}"
    else:
        fault[numbered] = number
    if rest is not None:
        name = "bandwidth" if kind == "slow-link" else "speed"
        fault[name] = forms.number(
            left.slider,
            f"Fraction of its {name} that remains",
            f"topology.part-{name}",
            0.05,
            1.0,
            rest,
            step=0.05,
            key=f"part {name}",
        )
    text = f"faults={json.dumps([fault])}"
    st.code(f"--resolution full --set '{text}'", language=None)
    return [text]


def _maps(result: Result) -> None:
    full = result.full
    if full is None:
        return
    sure = ""  # where only a part of the model is simulated
    if result.uncertainty is not None:
        band = result.uncertainty.bands["step_time_s"]
        sure = f" (P10 {band.p10:.3f} s, P90 {band.p90:.3f} s; {escaped(result.uncertainty.note)})"
    st.markdown(
        f"With each of {full.gpus:,} GPUs simulated separately, in {full.groups} groups per pipeline "
        f"rank, the step takes **{result.step.time_s:.3f} s** {badge(result.confidence)}{sure}."
    )
    titles = [data.title for data in full.heat_maps]
    chosen = st.segmented_control("Heat map", titles, default=titles[0], key="heat map") or titles[0]
    data = next(item for item in full.heat_maps if item.title == chosen)
    widgets.figure(step.heat_map(data), f"Heat map: {data.title}, {data.unit}", "heat")
    left, right = st.columns(2, gap="large")
    with left:
        st.markdown("**Links by kind**: share of the nominal bandwidth in use, over the step")
        percent = st.column_config.NumberColumn(format="percent")
        st.dataframe(
            {
                "kind": [row.kind for row in full.link_kinds],
                "links": [row.links for row in full.link_kinds],
                "used": [row.used for row in full.link_kinds],
                "mean": [row.mean for row in full.link_kinds],
                "most": [row.most for row in full.link_kinds],
            },
            hide_index=True,
            column_config={"mean": percent, "most": percent},
        )
    with right:
        st.markdown("**GPUs that keep their group waiting**")
        shown = full.stragglers[:8]
        st.dataframe(
            {
                "GPU": [row.gpu for row in shown],
                "pipeline rank": [row.pipeline_rank for row in shown],
                "group waited (s)": [row.held_up_s for row in shown],
                "compute time / group's mean": [row.compute_over_group for row in shown],
            },
            hide_index=True,
            column_config={
                "group waited (s)": st.column_config.NumberColumn(format="%.3f"),
                "compute time / group's mean": st.column_config.NumberColumn(format="%.4f"),
            },
        )


def _faults_cost(result: Result) -> None:
    causes = () if result.full is None else result.full.causes
    if causes:
        st.markdown("**What each fault costs**")
        st.caption(
            "Both steps of a difference use the same random draws, so the difference is less uncertain than "
            "either step. Its interval is not computed."
        )
        seconds = st.column_config.NumberColumn(format="%.3f")
        st.dataframe(
            {
                "fault": [row.cause for row in causes],
                "step with this fault alone (s)": [row.step_s for row in causes],
                "longer by (s)": [row.effect_s for row in causes],
                "": [
                    row.note or ("with this fault no step ends" if row.step_s is None else "")
                    for row in causes
                ],
            },
            hide_index=True,
            column_config={"step with this fault alone (s)": seconds, "longer by (s)": seconds},
        )
