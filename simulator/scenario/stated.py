"""Tells the stated keys of a scenario from those that a rule chose (decision 0033).

It fills in the defaults, lists them, and leaves them out of dumps. A key counts as stated if its field was
set when the scenario was built (pydantic's `model_fields_set`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from pydantic import BaseModel

from moesim.hwmodels.cluster import Cluster
from moesim.hwmodels.errors import InputError
from moesim.simulator.frameworks.registry import NONE
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.scenario import defaults as rules
from moesim.simulator.scenario.defaults import Default
from moesim.simulator.scenario.framework import FRAMEWORK, HOST, Planned, with_framework
from moesim.simulator.scenario.outline import AnyCluster, ClusterOutline
from moesim.simulator.scenario.sections import Fleet


class Stated(Protocol):
    """An object that knows which of its keys were stated when it was built."""

    @property
    def model_fields_set(self) -> set[str]:
        """Names of the stated fields."""


class Fillable(Stated, Planned, Protocol):
    """The parts of a scenario that the rules read."""

    @property
    def fleet(self) -> Fleet | None:
        """Several clusters, or None."""

    @property
    def cluster(self) -> AnyCluster | None:
        """One cluster, or None."""

    @property
    def shape(self) -> ModelShape:
        """The model."""

    @property
    def machines(self) -> tuple[Cluster, ...]:
        """The cluster, or those of the fleet's pools."""


def fill_defaults(scenario: Fillable, place: str | None) -> tuple[Default, ...]:
    """Set the keys that a scenario under construction leaves out; return those worth reporting.

    Raises InputError, with the `place` that the scenario was read from, where its model or cluster cannot be
    found.
    """
    missing = [key for key in rules.RULES if not is_stated(scenario, key)]
    if scenario.fleet is not None and "profile" in missing:
        missing.remove("profile")  # every pool has its own
    if missing in ([], [HOST]) and scenario.software.framework == NONE:
        return ()
    chosen = []
    try:
        shape, machines = scenario.shape, scenario.machines
        for key in missing:
            if key != HOST or scenario.software.framework != NONE:
                one = rules.RULES[key](scenario, shape, machines)
                _set(scenario, key, one.value)
                chosen.append((key, one))
        for one in rules.recipe_choices(scenario, machines) if shape.moe else ():
            _set(scenario, one.default.key, one.value)
            chosen.append((one.default.key, one))
    except InputError as error:
        raise InputError(f"{place}: {error}" if place else str(error), key=error.key) from None
    # The usual kernel and number of SMs go without saying, and so do options of a plan that splits nothing.
    usual = (("communication.sms", rules.SMS), ("communication.kernels", rules.KERNELS))
    splits_nothing = scenario.parallel.tp == 1 or shape.moe is None
    return tuple(
        one.default
        for key, one in chosen
        if (key, one.value) not in usual and not (splits_nothing and key.startswith("parallel."))
    )


def _set(scenario: Fillable, key: str, value: object) -> None:
    """Give a key of a scenario under construction a value that still counts as left out."""
    section, _, name = key.rpartition(".")
    if key == FRAMEWORK:
        value = with_framework(scenario.software, str(value))
    elif section:
        value = rules.without_mark(getattr(scenario, section), name, value)
    scenario.__dict__[section or name] = value  # not by assignment: that would mark it as stated


def list_defaults(
    scenario: Fillable, chosen: tuple[Default, ...], machines: Sequence[Cluster]
) -> tuple[Default, ...]:
    """List the defaults of a scenario: those `chosen` when it was built, of its clusters and its framework.

    `machines` is its cluster, or those of its fleet's pools.
    """
    defaults = [item for item in chosen if not is_stated(scenario, item.key)]
    pools = () if scenario.fleet is None else scenario.fleet.pools
    clusters: list[tuple[str, object]] = [
        (f"fleet.pools.{number}.cluster", pool.cluster) for number, pool in enumerate(pools)
    ]
    for (place, cluster), machine in zip(clusters or [("cluster", scenario.cluster)], machines, strict=True):
        left_out = cluster.left_out if isinstance(cluster, ClusterOutline) else ()
        defaults += rules.cluster_defaults(place, machine, left_out)
    for number, pool in enumerate(pools):
        if pool.profile is None and not is_stated(scenario, "profile"):
            defaults.append(rules.profile_default(machines[number], f"fleet.pools.{number}.profile"))
    return (*defaults, *rules.framework_defaults(scenario.software, {item.key for item in defaults}))


def as_stated(scenario: Fillable, data: dict[str, Any], *, resolved: bool) -> dict[str, Any]:
    """Remove the values that rules chose from `data`, a dump of a scenario, unless `resolved`."""
    pools = () if scenario.fleet is None else zip(scenario.fleet.pools, data["fleet"]["pools"], strict=True)
    price = "price_per_gpu_hour"
    for part, dumped in ((scenario, data), *pools):
        cluster = part.cluster
        has_price = not isinstance(cluster, BaseModel) or getattr(cluster, price, None) is not None
        if not has_price and price in cluster.model_fields_set:
            dumped["cluster"][price] = None  # stated, so that no offer is taken
    for key in () if resolved else rules.RULES:
        section, _, name = key.rpartition(".")
        place = data.get(section) if section else data
        if isinstance(place, dict) and not is_stated(scenario, key):
            place.pop(name, None)
    if not resolved:
        for section in {key.rpartition(".")[0] for key in rules.RULES} - {""}:
            if data.get(section) == {}:
                data.pop(section)
    return data


def is_stated(model: Stated, key: str) -> bool:
    """Whether a dotted key was stated when `model` was built, and not chosen by a rule."""
    for part in key.split("."):
        if part not in model.model_fields_set:
            return False
        model = getattr(model, part)
    return True


def without_nulls(data: Mapping[str, Any]) -> dict[str, Any]:
    """Drop the keys of a scenario's data that are null and that a rule chooses, as null means left out."""
    result = dict(data)
    for key in rules.RULES:
        section, _, name = key.rpartition(".")
        place = result.get(section) if section else result
        if section and section in result and place is None:
            del result[section]
        elif isinstance(place, Mapping) and name in place and place[name] is None:
            rest = {k: v for k, v in place.items() if k != name}
            result = {**result, section: rest} if section else rest
    return result
