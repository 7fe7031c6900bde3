"""The page Scenario: model, cluster and plan, with an immediate check of legality and memory."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache

import streamlit as st

import moesim
from moesim.app import exports, jobs, page_switch, predictions, state, upload_files, uploads, widgets
from moesim.app import scenario_links as changes
from moesim.app.charts import step as charts
from moesim.app.texts import compact, escaped, written
from moesim.app.views import headline
from moesim.hwmodels import list_clusters
from moesim.hwmodels.errors import InfeasibleError, InputError, MoesimError
from moesim.hwmodels.network import list_networks
from moesim.hwmodels.summary_text import short
from moesim.hwmodels.units import in_unit
from moesim.simulator.common.texts import overridden_key
from moesim.simulator.model.catalogue import (
    MOST_SEARCHED,
    catalogue,
    context_text,
    row_of,
    search,
    shipped_models,
)
from moesim.simulator.model.precision import PRECISIONS
from moesim.simulator.model.recompute import recompute_label
from moesim.simulator.planner.search import Repair
from moesim.simulator.scenario import Scenario
from moesim.simulator.scenario.presets import shipped_presets
from moesim.simulator.scenario.stated import is_stated
from moesim.simulator.schedules import SCHEDULES

# -- models ------------------------------------------------------------------------------------------
# The choice of a model on the page Scenario: a search over the shipped ones, and how an upload was read.

READ = "model upload"
"""Session key with what the last uploaded model was read as."""

NOTE = (
    "Every word must occur in the name, the kinds of attention, the experts or the source; "
    "`<100B`, `>1T` and `active<10B` compare sizes"
)


def finder() -> None:
    """Draw the search over the shipped models, with a table of what it finds."""
    with st.popover("Find a model", width="stretch", icon=":material/search:"):
        text = st.text_input("Search", help=NOTE, key="model search", max_chars=MOST_SEARCHED)
        rows = search(catalogue(), text)
        st.caption(f"{len(rows)} of {len(catalogue())} shipped models")
        if not rows:
            return
        columns = {
            "name": [row.name for row in rows],
            "total": [short(row.parameters_total, 4) for row in rows],
            "activated": [short(row.parameters_activated, 4) for row in rows],
            "layers": [row.layers for row in rows],
            "attention": [row.attention for row in rows],
            "experts": [row.experts for row in rows],
            "context": [context_text(row.context) for row in rows],
        }
        st.dataframe(columns, hide_index=True, width="stretch")
        words = "Choose a model of the table"
        st.selectbox(
            "Use",
            [row.name for row in rows],
            index=None,
            key="model found",
            on_change=_taken,
            placeholder=words,
        )


def facts(scenario: Scenario) -> None:
    """Draw the sizes of the chosen model, and how an upload was read."""
    row = row_of(scenario.shape)
    parts = [
        f"{short(row.parameters_total, 4)} parameters",
        f"{short(row.parameters_activated, 4)} activated",
        f"{row.layers} layers",
        f"attention: {row.attention}",
        f"experts: {row.experts}" if row.experts != "dense" else "dense",
        f"context {context_text(row.context)}" if row.context else "",
        f"not modelled: {'; '.join(row.not_modelled)}" if row.not_modelled else "",
    ]
    st.caption(escaped(f"{row.name}: " + ", ".join(part for part in parts if part)))
    read = st.session_state.get(READ)
    if not isinstance(read, uploads.Kept) or read.reading is None:
        return
    if isinstance(scenario.model, str) and scenario.model.endswith(read.token):
        with st.expander(escaped(f"How {read.name} was read")):
            understood = read.reading.understood
            rows = [{"key": key, "value": value, "as": meaning} for key, value, meaning in understood]
            if rows:
                st.dataframe(rows, hide_index=True, width="stretch")
            ignored = ", ".join(read.reading.ignored) or "nothing"
            st.markdown(escaped(f"Ignored, as it affects neither time nor memory: {ignored}."))
            for text in read.reading.not_modelled:
                st.markdown(escaped(f"Not modelled: {text}."))


def _taken() -> None:
    name = st.session_state["model found"]
    if name is not None:
        state.set_override("model", name)
        state.follow(model_changed=True)


def _chosen(key: str, name: str) -> None:
    state.set_override(key, st.session_state[name])
    state.follow(model_changed=True)


# -- repair ------------------------------------------------------------------------------------------
# What to do about a scenario that is illegal or does not fit: mark its field, offer plans that fit.


def guard(show: Callable[[Scenario], None]) -> None:
    """Draw what depends on the current scenario, or say what is wrong with it and how to mend it."""
    try:
        show(state.current())
    except MoesimError as error:
        wrong = state.refusals(error)
        keys = [one.key for one in wrong if isinstance(one, InputError) and one.key is not None]
        # Mark the inputs of these keys with a frame and a word, whatever they show.
        keys += map(overridden_key, state.left_out())
        names = [re.sub(r"[^a-zA-Z0-9_-]", "-", f"st-key-input {key}") for key in keys]
        if names:
            boxes = ", ".join(f".{name} [data-baseweb]" for name in names)
            labels = ", ".join(f".{name} label p::after" for name in names)
            red = "light-dark(#b3261e, #ff8a80)"
            st.html(
                f"<style>{boxes} {{outline: 2px solid {red}; border-radius: 0.5rem}} "
                f"{labels} {{content: ' not possible here'; color: {red}}}</style>"
            )
        widgets.complain(*wrong)
        if isinstance(error, InputError | InfeasibleError) and not state.left_out():
            widgets.guard(lambda: offer(state.current()))


def offer(scenario: Scenario) -> None:
    """Search the nearest plans that fit on request, and offer each with what it changes."""
    if scenario.fleet is not None or scenario.stages.blocks is not None:
        return
    key, work = f"repair/{state.cache_key(scenario)}", (predictions.nearest_plans, scenario)
    label = "Find the nearest plan that fits"
    found: tuple[Repair, ...] | None = widgets.long_work("repair", key, label, *work)
    for number, repair in enumerate(found or ()):
        row = repair.row
        words = "; ".join(f"{key} {_text(before)} -> {_text(after)}" for key, before, after in repair.changes)
        with st.container(horizontal=True, vertical_alignment="center"):
            more = {"icon": ":material/build:", "help": "Change the scenario to this plan"}
            widgets.button(escaped(words), f"repair {number}", _use, repair, **more)
            st.caption(
                f"{written('step_time_s', row.time_s)} a step, "
                f"{in_unit(row.memory_bytes, 'GiB', 'bytes'):.1f} GiB, {row.verdict}"
            )


def _use(repair: Repair) -> None:
    """Make the repaired plan the scenario's; its layers are those that the repair balanced."""
    for key in ("stages.layers", "stages.mtp"):
        state.set_override(key, None)
    state.adopt(repair.row.scenario, new=False)


