"""Placements of experts that a search tries: their names, the defaults, what depends on them."""

from __future__ import annotations

import re
from typing import TypeAlias

from moesim.simulator.model.shape import ModelShape
from moesim.simulator.scenario import Scenario
from moesim.simulator.scenario.routing import Eplb, UniformLoad

Placement: TypeAlias = Eplb | None
"""None: experts in order, one replica each."""

IN_ORDER = "in order"
_NAME = re.compile(r"(hierarchical|global)(?:\+(\d{1,6}))?")


def placement_name(placement: Placement) -> str:
    """How a placement is written in a space: `in order`, `hierarchical`, `global+64`."""
    if placement is None:
        return IN_ORDER
    groups = "" if placement.groups is None else f" in {placement.groups} groups"
    more = f"+{placement.redundant_experts}" if placement.redundant_experts else ""
    return placement.policy + more + groups


def parse_placement(value: str | Eplb) -> Placement:
    """The placement of a name; raises ValueError, with what is known, for any other."""
    if isinstance(value, Eplb):
        return value
    if value == IN_ORDER:
        return None
    match = _NAME.fullmatch(value)
    if match is None:
        raise ValueError(
            f"placement {value!r} is not known; write {IN_ORDER}, hierarchical, global, or one of the two "
            "with its redundant experts, such as global+64"
        )
    return Eplb(policy=match[1], redundant_experts=int(match[2] or 0))


def default_placements(scenario: Scenario, shape: ModelShape) -> tuple[Placement, ...]:
    """The scenario's own; for unequally popular experts both policies, with up to half as many replicas.

    Equally popular experts gain nothing from being placed, so there the scenario's own is all.
    """
    own, load, moe = scenario.routing.eplb, scenario.routing.load, shape.moe
    if moe is None or load is None or isinstance(load, UniformLoad):
        return (own,)
    replicas = sorted({0, moe.experts // 8, moe.experts // 4, moe.experts // 2})
    both = [Eplb(redundant_experts=n, policy=p) for p in ("hierarchical", "global") for n in replicas]
    return tuple(dict.fromkeys([None, *both, own]))


def with_placement(scenario: Scenario, placement: Placement) -> Scenario:
    """The scenario with another placement of its experts."""
    if placement == scenario.routing.eplb:
        return scenario
    routing = scenario.routing.model_copy(update={"eplb": placement})
    return scenario.model_copy(update={"routing": routing})


def price_key(placement: Placement) -> tuple[int, bool]:
    """What of a placement prices depend on: replicas, and whether groups of experts leave their node."""
    return (0, False) if placement is None else (placement.redundant_experts, placement.policy == "global")
