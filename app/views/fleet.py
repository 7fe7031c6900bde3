"""The page Fleet: one job over several pools of GPUs, by pipeline rank."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import streamlit as st

from moesim.app import forms, predictions, scenario_links, state, uploads, widgets
from moesim.app.charts import step as charts
from moesim.app.texts import escaped, money
from moesim.app.views import headline
from moesim.hwmodels import format_quantity, list_clusters, load_cluster
from moesim.hwmodels.cluster import Cluster
from moesim.hwmodels.errors import InputError, MoesimError
from moesim.hwmodels.units import in_unit
from moesim.simulator.common.texts import overridden_key
from moesim.simulator.layout.job import legal_pipelines
from moesim.simulator.planner.result import PlanResult
from moesim.simulator.predict.result import Result
from moesim.simulator.scenario import Scenario
from moesim.simulator.schedules import fleet_defaults
from moesim.simulator.studies.reprice import PoolShare, fleet_shares

# -- fleet answer ------------------------------------------------------------------------------------
# What a fleet gives: its figures beside the scenario's, what each pool does, and its best plan.

SHOWN = ("step_time_s", "tokens_per_s_per_gpu", "days", "cost_usd")
"""Figures of the page."""


def show_answer(scenario: Scenario, fleet: Scenario, result: Result, texts: Sequence[str]) -> None:
    """Draw the predicted fleet; `texts` are the changes of the preset that make it."""
    pools = fleet_shares(fleet, result)
    headline.shortage(result)
    before = {}
    if scenario.fleet is None:
        with suppress(MoesimError):  # the scenario's own plan may be illegal, and other pages say why
            before = {name: value for _, value, name in headline.tiles(state.result_of(scenario))}
    shown = [tile for tile in headline.tiles(result) if tile[2] in SHOWN]
    for place, (label, value, name) in zip(st.columns(len(shown)), shown, strict=True):
        place.metric(label, value)
        if name in before:
            place.caption(
                f"{before[name]} on {scenario.machine.n_gpus:,} {scenario.machine.accelerator.name} alone"
            )
    slowest, step_s = next(share for share in pools if share.is_bottleneck), result.step.time_s
    idle = ", ".join(
        f"{share.pool.accelerator} {share.idle_s / step_s:.0%}" for share in pools if share is not slowest
    )
    st.markdown(
        f"**Bottleneck:** pool {pools.index(slowest) + 1}, {escaped(slowest.pool.accelerator)}, whose ranks "
        f"idle least ({slowest.idle_s / step_s:.0%} of the step; {escaped(idle)}). Layers are already spread "
        "over the pools by speed and memory, and pipeline ranks by number of GPUs."
    )
    names = [f"{n}: {share.pool.n_gpus:,} {share.pool.accelerator}" for n, share in enumerate(pools, start=1)]
    left, right = st.columns(2, gap="large")
    with left:
        st.header("Busy and idle")
        rows = [(name, share.busy_s, share.idle_s) for name, share in zip(names, pools, strict=True)]
        widgets.figure(
            charts.pools_busy(rows), "Seconds of a step that each pool is busy and idle", key="fleet busy"
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
    opened = (state.preset(), tuple(texts), fleet)
    widgets.button("Open as the scenario", "open fleet", state.open_scenario, *opened, type="primary")
    _search(fleet)


def _table(names: Sequence[str], pools: Sequence[PoolShare]) -> None:
    st.dataframe(
        [
            {
                "pool": name,
                "ranks": f"{share.pool.first_rank} to {share.pool.last_rank}",
                "layers": share.pool.layers,
                "one layer": format_quantity(share.pool.layer_s, "s"),
                "idle": share.idle_s,
                "GiB per GPU": in_unit(share.pool.memory.total_bytes, "GiB", "bytes"),
                "memory": share.pool.memory.verdict,
                "rent of the run": money(share.usd),
                "profile": share.pool.profile,
                "confidence": share.pool.confidence,
            }
            for name, share in zip(names, pools, strict=True)
        ],
        hide_index=True,
        column_config={
            "idle": st.column_config.NumberColumn("idle (s)", format="%.2f"),
            "GiB per GPU": st.column_config.NumberColumn(format="%.1f"),
        },
    )
    st.caption(
        "“One layer” is the compute time of a layer for one micro-batch, forward and backward, alone on "
        "a GPU of the pool. Rent is for the main phase, at the hourly price of the pool's cluster."
    )


def _search(fleet: Scenario) -> None:
    """Offer a search for the fleet's best plan, which also compares it with each pool alone."""
    st.header("Is it worth it?")
    st.caption(
        "Searches for the best plan of the fleet and of each pool alone, so that the comparison is fair."
    )
    key = f"fleet plan/{hashlib.sha256(state.cache_key(fleet).encode()).hexdigest()[:32]}"
    work = (predictions.plan, fleet, {"precision": (fleet.precision,)}, {"objective": "time", "top": 4})
    found: PlanResult | None = widgets.long_work("fleet plan", key, "Find the best plan of the fleet", *work)
    if found is None:
        return
    for sentence in () if found.fleet is None else found.fleet.sentences:
        st.markdown(f"- {escaped(sentence)}")
    best = found.best
    st.markdown(f"Best plan: **{escaped(best.label)}**, {best.time_s:.3f} s a step")
    widgets.button("Open the best plan", "open fleet plan", state.adopt, best.scenario)