def _text(value: object) -> str:
    return recompute_label(value) if isinstance(value, tuple) else str(value)


REFUSED = "refused upload"
"""Session key with the reason why the last upload was refused; it stays until the next upload."""

MOST_NODES = 100_000
RECOMPUTE = ("none", "selective", "full", "deepseek-v3")


def show() -> None:
    """Draw the page."""
    fleet = None
    with suppress(MoesimError):  # the form shows the error
        fleet = state.current().fleet
    if fleet is not None:  # a job on several clusters, whose plan has a page of its own
        st.info(
            "Several clusters share this job. The page Fleet has its pools, pipeline ranks and schedule; to "
            "have inputs here again, take the change of the fleet back.",
            icon=":material/workspaces:",
        )
        if st.button("Open the page Fleet", key="open fleet"):
            page_switch.go("fleet")
        guard(_verdict)
        return
    inputs, verdict = st.columns([7, 5], gap="medium")
    with inputs:
        _open()
        scenario = state.form()
        with suppress(MoesimError):  # the form shows the error
            begin(state.current())  # computed while the inputs are drawn
        _inputs(scenario)
    with verdict:
        guard(_verdict)
    if isinstance(scenario.cluster, str) and scenario.cluster in list_clusters():
        _profile_job(scenario.cluster)  # for the next time this page is drawn


def begin(scenario: Scenario) -> None:
    """Start the jobs whose results the page will show, without waiting for them."""
    state.begin(scenario)
    jobs.submit(f"check/{state.cache_key(scenario)}", predictions.check, scenario, ahead=True)


def _open() -> None:
    left, right = st.columns(2, vertical_alignment="bottom")
    names = moesim.presets()
    with left:
        known = names if state.preset() in names else [state.preset(), *names]
        st.session_state["input preset"] = state.preset()
        st.selectbox(
            "Preset", known, key="input preset", on_change=_preset_chosen, format_func=_with_confidence
        )
    with right, st.popover("Open or save", width="stretch"):
        _upload("scenario", "Open a scenario (YAML or JSON)")
        _upload("model", "Use a model's config.json (Hugging Face) or model.yaml")
        _upload("profile", "Use a calibration profile (YAML or JSON)")
        with suppress(MoesimError):  # the page says what is wrong
            scenario = state.current()
            text, ending = exports.scenario_file(scenario)
            label, name = (
                f"Save the scenario ({ending[1:].upper()})",
                exports.file_name(scenario.name, ending),
            )
            widgets.download(label, text, name, "application/octet-stream", icon=":material/download:")
            warning = changes.only_here(state.preset(), state.overrides())
            st.caption(escaped(warning or "The address of this page is a link to this scenario:"))
            st.code(changes.link(state.preset(), state.overrides()), language=None, wrap_lines=True)
    if REFUSED in st.session_state:  # outside the popover, because it closes
        st.error(escaped(st.session_state[REFUSED]), icon=":material/error:")


