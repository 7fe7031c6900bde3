"""Rules that choose the keys which a scenario leaves out (pure; decision 0033).

They read `simulator/data/defaults.yaml` and the shipped profiles and offers whenever a scenario is built.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from importlib import resources
from typing import Any, TypeVar

from msgspec import Struct
from pydantic import BaseModel, Field, PositiveInt

from moesim.hwmodels.accelerator import Accelerator
from moesim.hwmodels.calibration import load_profile
from moesim.hwmodels.cluster import Cluster
from moesim.hwmodels.confidence import best_profile
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.frozen import Frozen
from moesim.hwmodels.network import load_network
from moesim.hwmodels.node import Node, load_node
from moesim.hwmodels.price import Offer, Term, list_prices, load_prices
from moesim.hwmodels.provenance import Kind, SourcedFraction
from moesim.hwmodels.topologies import build_topology
from moesim.hwmodels.units import parse_quantity
from moesim.hwmodels.validation import nearest, validate_model
from moesim.hwmodels.yaml_io import parse_mapping, shipped_names
from moesim.simulator.dispatchers.registry import dispatcher
from moesim.simulator.frameworks.registry import NONE, release_of
from moesim.simulator.frameworks.software import Software
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.scenario.framework import (
    FRAMEWORK,
    HOST,
    FrameworkChoice,
    Planned,
    Recipe,
    usual_framework,
    usual_host,
)
from moesim.simulator.scenario.parallel import ParallelPlan, PlanDefault, expert_tp_of, sequence_parallel_of

FILE = "data/defaults.yaml"

ModelT = TypeVar("ModelT", bound=BaseModel)

KERNELS = "deepep-2025-02"
"""Dispatcher of a scenario that states none."""
SMS = 20
"""SMs of the communication kernels, as DeepSeek-V3 trained."""


class Default(Frozen):
    """A key that a scenario leaves out, with the value that a rule chose and the reason."""

    key: str
    """Dotted path of the scenario key."""
    value: str | int | float
    """Value as the key would be written; a number is in SI units."""
    why: str
    """The rule that chose it."""
    kind: Kind
    source: str
    range: tuple[float, float] | None = None
    """Lowest and highest value that an interval of results assumes for the key; None if it is not varied."""

    @property
    def text(self) -> str:
        """The value as text, such as `fp8`, `0.16 (0.08 to 0.32)` or `1.48e+13`."""
        value = self.value if isinstance(self.value, str) else f"{self.value:.6g}"
        return value if self.range is None else f"{value} ({self.range[0]:g} to {self.range[1]:g})"


class Chosen(Struct, frozen=True):
    """A default, with its value in the type of the scenario's field."""

    value: Any
    default: Default


Rule = Callable[[Planned, ModelShape, Sequence[Cluster]], Chosen]
"""Chooses a key of a scenario, whose earlier keys are chosen, from its model and clusters."""


class _Precision(Frozen):
    trained_in_fp8: dict[str, str]


class _NodeChoice(Frozen):
    node: str
    paid: PositiveInt
    why: str


class _NetworkChoice(Frozen):
    vendor: str | None = None
    nic: str | None = None
    adapter: str | None = None
    networks: tuple[str, ...] = Field(min_length=1)

    def fits(self, node: Node) -> bool:
        """Whether the choice applies to nodes of this vendor with NICs of this rate."""
        rate = None if node.nic_bandwidth is None else node.nic_bandwidth.value
        return (
            self.adapter == node.adapter
            and self.vendor in (None, node.accelerator.vendor)
            and (self.nic is None or (rate is not None and rate == parse_quantity(self.nic, "bytes_per_s")))
        )


class _Prices(Frozen):
    terms: tuple[Term, ...]


class _TokenCount(Frozen):
    value: float
    kind: Kind
    source: str
    date: str


class _Tokens(Frozen):
    models: dict[str, _TokenCount]
    others: _TokenCount


class _Spread(SourcedFraction):
    architecture: str | None = None  # on whose accelerators it was measured; None for any


class _Defaults(Frozen):
    precision: _Precision
    frameworks: tuple[FrameworkChoice, ...]
    recipes: tuple[Recipe, ...]
    nodes: dict[str, _NodeChoice]
    networks: tuple[_NetworkChoice, ...]
    prices: _Prices
    tokens: _Tokens
    spreads: dict[str, tuple[_Spread, ...]]


