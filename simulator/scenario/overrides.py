"""Replaces values in a scenario's data, by `key=value` texts or by dotted paths (pure)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import reduce
from operator import getitem
from typing import Any

from pydantic import BaseModel

from moesim.hwmodels.accelerator import load_accelerator
from moesim.hwmodels.cluster import load_cluster
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.network import load_network
from moesim.hwmodels.node import load_node
from moesim.hwmodels.price import load_energy_site, load_purchase
from moesim.simulator.model.precision import PRECISIONS
from moesim.simulator.scenario import defaults as rules
from moesim.simulator.scenario.outline import data_for_other_accelerator, outline_naming
from moesim.simulator.scenario.run_plan import load_run_plan


def _dumped(load: Callable[[str], BaseModel]) -> Callable[[str], dict[str, Any]]:
    return lambda name: load(name).model_dump(mode="json", exclude_none=True)


def _recipe(name: str) -> BaseModel:
    if name not in PRECISIONS:
        raise InputError(f"precision={name!r} is not known; known: {', '.join(PRECISIONS)}")
    return PRECISIONS[name]


_DESCRIPTIONS: dict[str, Callable[[str], dict[str, Any]]] = {
    "cluster": _dumped(load_cluster),
    "node": _dumped(load_node),
    "network": _dumped(load_network),
    "energy": _dumped(load_energy_site),
    "buy": _dumped(load_purchase),
    "accelerator": _dumped(load_accelerator),
    "precision": _dumped(_recipe),
    "run": _dumped(load_run_plan),
}
"""Keys whose value may be a name, each with the function that loads the description of a name."""

Known = Callable[[], Mapping[str, Any]]
"""Returns a scenario's data with the values that rules chose; called only if they are needed."""

MOST_PARTS = 20
"""Most parts of a dotted path."""

REPLACES = {"cluster": "fleet", "fleet": "cluster", "fleet.pools": "cluster"}
"""Keys that remove another key when they are set as a whole, because the two exclude each other."""


def plain(value: Any) -> Any:
    """Convert a Python value to file data: descriptions lose their None values, tuples become lists."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_none=True)
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return value


def without_key(data: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return `data` without a dotted key, and without the sections that become empty by that."""
    name, _, below = key.partition(".")
    result = dict(data)
    rest = without_key(result[name], below) if below and isinstance(result.get(name), Mapping) else {}
    if rest:
        result[name] = rest
    else:
        result.pop(name, None)
    return result


def put(data: Mapping[str, Any], key: str, value: Any, place: str, known: Known) -> dict[str, Any]:
    """Return `data` with another value for one dotted key.

    Missing sections are created, so that the validator reports misspelt keys. `known` returns the data with
    the values that rules chose; it is called for a key below one of those.
    """
    if key.startswith("cluster.accelerator."):
        key = key.replace("cluster.", "cluster.node.", 1)
    result: dict[str, Any] = json.loads(json.dumps(data, default=str)) if data else {}
    if key in REPLACES and value is not None:
        result.pop(REPLACES[key], None)
    if key == "cluster.accelerator" and value is not None:
        result["cluster"] = data_for_other_accelerator(result.get("cluster"))
    section: Any = result
    parts = key.split(".")
    if len(parts) > MOST_PARTS or not all(parts):
        raise InputError(f"{place}: {key[:80]!r} is no key; write its path, for example parallel.ep=32")
    for number, part in enumerate(parts[:-1]):
        if parts[:number] == ["cluster"]:
            section = result["cluster"] = outline_naming(section, part)
        below = section.get(part)
        if below is None:
            path = parts[: number + 1]
            by_rule = ".".join(path) in rules.RULES
            below = section[part] = reduce(getitem, path, known()) if by_rule else {}
        if isinstance(below, str) and part in _DESCRIPTIONS:
            # Replace a name by its description, so that one figure in the description can change.
            below = section[part] = _DESCRIPTIONS[part](below)
        if not isinstance(below, dict):
            raise InputError(
                f"{place}: {part!r} is {repr(below)[:60]}, which has no keys below it; replace it as a whole"
            )
        section = below
    section[parts[-1]] = value
    return result