@lru_cache(maxsize=1)
def confidences() -> dict[str, str]:
    """The evidence behind the GEMM rates of every shipped scenario, by name; takes a second, once."""
    return {row.preset: row.confidence for row in shipped_presets()}


def _with_confidence(name: str) -> str:
    known = confidences().get(name)
    return uploads.with_names(name) if known is None else f"{name} ({known})"


def _preset_chosen() -> None:
    state.open_scenario(st.session_state["input preset"], ())


def _upload(kind: str, label: str) -> None:
    endings = [ending.lstrip(".") for ending in uploads.ENDINGS[kind]]
    key = f"upload {kind}"
    st.file_uploader(
        label,
        type=[*endings, "gz"],
        key=key,
        max_upload_size=uploads.MAX_BYTES[kind] // 10**6,
        on_change=_uploaded,
        args=(kind, key),
    )


def _uploaded(kind: str, key: str) -> None:
    try:
        given = upload_files.given(st.session_state[key])
        if given is None:
            return
        st.session_state.pop(REFUSED, None)
        if kind == "scenario":
            state.open_upload(*given)
            return
        kept = state.accept(kind, *given)
        state.set_override(kind, kept.token)
        if kind == "model":
            st.session_state[READ] = kept
            state.follow(model_changed=True)
    except MoesimError as error:
        st.session_state[REFUSED] = str(error)


def _inputs(scenario: Scenario) -> None:
    _what(scenario)
    st.markdown("**Plan**")
    columns = st.columns(4)
    degrees = (
        ("pp", "Pipeline (PP)", "Pipeline ranks"),
        ("ep", "Expert (EP)", "Ranks that share the experts of a layer"),
        ("tp", "Tensor (TP)", "Ranks that share the GEMMs of a layer"),
        ("cp", "Context (CP)", "Ranks that share a sequence"),
        ("vpp", "Virtual (VPP)", "Stages a rank of the interleaved schedules"),
        ("microbatch", "Micro-batch", "Sequences in one micro-batch of one data-parallel rank"),
        ("zero_stage", "ZeRO stage", "1 shards optimizer states, 2 gradients too, 3 parameters too"),
    )
    for number, (name, label, note) in enumerate(degrees):
        with columns[number % 4]:
            least, most = (0, 3) if name == "zero_stage" else (1, 4096)
            widgets.number(scenario, f"parallel.{name}", label, least, most, note)
    with columns[3]:
        widgets.toggle(
            scenario, "parallel.sequence_parallel", "SP", "Sequence parallel: needed for TP > 1 with experts"
        )
    left, middle, right = st.columns(3)
    with left:
        widgets.choice(scenario, "schedule", "Schedule", list(SCHEDULES))
    with middle:
        widgets.choice(scenario, "recompute", "Recompute", RECOMPUTE, "What the backward pass recomputes")
    with right:
        widgets.choice(scenario, "precision", "Precision", list(PRECISIONS))
    nodes, network, left, right = st.columns(4)
    with nodes:
        _nodes(scenario)
    with network:
        _network(scenario)
    with left:
        widgets.number(scenario, "batch.sequences", "Batch (sequences)", 1, 1_000_000)
    with right:
        widgets.number(scenario, "batch.sequence_length", "Sequence (tokens)", 1, 10_000_000)
    _communication(scenario)


def _communication(scenario: Scenario) -> None:
    machine = scenario.machine
    st.markdown("**Communication and load**")
    left, right = st.columns(2)
    with left:
        count = machine.accelerator.compute_units
        if machine.accelerator.communication_engine is None and count is not None:
            label, note = (
                f"Communication {machine.accelerator.unit_name}s of {count.n}",
                "Each GPU gives so many to communication kernels",
            )
            widgets.number(scenario, "communication.sms", label, 0, count.n - 1, note)
        else:
            widgets.number(scenario, "communication.sms", "Communication units", 0, 4096)
    with right:
        label, note = (
            "Spread of expert load (CV)",
            "Coefficient of variation of one expert's load from micro-batch to micro-batch",
        )
        widgets.fraction(scenario, "routing.expert_load_cv", label, 1.0, 0.01, note)