@lru_cache(maxsize=1)
def _data() -> _Defaults:
    text = resources.files("moesim.simulator").joinpath(FILE).read_text("utf-8")
    return validate_model(_Defaults, parse_mapping(text, FILE), FILE)


# -- the cluster ---------------------------------------------------------------------------------------


def node_of(accelerator: str) -> str:
    """Name of the shipped node of an accelerator; raises InputError where there is none.

    Nodes with adapters of their own, which a cloud rents, must be named.
    """
    chosen = _data().nodes.get(accelerator)
    if chosen is not None:
        return chosen.node
    nodes = _nodes()
    if accelerator not in nodes:
        known = sorted(nodes)
        raise InputError(
            f"cluster.accelerator={accelerator!r} has no shipped node{nearest(accelerator, known)}; those "
            f"with one are {', '.join(known)}; or describe the node (cluster.node)",
            key="cluster.accelerator",
        )
    return nodes[accelerator]


def has_node(accelerator: str) -> bool:
    """Whether a node is shipped for an accelerator."""
    return accelerator in _data().nodes or accelerator in _nodes()


def accelerator_named(text: str) -> str:
    """The accelerator that a name or its short form means: `h100` is h100-sxm.

    Raises InputError for a name that none or several of the accelerators with a shipped node have.
    """
    known = sorted({*_data().nodes, *_nodes()})
    names = [name for name in known if name == text]
    names = names or [name for name in known if name in (f"{text}-sxm", f"{text}-oam")]
    names = names or [name for name in known if name.startswith(f"{text}-")]
    if len(names) != 1:
        several = f"; it may be {', '.join(names)}" if names else nearest(text, known)
        raise InputError(
            f"accelerator {text!r} is not known{several}; known: {', '.join(known)}",
            key="accelerators",
            nearest=names,
        )
    return names[0]


@lru_cache(maxsize=1)
def _nodes() -> dict[str, str]:
    nodes = [load_node(name) for name in reversed(shipped_names("nodes"))]
    return {node.accelerator.name: node.name for node in nodes if node.adapter is None}


def network_of(node: Node, nodes: int) -> str:
    """Name of the shipped network for `nodes` nodes; raises InputError where none is large enough."""
    if nodes == 1:
        return "single-node"
    line = next((line for line in _data().networks if line.fits(node)), None)
    if line is None:
        known = ", ".join(sorted({line.adapter for line in _data().networks if line.adapter}))
        raise InputError(
            f"cluster.network is missing, and no network is shipped for NICs of kind {node.adapter!r} of "
            f"node {node.name}; known kinds: {known}; or describe the network",
            key="cluster.network",
        )
    for name in line.networks:
        try:
            build_topology(node, nodes, load_network(name))
        except InputError as error:
            problem = error
        else:
            return name
    raise InputError(
        f"cluster.network is missing, and {line.networks[-1]} does not take the nodes: {problem}"
    )


