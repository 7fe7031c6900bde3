"""Builds registries, which map the name of each extension to its spec."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeVar

SpecT = TypeVar("SpecT")


def registry(*specs: SpecT, key: str = "name") -> Mapping[str, SpecT]:
    """Specs by the attribute `key`, in their order; raises ValueError for two with one name."""
    by_key: dict[str, SpecT] = {}
    for spec in specs:
        name = getattr(spec, key)
        if name in by_key:
            raise ValueError(f"{name!r} is registered twice: by {by_key[name]} and {spec}")
        by_key[name] = spec
    return MappingProxyType(by_key)