OWN = "the scenario's cluster"
BEST = "the best for its accelerator"
MOST_POOLS = 4
OTHERS = ("h100-1024", "h200-1024")
"""The first of these that is not the scenario's own cluster is the second pool to begin with."""
CHANGES = "fleet.changes"
"""Form field with the changes that the page offered to make a fleet legal."""
MOST_CHANGES = 5
REPLACED = (
    "cluster",
    "fleet",
    "profile",
    "parallel.pp",
    "schedule",
    "precision",
    "stages",
    "name",
    "description",
)
"""Keys that the page sets itself."""


def show() -> None:
    """Draw the page."""
    scenario = state.current()
    st.caption(
        "One training job on several kinds of GPU. A pool gets pipeline ranks in proportion to its GPUs, and "
        "layers by its speed and memory. No collective crosses pools."
    )
    pools, clusters = _pools(scenario)
    texts = _settings(scenario, pools, clusters)
    kept = [
        text
        for text in state.overrides()
        if not any(scenario_links.is_below(text, key) for key in (*REPLACED, *map(overridden_key, texts)))
    ]
    whole = (*kept, *texts)
    try:
        fleet = state.build(state.preset(), whole)
        result = state.result_of(fleet, "Simulating one step of the fleet")
    except MoesimError as error:
        st.error(escaped(error), icon=":material/error:")
        if isinstance(error, InputError) and error.key is not None:
            with st.container(horizontal=True):
                for value in error.nearest:
                    label, name = f"Set {error.key} = {value}", f"fleet nearest {error.key} {value}"
                    widgets.button(escaped(label), name, _take, error.key, value, type="primary")
        return
    show_answer(scenario, fleet, result, whole)


# -- the form -------------------------------------------------------------------------------------------


def _pools(scenario: Scenario) -> tuple[list[dict[str, Any]], list[Cluster]]:
    """The chosen pools as a scenario states them, and their clusters."""
    before = () if scenario.fleet is None else scenario.fleet.pools
    counts = list(range(2, MOST_POOLS + 1))
    start = min(MOST_POOLS, max(2, len(before)))
    count = forms.one_of(
        st.segmented_control, "Pools", "fleet.count", counts, start, key="fleet count", required=True
    )
    pools: list[dict[str, Any]] = []
    clusters: list[Cluster] = []
    for number, column in enumerate(st.columns(int(count)), start=1):
        with column, st.container(border=True):
            pool, cluster = _pool(scenario, number)
            pools.append(pool)
            clusters.append(cluster)
    return pools, clusters


