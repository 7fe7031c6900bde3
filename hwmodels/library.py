"""Finds and reads shipped data files and files of the user, in the same way for every kind."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ValidationInfo

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.files import is_there
from moesim.hwmodels.validation import nearest
from moesim.hwmodels.yaml_io import EXTENSIONS, load_mapping, parse_mapping, validate_model

ModelT = TypeVar("ModelT", bound=BaseModel)


@lru_cache(maxsize=64)
def shipped_names(folder: str) -> tuple[str, ...]:
    """Names of the shipped files of one kind (`folder` below hwmodels/data), sorted."""
    entries = files("moesim.hwmodels").joinpath("data", *folder.split("/")).iterdir()
    return tuple(sorted(entry.name[:-5] for entry in entries if entry.name.endswith(".yaml")))


def load_described(cls: type[ModelT], folder: str, name: str, what: str, base: Path | None = None) -> ModelT:
    """The description called `name`: a shipped name, or the path of a YAML or JSON file.

    `what` names the kind in messages. A relative path is looked up beside `base` (the file that names
    it) and then in the working directory. Raises InputError for an unknown name, with the valid ones
    and the nearest, and for a file that is missing or malformed.
    """
    if name in shipped_names(folder):
        described: ModelT = _shipped(cls, folder, name)
        return described
    if name.lower().endswith(EXTENSIONS):
        path = Path(name)
        if base is not None and not path.is_absolute() and is_there(base.parent / path):
            path = base.parent / path
        return validate_model(cls, load_mapping(path), str(path))
    valid = list(shipped_names(folder))
    raise InputError(
        f"unknown {what} {name!r}{nearest(name, valid)}; the known ones are {', '.join(valid)}, "
        f"or give the path of a file that ends in {', '.join(EXTENSIONS)}"
    )


@lru_cache(maxsize=256)
def _shipped(cls: type[ModelT], folder: str, name: str) -> ModelT:
    """Reads a shipped file once per process; descriptions are frozen, so one copy can be shared."""
    place = f"moesim/hwmodels/data/{folder}/{name}.yaml"
    text = files("moesim.hwmodels").joinpath("data", *folder.split("/"), f"{name}.yaml").read_text("utf-8")
    return validate_model(cls, parse_mapping(text, place), place)


def by_name(cls: type[BaseModel], loader: Callable[[str, Path | None], Any]) -> BeforeValidator:
    """Validator of a field that holds a `cls` and may be written as a name or path."""

    def resolve(value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, str):
            return value
        place = (info.context or {}).get("place")
        try:
            return loader(value, Path(place) if place else None)
        except InputError as error:
            prefix = f"{place}: " if place else ""
            raise InputError(f"{prefix}{info.field_name}: {error}") from None

    return BeforeValidator(resolve, json_schema_input_type=str | cls)
