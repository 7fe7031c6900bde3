"""The one safe reader of every YAML and JSON file: bounded size, no aliases, no duplicate keys."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any, NoReturn

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.composer import Composer
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import AliasEvent

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.files import read_text
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
MAX_YAML_BYTES = 1_000_000
"""Far above any real scenario or calibration profile. YAML is read at 50 to 400 kB/s: data that
does not fit belongs in a JSON file."""

EXTENSIONS = (".yaml", ".yml", ".json")


class _NoAliasComposer(Composer):
    """Refuses `*alias`: ten lines of nested aliases expand to gigabytes, and no file of ours needs one."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.parser.check_event(AliasEvent):
            event = self.parser.peek_event()
            line = event.start_mark.line + 1
            raise InputError(f"line {line}: the YAML alias *{event.anchor} is refused; write the value out")
        return super().compose_node(parent, index)


def load_mapping(path: str | Path) -> dict[str, Any]:
    """The top-level mapping of a YAML 1.2 or JSON file (by its extension), as plain dicts and lists.

    Raises InputError, naming the file and where possible the line, for a file that is missing, too
    large, empty, binary or malformed, that uses aliases or duplicate keys, or whose top level is
    not a mapping.
    """
    path = Path(path)
    name = str(path)
    if path.suffix.lower() not in EXTENSIONS:
        raise InputError(f"{name}: unknown file type {path.suffix!r}; use {', '.join(EXTENSIONS)}")
    return parse_mapping(read_text(path, _limit(name), f"{_kind_of(name)} file"), name)


def parse_mapping(text: str, name: str) -> dict[str, Any]:
    """The top-level mapping of YAML (or, when `name` ends in .json, JSON) text; errors name `name`.

    Raises InputError as `load_mapping` does.
    """
    if len(text) > _limit(name):
        size = f"{_limit(name) // 10**6} MB"
        raise InputError(f"{name}: larger than the limit of {size} for a {_kind_of(name)} file")
    if not text.strip():
        raise InputError(f"{name}: the file is empty; a mapping of keys to values is expected")
    if "\0" in text:
        raise InputError(f"{name}: not a text file (it contains a zero byte)")
    try:
        data = _parse_json(text) if _is_json(name) else _parse_yaml(text)
    except InputError as error:
        raise InputError(f"{name}: {error}") from None
    except RecursionError:
        raise InputError(f"{name}: nested too deeply") from None
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


def dump_mapping(data: dict[str, Any]) -> str:
    """YAML text of plain data in its given key order; `parse_mapping` reads it back."""
    yaml = YAML(typ="rt", pure=True)
    yaml.width = 100
    buffer = StringIO()
    yaml.dump(CommentedMap(data), buffer)
    return buffer.getvalue()


def _parse_yaml(text: str) -> Any:
    yaml = YAML(typ="safe", pure=True)
    yaml.Composer = _NoAliasComposer
    try:
        return yaml.load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}: " if mark is not None else ""
        problem = " ".join(str(error.problem or error.context or "malformed").split())
        raise InputError(f"{where}not valid YAML: {problem}") from None
    except (YAMLError, ValueError) as error:  # a bad timestamp such as 2024-13-99 is a ValueError
        raise InputError(f"not valid YAML: {' '.join(str(error).split())}") from None


def _parse_json(text: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        for key, value in pairs:
            if key in mapping:
                raise InputError(f"the key {key!r} appears twice in one object")
            mapping[key] = value
        return mapping

    def refuse(constant: str) -> NoReturn:
        raise InputError(f"{constant} is not a JSON number")

    try:
        return json.loads(text, object_pairs_hook=unique, parse_constant=refuse)
    except json.JSONDecodeError as error:
        raise InputError(f"line {error.lineno}: not valid JSON: {error.msg}") from None
    except ValueError as error:  # an integer beyond Python's digit limit
        raise InputError(f"not valid JSON: {error}") from None


def _kind(data: object) -> str:
    return {"list": "a list", "str": "a text", "int": "a number", "float": "a number"}.get(
        type(data).__name__, f"a {type(data).__name__}"
    )