def _pool(scenario: Scenario, number: int) -> tuple[dict[str, Any], Cluster]:
    before = scenario.fleet.pools[number - 1 : number] if scenario.fleet is not None else ()
    own = scenario.cluster if isinstance(scenario.cluster, str) else None
    shipped = list_clusters()
    names = [*([OWN] if scenario.fleet is None and own not in shipped else []), *shipped]
    start = own if own in shipped and number == 1 else names[0]
    if number > 1:
        start = next(name for name in OTHERS if name != own)
    if before and before[0].cluster in shipped:
        start = str(before[0].cluster)
    name = forms.one_of(
        st.selectbox,
        f"Pool {number}: cluster",
        f"fleet.cluster{number}",
        names,
        start,
        key=f"fleet cluster {number}",
    )
    whole = scenario.machine if name == OWN else load_cluster(name)
    most = whole.nodes
    now = scenario.machine.nodes if scenario.fleet is None and name == own else most
    if before and before[0].cluster == name:
        now = before[0].nodes or most
    field, key = f"fleet.nodes{number}.{name}"[:60], f"fleet nodes {number} {name}"
    nodes = forms.number(st.number_input, "Nodes", field, 1, max(most, now), now, step=1, key=key)
    best, fitting = state.compute(
        f"profiles/{name if name != OWN else state.cache_key(scenario)}",
        "Looking for profiles",
        predictions.profiles,
        name if name != OWN else whole,
    )
    profiles = [BEST, *fitting]
    stated = scenario.profile if scenario.profile in fitting else BEST
    if before and before[0].profile in fitting:
        stated = str(before[0].profile)
    profile = forms.one_of(
        st.selectbox,
        "Profile",
        f"fleet.profile{number}",
        profiles,
        stated,
        key=f"fleet profile {number}",
        format_func=lambda found: f"{best} (best)" if found == BEST else found,
    )
    cluster = whole.model_copy(update={"nodes": int(nodes)})
    st.caption(f"{cluster.n_gpus:,} GPUs of {escaped(cluster.accelerator.name)}")
    described = (
        name if name != OWN else uploads.portable_data(whole.model_dump(mode="json", exclude_none=True))
    )
    stated = best if profile == BEST else profile
    return {"cluster": described, "nodes": int(nodes), "profile": stated}, cluster


def _settings(scenario: Scenario, pools: Sequence[dict[str, Any]], clusters: Sequence[Cluster]) -> list[str]:
    """The changes that turn the scenario into the fleet."""
    layers = scenario.shape.n_layers + scenario.shape.mtp_layers
    lengths = list(legal_pipelines(clusters, layers))
    left, middle, right = st.columns(3)
    now = scenario.parallel.pp
    if lengths:
        nearest = min(lengths, key=lambda pp: (abs(pp - now), pp))
        pp = forms.one_of(
            left.selectbox,
            "Pipeline ranks",
            "fleet.pp",
            lengths,
            nearest,
            key=f"fleet pp {nearest}",
            help="Only these give every rank the same number of GPUs, all of one pool",
        )
    else:
        pp = now
        left.warning("No number of pipeline ranks divides these pools: change the number of nodes of one.")
    schedules = list(fleet_defaults())
    start = scenario.schedule if scenario.schedule in schedules else schedules[-1]
    schedule = forms.one_of(
        middle.selectbox,
        "Schedule",
        "fleet.schedule",
        schedules,
        start,
        key="fleet schedule",
        help="Without DualPipe: it keeps each stage on two ranks, and their gradients would cross pools",
    )
    recipes = ["fp8", "bf16"]
    known = scenario.precision if scenario.precision in recipes else "bf16"
    precision = forms.one_of(
        right.selectbox, "Precision", "fleet.precision", recipes, known, key="fleet precision"
    )
    parts = [f"{cluster.n_gpus}x{cluster.accelerator.name}" for cluster in clusters]
    texts = [
        f"fleet.pools={json.dumps(list(pools), separators=(',', ':'))}",
        f"parallel.pp={pp}",
        f"schedule={schedule}",
        f"precision={precision}",
        f"name={scenario.shape.name}-{'+'.join(parts)}",
        f"description={scenario.shape.name} on {' and '.join(parts)}",
    ]
    return [*texts, *_changes()]


def _changes() -> list[str]:
    """The changes that the page offered and the visitor took, with a button to take them back."""
    found: list[str] = forms.value(
        CHANGES,
        [],
        lambda value: (
            isinstance(value, list)
            and len(value) <= MOST_CHANGES
            and all(isinstance(text, str) and len(text) <= 60 and "=" in text for text in value)
        ),
    )
    if found:
        with st.container(horizontal=True, vertical_alignment="center"):
            st.caption("Also changed for the fleet:")
            for text in found:
                others, key = [other for other in found if other != text] or None, f"fleet change {text}"
                more = {"icon": ":material/close:", "help": "Undo this change"}
                widgets.button(escaped(text), key, forms.put, CHANGES, others, **more)
    return found


def _take(key: str, value: object) -> None:
    field = {"parallel.pp": "fleet.pp", "schedule": "fleet.schedule", "precision": "fleet.precision"}.get(key)
    if field is not None:
        forms.put(field, value)
        return
    before: list[str] = [
        t for t in forms.value(CHANGES, [], lambda v: isinstance(v, list)) if not t.startswith(f"{key}=")
    ]
    forms.put(CHANGES, [*before, f"{key}={value}"][-MOST_CHANGES:])