def _what(scenario: Scenario) -> None:
    first, second, third = st.columns([4, 5, 4])
    known = jobs.cache.get(_profiles_key(str(scenario.cluster)))
    with first:
        widgets.choice(scenario, "model", "Model", list(shipped_models()), on_change=_chosen)
    with second:
        widgets.choice(scenario, "cluster", "Cluster", list(list_clusters()), on_change=_cluster_chosen)
    with third:
        widgets.choice(
            scenario,
            "profile",
            "Calibration profile",
            list(known[1]) if known is not None else [],  # as soon as they are known: nobody waits for them
            "Where the rates of kernels come from; the list has the profiles for this accelerator",
        )
    finder()
    facts(scenario)
    tokens = scenario.run.tokens
    assumed = " (assumed: the scenario states no number)" if not is_stated(scenario, "run.tokens") else ""
    st.caption(
        f"{escaped(scenario.shape.name)}, trained on {compact(tokens)} tokens{assumed}; Run & cost has more."
    )


def _nodes(scenario: Scenario) -> None:
    """Inputs for the size of the cluster; a cluster given by name starts with its own number of nodes."""
    machine = scenario.machine
    refused, nodes = state.refused("cluster.nodes"), min(machine.nodes, MOST_NODES)
    if isinstance(refused, int) and 1 <= refused <= MOST_NODES:
        nodes = refused
    name = widgets.place("cluster.nodes", nodes)
    note = f"{machine.node.n_gpus:,} GPUs each; {machine.n_gpus:,} together"
    st.number_input(
        "Nodes", 1, MOST_NODES, step=1, key=name, help=note, on_change=_nodes_chosen, args=(name,)
    )


def _nodes_chosen(name: str) -> None:
    wanted = int(st.session_state[name])
    state.set_override("cluster.nodes", None)
    if state.form().machine.nodes != wanted:
        state.set_override("cluster.nodes", wanted)
    state.follow()


def _network(scenario: Scenario) -> None:
    """Input for the network between the nodes, where there is one."""
    network = scenario.machine.network
    name = widgets.place("cluster.network", state.refused("cluster.network") or network.name)
    options = list_networks()
    shown = st.session_state[name]
    st.selectbox(
        "Network",
        options if shown in options else [shown, *options],
        key=name,
        help="Switches between the nodes; how many nodes it joins depends on their ports and layers",
        on_change=_network_chosen,
        args=(name, network.name),
    )


def _network_chosen(name: str, before: str) -> None:
    state.set_override("cluster.network", None)
    if before != st.session_state[name]:
        state.set_override("cluster.network", st.session_state[name])


def _cluster_chosen(key: str, name: str) -> None:
    """Change the cluster, and choose a calibration profile for its accelerator."""
    chosen = st.session_state[name]
    state.set_override(key, chosen)
    with suppress(MoesimError):  # the page says what does not fit together
        best, fitting = _profile_job(chosen).result(20.0)
        if state.current().profile not in fitting:
            state.set_override("profile", best)
    state.follow()


def _profile_job(cluster: str) -> jobs.Job:
    return jobs.submit(_profiles_key(cluster), predictions.profiles, cluster)


def _profiles_key(cluster: str) -> str:
    return f"profiles/{cluster}/{moesim.__version__}"


def _verdict(scenario: Scenario) -> None:
    key = f"check/{state.cache_key(scenario)}"
    found = state.compute(key, "Checking the plan", predictions.check, scenario)
    memory = found.memory
    used, limit = (
        f"{in_unit(size, 'GiB', 'bytes'):.1f} GiB" for size in (memory.total_bytes, memory.capacity_bytes)
    )
    plan = f"{found.n_gpus:,} x {found.accelerator}, DP {found.dp:,}, {found.microbatches:,} micro-batches"
    if memory.verdict == "fits":
        st.success(
            f"Legal and fits: {used} of {limit} on the fullest GPU. {escaped(plan)}.", icon=":material/check:"
        )
    elif memory.risk is not None:
        st.warning(
            f"Legal, {escaped(memory.risk)}. {used} are in use on the fullest GPU. {escaped(plan)}.",
            icon=":material/warning:",
        )
    else:
        largest = max(memory.by_kind_bytes, key=lambda kind: memory.by_kind_bytes[kind])
        st.error(
            f"Legal, but does not fit: {used} of {limit} on the fullest GPU; the largest part is "
            f"{largest.replace('_', ' ')}. More PP, EP or TP, a higher ZeRO stage or recompute would need "
            f"less. {escaped(plan)}.",
            icon=":material/memory:",
        )
        offer(scenario)
    widgets.figure(charts.memory(memory), f"Memory of the fullest GPU by kind: {used} of {limit}", "memory")
    headline.show(scenario, state.result_of(scenario), columns=2)
    with st.expander("Which layers each stage holds"):
        st.code("\n".join(found.stages), language=None)
