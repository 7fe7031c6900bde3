"""Reads every YAML and JSON file safely, as plain data of a bounded size.

Characters, values, keys, nesting and the digits of a number are limited, so that any hostile text is refused
within a second. Aliases, tags and duplicate keys are refused; a date is read as text.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.file_limits import MAX_DEPTH, check, check_text, cut
from moesim.hwmodels.files import read_text
from moesim.hwmodels.plain_yaml import read_plain_yaml
from moesim.hwmodels.validation import validate_model

__all__ = [
    "EXTENSIONS",
    "MAX_JSON_BYTES",
    "MAX_YAML_BYTES",
    "dump_mapping",
    "load_mapping",
    "parse_mapping",
    "validate_model",
]

MAX_JSON_BYTES = 4_000_000
MAX_YAML_BYTES = 500_000
"""Far above any real scenario or calibration profile. YAML is read at 50 to 400 kB/s, so larger data belongs
in a JSON file."""
MAX_VALUES = 100_000
"""Most keys, texts, numbers, lists and mappings of one JSON file."""
MAX_KEYS = 20_000
MAX_CONFIGURATION_KEYS = 100_000
"""Most keys of a model's configuration, which may name the quantisation of every matrix."""

EXTENSIONS = (".yaml", ".yml", ".json")


def load_mapping(
    path: str | Path, most_values: int = MAX_VALUES, configuration: bool = False
) -> dict[str, Any]:
    """The top-level mapping of a YAML 1.2 or JSON file (by its extension), as plain dicts and lists.

    `most_values` limits the keys, texts, numbers, lists and mappings of a JSON file. With `configuration` a
    JSON file may be one that Python wrote for a model: Infinity and NaN are read as texts, and more keys are
    legal. Raises InputError, with
    the file and where possible the line, for a file that is missing, too large, empty, binary or
    malformed, that uses aliases or duplicate keys, or whose top level is not a mapping.
    """
    path = Path(path)
    name = str(path)
    if path.suffix.lower() not in EXTENSIONS:
        raise InputError(f"{name}: unknown file type {path.suffix!r}; use {', '.join(EXTENSIONS)}")
    text = read_text(path, _limit(name), f"{_kind_of(name)} file")
    return parse_mapping(text, name, most_values, configuration)


def parse_mapping(
    text: str, name: str, most_values: int = MAX_VALUES, configuration: bool = False
) -> dict[str, Any]:
    """The top-level mapping of YAML (or, when `name` ends in .json, JSON) text; errors mention `name`.

    Raises InputError as `load_mapping` does.
    """
    if len(text) > _limit(name):
        size = f"{_limit(name) / 10**6:g} MB"
        raise InputError(f"{name}: larger than the limit of {size} for a {_kind_of(name)} file")
    if not text.strip():
        raise InputError(f"{name}: the file is empty; a mapping of keys to values is expected")
    if "\0" in text:
        raise InputError(f"{name}: not a text file (it contains a zero byte)")
    try:
        most_keys = MAX_CONFIGURATION_KEYS if configuration else MAX_KEYS
        data = _parse_json(text, most_keys, configuration) if _is_json(name) else _parse_yaml(text)
        check(data, most_values, most_keys)
    except InputError as error:
        raise InputError(f"{name}: {error}") from None
    except RecursionError:
        raise InputError(f"{name}: nested too deeply, more than {MAX_DEPTH} levels") from None
    if data is None:
        raise InputError(f"{name}: the file holds no data; a mapping of keys to values is expected")
    if not isinstance(data, dict):
        raise InputError(
            f"{name}: the top level is {_kind(data)}, but a mapping of keys to values is expected"
        )
    return data


def _limit(name: str) -> int:
    return MAX_JSON_BYTES if _is_json(name) else MAX_YAML_BYTES


def _kind_of(name: str) -> str:
    return "JSON" if _is_json(name) else "YAML"


def _is_json(name: str) -> bool:
    return name.lower().endswith(".json")


def dump_mapping(data: dict[str, Any], width: int = 100) -> str:
    """YAML text of plain data in its given key order; `parse_mapping` reads it back.

    Lines break at words after about `width` characters.
    """
    from moesim.hwmodels.full_yaml import write_yaml

    return write_yaml(data, width)


def _parse_yaml(text: str) -> Any:
    check_text(text)
    plain = read_plain_yaml(text)
    if plain is not None:
        return plain
    from moesim.hwmodels.full_yaml import read_full_yaml

    return read_full_yaml(text)


def _parse_json(text: str, most_keys: int, constants: bool) -> Any:
    keys = 0

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal keys
        keys += len(pairs)
        if keys > most_keys:
            raise InputError(f"more than {most_keys:,} keys, the limit of one file")
        mapping: dict[str, Any] = {}
        for key, value in pairs:
            if key in mapping:
                raise InputError(f"the key {cut(repr(key))} appears twice in one object")
            mapping[key] = value
        return mapping

    def constant_of(name: str) -> str:
        if constants:
            return name
        raise InputError(f"{name} is not a JSON number")

    try:
        return json.loads(text, object_pairs_hook=unique, parse_constant=constant_of)
    except json.JSONDecodeError as error:
        raise InputError(f"line {error.lineno}: not valid JSON: {error.msg}") from None
    except ValueError as error:  # an integer beyond Python's limit of digits
        raise InputError(f"not valid JSON: {error}") from None


def _kind(data: object) -> str:
    return {"list": "a list", "str": "a text", "int": "a number", "float": "a number"}.get(
        type(data).__name__, f"a {type(data).__name__}"
    )