def price_of(node: Node) -> Offer | None:
    """Default offer for renting a GPU of a node for an hour; None without an offer for its accelerator.

    It is the median offer, scaled up where a node has spare GPUs that are paid as well.
    """
    name = node.accelerator.name
    if name not in list_prices():
        return None
    offers = load_prices(name).offers
    term = next(term for term in _data().prices.terms if any(offer.term == term for offer in offers))
    fitting = sorted((o for o in offers if o.term == term), key=lambda offer: offer.value)
    offer, share = fitting[(len(fitting) - 1) // 2], paid_share(node)
    if share == 1.0:
        return offer
    paid = f"{offer.source}; times {round(share * node.n_gpus)}/{node.n_gpus}: spare GPUs are paid"
    return offer.model_copy(update={"value": offer.value * share, "kind": "derived", "source": paid})


def paid_share(node: Node) -> float:
    """GPUs that are rented for each GPU of a node that is used: above 1 where a rack has spares."""
    choice = _data().nodes.get(node.accelerator.name)
    return 1.0 if choice is None or choice.node != node.name else choice.paid / node.n_gpus


def with_default_price(cluster: Cluster) -> Cluster:
    """Return the cluster with the default price, unless it states a price (or that it has none)."""
    offer = None if "price_per_gpu_hour" in cluster.model_fields_set else price_of(cluster.node)
    return cluster if offer is None else without_mark(cluster, "price_per_gpu_hour", offer)


def without_mark(model: ModelT, key: str, value: object) -> ModelT:
    """Return a copy of a frozen model with a value for `key` that still counts as left out."""
    copy = model.model_copy()
    name, _, below = key.partition(".")
    copy.__dict__[name] = without_mark(getattr(model, name), below, value) if below else value
    return copy


def cluster_defaults(place: str, cluster: Cluster, left_out: Sequence[str]) -> list[Default]:
    """List the defaults of a cluster at `place` of the scenario, for `left_out` keys and its price."""
    node, chosen = cluster.node, []
    chip = node.accelerator
    source = "hwmodels/data"
    if "node" in left_out:
        choice = _data().nodes.get(chip.name)
        why = f"the shipped node of {chip.name}" + ("" if choice is None else f": {choice.why}")
        chosen.append(Default(key=f"{place}.node", value=node.name, why=why, kind="assumed", source=source))
    if "network" in left_out:
        why = (
            "one node has no network"
            if cluster.nodes == 1
            else f"the smallest shipped network for {cluster.nodes:,} nodes of {chip.vendor} with such NICs"
        )
        name = cluster.network.name
        chosen.append(Default(key=f"{place}.network", value=name, why=why, kind="assumed", source=source))
    price = cluster.price_per_gpu_hour
    if isinstance(price, Offer) and "price_per_gpu_hour" not in cluster.model_fields_set:
        why = f"median of the {price.term} offers for {chip.name} ({price.terms}, {price.date})"
        key = f"{place}.price_per_gpu_hour"
        chosen.append(Default(key=key, value=price.text, why=why, kind=price.kind, source=price.source))
    return chosen


# -- the framework --------------------------------------------------------------------------------------


def recipe_choices(scenario: Planned, machines: Sequence[Cluster]) -> list[Chosen]:
    """Switches that the named release's own recipe turns on for such a plan, without the stated ones."""
    recipe = next((line for line in _data().recipes if line.fits(scenario, machines)), None)
    if recipe is None:
        return []
    chip, title = machines[0].accelerator.name, release_of(recipe.release).title
    why = f"what the own recipes of {title} turn on for routed models on {chip} with {recipe.kernels}"
    chosen = []
    for switch in sorted(recipe.switches.model_fields_set - scenario.software.model_fields_set):
        value = getattr(recipe.switches, switch)
        parts = value.model_dump().items() if isinstance(value, BaseModel) else ()
        text = ", ".join(f"{k} {v:g}" for k, v in parts) or " ".join(
            [value] if isinstance(value, str) else value
        )
        told = _chosen(f"software.{switch}", text, why, "published", recipe.source).default
        chosen.append(Chosen(value, told))
    return chosen


def framework_defaults(software: Software, told: Collection[str] = ()) -> list[Default]:
    """List what the named framework answers for switches that are not stated, and what is assumed of it.

    `told`: keys whose defaults are listed already, those of its recipe.
    """
    if software.framework == NONE:
        return []
    release, stated = release_of(software.framework), software.model_fields_set
    chosen = [
        Default(
            key=f"software.{switch}",
            value="absent" if value is None else str(value).lower() if isinstance(value, bool) else value,
            why=f"what {release.title} does",
            kind="published",
            source=source,
        )
        for switch, (value, source) in release.answers.items()
        if switch not in stated and f"software.{switch}" not in told
    ]
    assumed = release.assumed(switch for switch in Software.model_fields if switch not in stated)
    if assumed:
        why = f"as without a framework, since nobody has read what {release.title} does: {', '.join(assumed)}"
        name, source = software.framework, "simulator/frameworks"
        chosen.append(Default(key="software", value=name, why=why, kind="assumed", source=source))
    return chosen


def is_answer(item: Default) -> bool:
    """Whether a default is one of the many answers of a framework."""
    return item.key.partition(".")[0] == "software" and item.key not in (FRAMEWORK, HOST)


# -- the other keys ------------------------------------------------------------------------------------


def profile_of(accelerator: Accelerator) -> tuple[str, str]:
    """(name, reason) of the best shipped profile of an accelerator, regardless of the precision."""
    level, name = best_profile(accelerator)
    rule = "measured goes before published, and published before datasheet peaks"
    return name, f"the best profile of {accelerator.name}, {level} in BF16 or FP8 ({rule})"


def _name(scenario: Planned, shape: ModelShape, machines: Sequence[Cluster]) -> Chosen:
    parts = "+".join(f"{m.n_gpus}x{m.accelerator.name.removesuffix('-sxm')}" for m in machines)
    return _chosen("name", f"{shape.name}-{parts}", "model, GPUs and accelerator", "derived", "the scenario")


def _profile(scenario: Planned, shape: ModelShape, machines: Sequence[Cluster]) -> Chosen:
    default = profile_default(machines[0], "profile")
    return Chosen(default.value, default)


def profile_default(machine: Cluster, key: str) -> Default:
    """Default of `key`, the best profile of a cluster's accelerator."""
    name, why = profile_of(machine.accelerator)
    return Default(key=key, value=name, why=why, kind="derived", source=load_profile(name).description)


def _precision(scenario: Planned, shape: ModelShape, machines: Sequence[Cluster]) -> Chosen:
    source = _data().precision.trained_in_fp8.get(shape.name)
    without = [m.accelerator.name for m in machines if "fp8" not in m.accelerator.peak]
    if source is None:
        why = "not known to have been trained in FP8"
        return _chosen("precision", "bf16", f"{shape.name} is {why}", "assumed", FILE)
    if without:
        why = f"{shape.name} was trained in FP8, which {without[0]} does not have"
        return _chosen("precision", "bf16", why, "derived", source)
    return _chosen("precision", "fp8", f"{shape.name} was trained in FP8", "published", source)


def sms_of(accelerator: Accelerator) -> tuple[int, str]:
    """(SMs, reason) of the communication kernels; 0 SMs where a dedicated engine moves collectives."""
    if accelerator.communication_engine is not None:
        return 0, f"collectives of {accelerator.name} are moved by {accelerator.communication_engine.name}"
    if accelerator.compute_units is None:
        return 0, f"nobody published how many {accelerator.unit_name}s {accelerator.name} has"
    return SMS, "as DeepSeek-V3 trained"


def kernels_of(machines: Sequence[Cluster], framework: str = NONE) -> tuple[str, str, str]:
    """(dispatcher, reason, source) of the clusters: the framework's own.

    Without a framework DeepEP, in larger NVLink domains Hybrid-EP, elsewhere NCCL, also over adapters that
    DeepEP as released does not run on, such as EFA.
    """
    own, here = release_of(framework).dispatcher, "simulator/dispatchers"
    if own is not None:
        return str(own.value), f"what {release_of(framework).title} exchanges rows with unasked", own.source
    for machine in machines:
        if dispatcher(KERNELS).refuses(machine.accelerator) is not None:
            return "nccl", f"DeepEP does not run on {machine.accelerator.name}", here
        if machine.nodes > 1 and (machine.node.adapter or "") not in dispatcher(KERNELS).adapters:
            return "nccl", f"DeepEP as released does not run over {machine.node.adapter}", here
    for machine in machines:
        if not dispatcher(KERNELS).serves(machine.node, machine.nodes):
            return "hybridep", f"DeepEP does not serve NVLink domains of {machine.node.n_gpus} GPUs", here
    return KERNELS, "as DeepSeek-V3 trained", here


def _framework(scenario: Planned, shape: ModelShape, machines: Sequence[Cluster]) -> Chosen:
    name, why, source = usual_framework(_data().frameworks, scenario, machines)
    return _chosen(FRAMEWORK, name, why, "assumed", source)


def _host(scenario: Planned, shape: ModelShape, machines: Sequence[Cluster]) -> Chosen:
    node = machines[0].node
    chip = node.accelerator.name
    name, why, kind, source = usual_host(node, lambda: load_node(node_of(chip)) if has_node(chip) else None)
    return Chosen(name, _chosen(HOST, name or NONE, why, kind, source).default)


def check_vendor(framework: str, cluster: Cluster) -> None:
    """Raise InputError for a release on an accelerator whose vendor has no line in the table."""
    vendor = cluster.accelerator.vendor
    if framework != NONE and all(line.vendor != vendor for line in _data().frameworks):
        text = f"{FRAMEWORK}={framework} was not read for {cluster.accelerator.name}; use {FRAMEWORK}={NONE}"
        raise InputError(text, key=FRAMEWORK)


def _kernels(scenario: Planned, shape: ModelShape, machines: Sequence[Cluster]) -> Chosen:
    name, why, source = kernels_of(machines, scenario.software.framework)
    return _chosen("communication.kernels", name, why, "derived", source)


def spread(key: str, architecture: str | None = None) -> tuple[SourcedFraction, bool]:
    """Return the spread of a key, and whether it was measured on this architecture.

    Without a measurement on this architecture the general spread is returned.
    """
    entries = _data().spreads[key]
    entry = next(e for e in entries if e.architecture in (None, architecture))
    number = SourcedFraction(**{name: getattr(entry, name) for name in SourcedFraction.model_fields})
    return number, entry.architecture is not None


def default_spread(key: str) -> Callable[[], SourcedFraction]:
    """Return a factory for the default of a key in a section that is built without a scenario."""
    return lambda: spread(key)[0]


def _load(scenario: Planned, shape: ModelShape, machines: Sequence[Cluster]) -> Chosen:
    if shape.moe is None:
        why = "the model has no routed experts"
        even = SourcedFraction(value=0.0, kind="derived", source=why, date="2026-11-22")
        return _number("routing.expert_load_cv", even, f"{shape.name} has no routed experts")
    why = "the one published measurement of it, carried over"
    return _number("routing.expert_load_cv", spread("routing.expert_load_cv")[0], why)


def _varied(key: str) -> Rule:
    def choose(scenario: Planned, shape: ModelShape, machines: Sequence[Cluster]) -> Chosen:
        kinds = {machine.accelerator.architecture for machine in machines}
        number, here = spread(key, kinds.pop() if len(kinds) == 1 else None)
        why = "taken on this architecture" if here else "carried over to hardware that it was not taken on"
        return _number(key, number, why)

    return choose


def tokens_of(model: str) -> tuple[float, str, Kind, str]:
    """(tokens, reason, kind, source) of a run of a model; pass "" where the model is unknown."""
    known = _data().tokens.models.get(model)
    entry = known or _data().tokens.others
    why = f"what {model} was trained on" if known else "no published number of tokens is known for the model"
    return entry.value, why, entry.kind, entry.source


def _chosen(key: str, value: str | float, why: str, kind: Kind, source: str) -> Chosen:
    return Chosen(value, Default(key=key, value=value, why=why, kind=kind, source=source))


def _number(key: str, number: SourcedFraction, why: str) -> Chosen:
    kind, source, of = number.kind, number.source, number.range
    return Chosen(number, Default(key=key, value=number.value, why=why, kind=kind, source=source, range=of))


def _of_plan(key: str, rule: Callable[[ParallelPlan, int | None], PlanDefault]) -> Rule:
    def choose(scenario: Planned, shape: ModelShape, machines: Sequence[Cluster]) -> Chosen:
        value, why, source = rule(scenario.parallel, shape.moe.expert_ffn if shape.moe else None)
        shown = str(value).lower() if isinstance(value, bool) else value
        return Chosen(value, _chosen(key, shown, why, "published", source).default)

    return choose


RULES: Mapping[str, Rule] = {
    "profile": _profile,
    "precision": _precision,
    "parallel.sequence_parallel": _of_plan("parallel.sequence_parallel", sequence_parallel_of),
    "parallel.expert_tp": _of_plan("parallel.expert_tp", expert_tp_of),
    FRAMEWORK: _framework,
    HOST: _host,
    "communication.sms": lambda scenario, shape, machines: _chosen(
        "communication.sms", *sms_of(machines[0].accelerator), "derived", "hwmodels/data/accelerators"
    ),
    "communication.kernels": _kernels,
    "routing.expert_load_cv": _load,
    "variation.clock_cv": _varied("variation.clock_cv"),
    "variation.jitter_cv": _varied("variation.jitter_cv"),
    "run.tokens": lambda scenario, shape, machines: _chosen("run.tokens", *tokens_of(shape.name)),
    "name": _name,
}
"""Keys that may be left out, each with the function that chooses it, in the order of their choice."""
