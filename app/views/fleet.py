"""The page Fleet: one job over several pools of GPUs, by pipeline rank."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import streamlit as st

from moesim.app import forms, predictions, scenario_links, state, uploads
from moesim.app.escaping import escaped
from moesim.app.views import fleet_answer
from moesim.hwmodels import list_clusters, load_cluster
from moesim.hwmodels.cluster import Cluster
from moesim.hwmodels.errors import InputError, MoesimError
from moesim.simulator.common.key_values import overridden_key
from moesim.simulator.layout.pools import legal_pipelines
from moesim.simulator.scenario import Scenario
from moesim.simulator.schedules import fleet_defaults

OWN = "the scenario's cluster"
BEST = "the best of its accelerator"
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
        "One job on several kinds of GPUs: every pipeline rank is on one pool, in proportion to its GPUs, "
        "and layers are spread by the pools' speed and memory. No collective crosses pools."
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
        _complain(error)
        return
    fleet_answer.show(scenario, fleet, result, whole)


# -- the form -------------------------------------------------------------------------------------------


def _pools(scenario: Scenario) -> tuple[list[dict[str, Any]], list[Cluster]]:
    """The chosen pools as a scenario states them, and their clusters."""
    before = () if scenario.fleet is None else scenario.fleet.pools
    count = st.segmented_control(
        "Pools",
        list(range(2, MOST_POOLS + 1)),
        required=True,
        **forms.one_of(
            "fleet.count", list(range(2, MOST_POOLS + 1)), min(MOST_POOLS, max(2, len(before))), "fleet count"
        ),
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
    name = st.selectbox(
        f"Pool {number}: cluster",
        names,
        **forms.one_of(f"fleet.cluster{number}", names, start, f"fleet cluster {number}"),
    )
    whole = scenario.machine if name == OWN else load_cluster(name)
    most = whole.nodes
    now = scenario.machine.nodes if scenario.fleet is None and name == own else most
    if before and before[0].cluster == name:
        now = before[0].nodes or most
    nodes = st.number_input(
        "Nodes",
        1,
        max(most, now),
        step=1,
        **forms.number(
            f"fleet.nodes{number}.{name}"[:60], 1, max(most, now), now, f"fleet nodes {number} {name}"
        ),
    )
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
    profile = st.selectbox(
        "Profile",
        profiles,
        format_func=lambda found: f"{best} (best)" if found == BEST else found,
        **forms.one_of(f"fleet.profile{number}", profiles, stated, f"fleet profile {number}"),
    )
    cluster = whole.model_copy(update={"nodes": int(nodes)})
    st.caption(f"{cluster.n_gpus:,} GPUs of {escaped(cluster.accelerator.name)}")
    described = (
        name if name != OWN else uploads.portable_data(whole.model_dump(mode="json", exclude_none=True))
    )
    return {
        "cluster": described,
        "nodes": int(nodes),
        "profile": best if profile == BEST else profile,
    }, cluster


def _settings(scenario: Scenario, pools: Sequence[dict[str, Any]], clusters: Sequence[Cluster]) -> list[str]:
    """The changes that turn the scenario into the fleet."""
    layers = scenario.shape.n_layers + scenario.shape.mtp_layers
    lengths = list(legal_pipelines(clusters, layers))
    left, middle, right = st.columns(3)
    now = scenario.parallel.pp
    if lengths:
        nearest = min(lengths, key=lambda pp: (abs(pp - now), pp))
        pp = left.selectbox(
            "Pipeline ranks",
            lengths,
            help="Only these give every rank the same number of GPUs, all of one pool",
            **forms.one_of("fleet.pp", lengths, nearest, f"fleet pp {nearest}"),
        )
    else:
        pp = now
        left.warning("No number of ranks divides these pools: change the nodes of one.")
    schedules = list(fleet_defaults())
    start = scenario.schedule if scenario.schedule in schedules else schedules[-1]
    schedule = middle.selectbox(
        "Schedule",
        schedules,
        help="DualPipe keeps a stage on two ranks, whose gradients would cross pools",
        **forms.one_of("fleet.schedule", schedules, start, "fleet schedule"),
    )
    recipes = ["fp8", "bf16"]
    known = scenario.precision if scenario.precision in recipes else "bf16"
    precision = right.selectbox(
        "Precision", recipes, **forms.one_of("fleet.precision", recipes, known, "fleet precision")
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
                st.button(
                    escaped(text),
                    icon=":material/close:",
                    key=f"fleet change {text}",
                    help="Take this change back",
                    on_click=forms.put,
                    args=(CHANGES, [other for other in found if other != text] or None),
                )
    return found


def _complain(error: MoesimError) -> None:
    """Say why the fleet is refused, with the nearest legal values as buttons."""
    st.error(escaped(error), icon=":material/error:")
    if not isinstance(error, InputError) or error.key is None:
        return
    with st.container(horizontal=True):
        for value in error.nearest:
            st.button(
                escaped(f"Set {error.key} = {value}"),
                key=f"fleet nearest {error.key} {value}",
                type="primary",
                on_click=_take,
                args=(error.key, value),
            )


def _take(key: str, value: object) -> None:
    field = {"parallel.pp": "fleet.pp", "schedule": "fleet.schedule", "precision": "fleet.precision"}.get(key)
    if field is not None:
        forms.put(field, value)
        return
    before: list[str] = [
        t for t in forms.value(CHANGES, [], lambda v: isinstance(v, list)) if not t.startswith(f"{key}=")
    ]
    forms.put(CHANGES, [*before, f"{key}={value}"][-MOST_CHANGES:])
