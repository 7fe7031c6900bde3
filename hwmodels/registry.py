"""Registries: what can be extended, by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeVar

SpecT = TypeVar("SpecT")


def registry(*specs: SpecT, key: str = "name") -> Mapping[str, SpecT]:
    """Specs by the attribute that names them, in their order; raises ValueError for two of one name."""
    found: dict[str, SpecT] = {}
    for spec in specs:
        name = getattr(spec, key)
        if name in found:
            raise ValueError(f"{name!r} is registered twice: by {found[name]} and {spec}")
        found[name] = spec
    return MappingProxyType(found)
