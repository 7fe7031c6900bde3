"""Placements of experts in a plan search: their names, the default placements and their cost keys."""

from __future__ import annotations

import re
from typing import TypeAlias

from moesim.simulator.model.shape import ModelShape
from moesim.simulator.scenario import Scenario
from moesim.simulator.scenario.sections import Eplb, UniformLoad

Placement: TypeAlias = Eplb | None
"""A placement of the experts; None places them in order, one replica each."""

IN_ORDER = "in order"
_NAME = re.compile(r"(hierarchical|global)(?:\+(\d{1,6}))?")


def placement_name(placement: Placement) -> str:
    """Name of a placement in a space, such as `in order`, `hierarchical` or `global+64`."""
    if placement is None:
        return IN_ORDER
    groups = "" if placement.groups is None else f" in {placement.groups} groups"
    more = f"+{placement.redundant_experts}" if placement.redundant_experts else ""
    return placement.policy + more + groups


def parse_placement(value: str | Eplb) -> Placement:
    """The placement of a name. Raises ValueError, listing the known names, for any other."""
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
    """Placements that a search tries by default.

    For unequally popular experts these are the scenario's own, experts in order, and both policies with
    redundant experts up to half the number of experts. Equally popular experts gain nothing from a
    placement, so only the scenario's own is tried.
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


def cost_key(placement: Placement) -> tuple[int, bool]:
    """The part of a placement that costs depend on.

    It is the number of redundant experts, and whether groups of experts may leave their node.
    """
    return (0, False) if placement is None else (placement.redundant_experts, placement.policy == "global")
