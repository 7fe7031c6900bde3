"""Registries, and the validation of mappings as descriptions, with errors in one readable paragraph."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from moesim.hwmodels.errors import InputError, LegalValuesError, UnknownKeyError

# -- validation ------------------------------------------------------------------------------------

ModelT = TypeVar("ModelT", bound=BaseModel)

_SHOWN_PROBLEMS = 4
_READ_PROBLEMS = 100
"""Most problems of one file that are examined."""
_MOST_LETTERS = 100
"""Longest word that is compared with the legal names."""


def validate_model(cls: type[ModelT], data: Mapping[str, Any], place: str, base: str | None = None) -> ModelT:
    """An instance of `cls` from data that was read from `place` (a file name or the like).

    `base` is the folder that relative paths in the data start from, where known. Validation has `place` as
    its context, so it refuses a bare number in a field with a dimension, although Python code may construct
    the same model with plain SI floats. Raises InputError, one paragraph with the place and, for every
    problem, its key path, value, reason and nearest legal value; UnknownKeyError where a key is none.
    """
    try:
        return cls.model_validate(dict(data), context={"place": place, "base": base})
    except ValidationError as error:
        items = error.errors(include_url=False)
    read = [item for item in items[:_READ_PROBLEMS] if not _is_other_branch(item, items[:_READ_PROBLEMS])]
    # Unknown keys come first, since they explain missing keys, which come last.
    others = sorted((item for item in read if item["type"] != "missing"), key=_is_known)
    problems = [_describe(cls, _path(item["loc"], data), item) for item in others]
    if missing := [_path(item["loc"], data) for item in read if item["type"] == "missing"]:
        noun, verb = ("the key", "is") if len(missing) == 1 else ("the keys", "are")
        problems.append(f"{noun} {', '.join(missing)} {verb} missing")
    shown = "; ".join(
        problem if len(problem) <= 400 else f"{problem[:397]}..." for problem in problems[:_SHOWN_PROBLEMS]
    )
    left = len(problems) - _SHOWN_PROBLEMS + max(0, len(items) - _READ_PROBLEMS)
    unknown = any(not _is_known(item) for item in items[:_READ_PROBLEMS])
    text = f"{place}: {shown}{f'; and {left} more' if left > 0 else ''}"
    cause = read[0].get("ctx", {}).get("error") if len(read) == 1 else None
    key: str | None = None
    legal: tuple[object, ...] = ()
    if isinstance(cause, LegalValuesError):  # the only problem is one with known legal values
        key, legal = _path((*read[0]["loc"], cause.key), data), cause.nearest
    raise (UnknownKeyError if unknown else InputError)(text, key=key, nearest=legal)


def nearest(word: str, allowed: list[str]) -> str:
    """A hint " (nearest: 'x')", or empty where no allowed word is close; case is ignored."""
    if len(word) > _MOST_LETTERS:
        return ""
    folded = {candidate.lower(): candidate for candidate in allowed}
    close = difflib.get_close_matches(word.lower(), list(folded), n=1, cutoff=0.5)
    return f" (nearest: {folded[close[0]]!r})" if close else ""


def _is_other_branch(item: Any, items: Sequence[Any]) -> bool:
    """Whether a problem says only that a mapping is no string, while others lie inside the mapping."""
    place = tuple(item["loc"])[:-1]
    return (
        item["type"] == "string_type"
        and isinstance(item["input"], Mapping)
        and any(other is not item and tuple(other["loc"])[: len(place)] == place for other in items)
    )


def _is_known(item: Any) -> bool:
    return bool(item["type"] != "extra_forbidden")


def _path(location: tuple[Any, ...], data: Any) -> str:
    """The key path as in the file, without pydantic's names of union members and validators."""
    parts: list[str] = []
    for index, part in enumerate(location):
        if str(part).startswith("function-"):  # the name of a validator, not a key of the file
            continue
        listed = isinstance(data, list | tuple) and isinstance(part, int)
        if listed:
            data = data[part] if part < len(data) else None  # None where the list is too short
        elif isinstance(data, Mapping) and part in data:
            data = data[part]
        elif index < len(location) - 1 or not isinstance(data, Mapping) or part == "[key]":
            continue
        parts.append(str(part))
    return ".".join(parts)


def _describe(cls: type[BaseModel], path: str, item: Any) -> str:
    """One problem as its path, the reason and the legal values."""
    location = tuple(item["loc"])
    kind, value = item["type"], item["input"]
    if kind == "extra_forbidden":
        allowed = sorted(_keys_at(cls, location[:-1]))
        hint = nearest(str(location[-1]), allowed)
        return f"{path}: unknown key{hint}; the keys here are {', '.join(allowed)}"
    if kind == "literal_error":
        words = item["ctx"]["expected"].replace(" or ", ", ").split(", ")  # "'a', 'b' or 'c'"
        allowed = [word.strip().strip("'") for word in words]
        return f"{path}={_short(value)} is not one of {', '.join(allowed)}{nearest(str(value), allowed)}"
    if kind in ("value_error", "assertion_error"):
        reason = item["msg"].split(", ", 1)[-1]
        return f"{path}: {reason}" if path else reason
    reason = item["msg"].replace("Input should be", "should be")
    return f"{path}={_short(value)}: {reason}" if path else reason


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _keys_at(cls: type[BaseModel], location: tuple[Any, ...]) -> set[str]:
    """Names of the fields that a mapping at this location may have (over all members of a union)."""
    models: list[Any] = [cls]
    for part in location:
        # A union tag, such as a kind, selects the one model that has it.
        tagged = [
            m for m in models if any(get_args(f.annotation) == (part,) for f in m.model_fields.values())
        ]
        models = (tagged if isinstance(part, str) else []) or models
        step: list[Any] = []
        for model in models:
            by_alias = {field.alias: field for field in model.model_fields.values()}
            field = model.model_fields.get(part) or by_alias.get(part)
            annotation = field.annotation if field is not None else None
            # A part that is no field is a list index, a mapping key or the tag, and the models stay the same.
            step.extend(_models_in(annotation) if annotation is not None else [model])
        models = step or models
    return {field.alias or name for model in models for name, field in model.model_fields.items()}


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Every model named inside an annotation such as `dict[str, Model] | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)


# -- registries ------------------------------------------------------------------------------------

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
