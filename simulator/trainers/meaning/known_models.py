"""Recognises models by their sizes: the base's and the shipped ones."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from moesim.simulator.model.library import load_model, shipped_models
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.scenario import Scenario

_UNCOMPARED = ("name", "source", "not_modelled", "numerics")
"""Keys of a model file that change neither sizes nor prices."""


def as_data(shape: ModelShape) -> dict[str, Any]:
    """A shape as the keys of a model file."""
    data: dict[str, Any] = shape.model_dump(mode="json", exclude_none=True)
    return data


def known_model(shape: ModelShape, base: Scenario) -> Any:
    """The base's model or the name of a shipped one, if it has the same sizes; else None."""
    if same_sizes(shape, base.shape):
        return base.to_dict()["model"]
    return next((name for name in shipped_models() if same_sizes(shape, load_model(name))), None)


def same_sizes(one: ModelShape, other: ModelShape, but: Collection[str] = ()) -> bool:
    """Whether two shapes are the same model, whatever their names, sources and keys in `but`."""
    return _sizes(one, but) == _sizes(other, but)


def _sizes(shape: ModelShape, but: Collection[str]) -> dict[str, Any]:
    left_out = (*_UNCOMPARED, *but)
    return {key: value for key, value in as_data(shape).items() if key not in left_out}
