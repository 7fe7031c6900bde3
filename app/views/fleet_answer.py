"""What a fleet gives: its figures beside the scenario's, what each pool does, and its best plan."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import streamlit as st

from moesim.app import long_work, predictions, state, widgets
from moesim.app.charts import fleet as charts
from moesim.app.escaping import escaped
from moesim.app.views import headline
from moesim.hwmodels import format_quantity
from moesim.hwmodels.errors import MoesimError
from moesim.hwmodels.units import in_unit
from moesim.simulator.planner.result import PlanResult
from moesim.simulator.predict.result import Result
from moesim.simulator.scenario import Scenario
from moesim.simulator.studies.fleet_shares import PoolShare, fleet_shares

SHOWN = {"step_time_s": False, "tokens_per_s_per_gpu": True, "days": False, "cost_usd": False}
"""Figures of the page, and whether a larger value is better."""


def show(scenario: Scenario, fleet: Scenario, result: Result, texts: Sequence[str]) -> None:
    """Draw the predicted fleet; `texts` are the changes of the preset that make it."""
    pools = fleet_shares(fleet, result)
    headline.shortage(result)
    _tiles(scenario, result)
    _verdict(pools, result)
    names = [_name(number, share) for number, share in enumerate(pools, start=1)]
    left, right = st.columns(2, gap="large")
    with left:
        st.header("Busy and idle")
        rows = [(name, share.busy_s, share.idle_s) for name, share in zip(names, pools, strict=True)]
        widgets.figure(
            charts.busy(rows), "Seconds of a step that each pool is busy and idle", key="fleet busy"
        )
    with right:
        st.header("Shares")
        rent = sum(share.usd or 0.0 for share in pools)
        known = all(share.usd is not None for share in pools) and rent > 0.0
        parts = [
            (name, share.gpu_share, share.layer_share, (share.usd or 0.0) / rent if known else None)
            for name, share in zip(names, pools, strict=True)
        ]
        widgets.figure(charts.shares(parts), "Each pool's share of GPUs, layers and rent", key="fleet shares")
    _table(names, pools)
    st.button(
        "Open as the scenario",
        key="open fleet",
        type="primary",
        on_click=state.open_scenario,
        args=(state.preset(), tuple(texts), fleet),
    )
    _search(fleet)


def _name(number: int, share: PoolShare) -> str:
    return f"{number}: {share.pool.n_gpus:,} {share.pool.accelerator}"


def _tiles(scenario: Scenario, result: Result) -> None:
    base = None
    if scenario.fleet is None:
        try:
            base = state.result_of(scenario)
        except MoesimError:  # the scenario's own plan may be illegal, and other pages say why
            base = None
    before = {} if base is None else {name: value for _, value, name in headline.tiles(base)}
    shown = [tile for tile in headline.tiles(result) if tile[2] in SHOWN]
    for place, (label, value, name) in zip(st.columns(len(shown)), shown, strict=True):
        place.metric(label, value)
        if name in before:
            place.caption(
                f"{before[name]} on {scenario.machine.n_gpus:,} {scenario.machine.accelerator.name} alone"
            )


def _verdict(pools: Sequence[PoolShare], result: Result) -> None:
    """Which pool holds the others up, in words."""
    slowest = next(share for share in pools if share.is_bottleneck)
    idle = ", ".join(
        f"{share.pool.accelerator} {share.idle_s / result.step.time_s:.0%}"
        for share in pools
        if share is not slowest
    )
    st.markdown(
        f"**Bottleneck:** pool {pools.index(slowest) + 1}, {escaped(slowest.pool.accelerator)}, whose ranks "
        f"idle least ({slowest.idle_s / result.step.time_s:.0%} of the step; {escaped(idle)}). Layers are "
        "already spread by speed and memory; ranks follow from the GPUs."
    )


def _table(names: Sequence[str], pools: Sequence[PoolShare]) -> None:
    st.dataframe(
        [
            {
                "pool": name,
                "ranks": f"{share.pool.first_rank} to {share.pool.last_rank}",
                "layers": share.pool.layers,
                "one layer": format_quantity(share.pool.layer_s, "s"),
                "idle": share.idle_s,
                "GiB a GPU": in_unit(share.pool.memory.total_bytes, "GiB", "bytes"),
                "memory": share.pool.memory.verdict,
                "rent of the run": headline.money(share.usd),
                "profile": share.pool.profile,
                "confidence": share.pool.confidence,
            }
            for name, share in zip(names, pools, strict=True)
        ],
        hide_index=True,
        column_config={
            "idle": st.column_config.NumberColumn("idle (s)", format="%.2f"),
            "GiB a GPU": st.column_config.NumberColumn(format="%.1f"),
        },
    )
    st.caption(
        "One layer: its compute for one micro-batch, forward and backward, alone on a GPU of the pool. Rent: "
        "the main phase at the hourly price of the pool's cluster."
    )


def _search(fleet: Scenario) -> None:
    """Offer a search for the fleet's best plan, which also compares it with each pool alone."""
    st.header("Is it worth it?")
    st.caption("Searches the best plan of the fleet and of each pool alone, so that both are at their best.")
    key = f"fleet plan/{hashlib.sha256(state.cache_key(fleet).encode()).hexdigest()[:32]}"
    options = {"objective": "time", "top": 4}
    space = {"precision": (fleet.precision,)}
    found: PlanResult | None = long_work.long_work(
        "fleet plan",
        key,
        "Search for its best plan",
        predictions.plan,
        fleet,
        space,
        options,
        with_progress=True,
    )
    if found is None:
        return
    for sentence in () if found.fleet is None else found.fleet.sentences:
        st.markdown(f"- {escaped(sentence)}")
    best = found.best
    st.markdown(f"Best plan: **{escaped(best.label)}**, {best.time_s:.3f} s a step")
    st.button("Open the best plan", key="open fleet plan", on_click=state.adopt, args=(best.scenario,))
