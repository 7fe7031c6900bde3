"""Credits numbers that an override sets to the user, instead of to the scenario file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar, cast

from pydantic import BaseModel

from moesim.hwmodels.provenance import OWN, STATED_IN, Sourced

ModelT = TypeVar("ModelT", bound=BaseModel)


def credited_to_user(model: ModelT, keys: Iterable[str], place: str) -> ModelT:
    """Return `model` with the figures at and below the dotted `keys` credited to the user instead of `place`.

    Figures that name a source of their own keep it.
    """
    for key in keys:
        model = _below(model, key.split("."), f"{STATED_IN}{place}")
    return model


def _below(value: ModelT, parts: list[str], source: str) -> ModelT:
    """Credit the figures at and below a dotted path of `value`; an unknown path changes nothing."""
    if not parts:
        return cast(ModelT, _own(value, source))
    child = getattr(value, parts[0], None)
    if isinstance(child, BaseModel):
        changed: object = _below(child, parts[1:], source)
    elif isinstance(child, tuple | Mapping):
        changed = _own(child, source)
    else:
        return value
    # An unchanged value is not set again, because a key that a rule chose would then count as stated.
    return value if changed == child else value.model_copy(update={parts[0]: changed})


def _own(value: object, source: str) -> object:
    if isinstance(value, Sourced):
        return value.model_copy(update={"source": OWN}) if value.source == source else value
    if isinstance(value, BaseModel):
        inner = {name: getattr(value, name) for name in type(value).model_fields}
        changed = {name: _own(item, source) for name, item in inner.items()}
        return value.model_copy(update={n: item for n, item in changed.items() if item != inner[n]})
    if isinstance(value, tuple):
        return tuple(_own(item, source) for item in value)
    if isinstance(value, Mapping):
        return {key: _own(item, source) for key, item in value.items()}
    return value
