"""Reads every YAML and JSON file safely, as plain data of a bounded size.

Characters, values, keys, nesting and the digits of a number are limited, so that any hostile text is refused
within a second. Aliases, tags and duplicate keys are refused; a date is read as text.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.composer import Composer
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import AliasEvent
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode

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
MAX_YAML_BYTES = 500_000
"""Far above any real scenario or calibration profile. YAML is read at 50 to 400 kB/s, so larger data belongs
in a JSON file."""
MAX_YAML_VALUES = 20_000
MAX_VALUES = 100_000
"""Most keys, texts, numbers, lists and mappings of one JSON file."""
MAX_KEYS = 20_000
MAX_CONFIGURATION_KEYS = 100_000
"""Most keys of a model's configuration, which may name the quantisation of every matrix."""
MAX_DEPTH = 40
"""Most levels of nested mappings and lists; no shipped file has more than 6."""
MOST_NUMBER_CHARACTERS = 40
_INTEGERS = 2**63

EXTENSIONS = (".yaml", ".yml", ".json")

_INTEGER = re.compile(r"([-+]?)(?:0b([01]{1,64})|0o([0-7]{1,22})|0x([0-9a-fA-F]{1,16})|(\d{1,40}))", re.ASCII)
_BASES = (2, 8, 16, 10)


class _Composer(Composer):
    """Composes a bounded number and depth of nodes, and refuses aliases.

    Ten lines of nested aliases can expand to gigabytes, and no shipped file needs one.
    """

    values = 0
    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.parser.peek_event()
        line = event.start_mark.line + 1
        if isinstance(event, AliasEvent):
            raise InputError(f"line {line}: the YAML alias *{event.anchor} is refused; write the value out")
        self.values += 1
        if self.values > MAX_YAML_VALUES:
            raise InputError(
                f"line {line}: more than {MAX_YAML_VALUES:,} keys and values, the limit of a YAML file; "
                "write so many as JSON"
            )
        if self.depth > MAX_DEPTH:
            raise InputError(f"line {line}: nested too deeply, more than {MAX_DEPTH} levels")
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


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
        _check(data, most_values, most_keys)
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


def dump_mapping(data: dict[str, Any]) -> str:
    """YAML text of plain data in its given key order; `parse_mapping` reads it back."""
    yaml = YAML(typ="rt", pure=True)
    yaml.width = 100
    buffer = StringIO()
    yaml.dump(CommentedMap(data), buffer)
    return buffer.getvalue()


# -- limits that hold for both formats -----------------------------------------------------------------


def _check(data: Any, most_values: int, most_keys: int) -> None:
    """Raise InputError for too many values or keys, too deep nesting, and illegal texts or numbers."""
    left, keys = most_values, most_keys
    todo: list[tuple[Any, int]] = [(data, 0)]
    while todo:
        value, depth = todo.pop()
        if isinstance(value, dict):
            keys -= len(value)
            for key in value:
                _check_text(key if isinstance(key, str) else "")
            inside = list(value.values())
        elif isinstance(value, list):
            inside = value
        else:
            _check_value(value)
            continue
        left -= len(inside)
        if left < 0 or keys < 0:
            what = f"{most_values:,} values" if left < 0 else f"{most_keys:,} keys"
            raise InputError(f"more than {what}, the limit of one file")
        if depth >= MAX_DEPTH:
            raise InputError(f"nested too deeply, more than {MAX_DEPTH} levels")
        todo.extend((item, depth + 1) for item in inside)


def _check_value(value: Any) -> None:
    if isinstance(value, str):
        _check_text(value)
    elif isinstance(value, bool) or value is None:
        return
    elif isinstance(value, int):
        if not -_INTEGERS <= value < _INTEGERS:
            raise InputError(
                f"{_cut(hex(value))} is out of range: whole numbers are from -2^63 to 2^63-1; nearest: "
                f"{_INTEGERS - 1 if value > 0 else -_INTEGERS}"
            )
    elif not math.isfinite(value):
        raise InputError(f"{value} is out of range: numbers are finite, below 1.8e308")


def _check_text(text: str) -> None:
    if text.isascii():
        if "\0" in text:
            raise InputError(f"the text {_cut(repr(text))} contains a zero byte")
    else:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"character {error.start + 1} of the text {_cut(ascii(text))} is half of a pair "
                "(a surrogate), which no file can hold"
            ) from None


def _cut(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


# -- YAML ----------------------------------------------------------------------------------------------


def _parse_yaml(text: str) -> Any:
    _check_text(text)
    if text.lstrip("\ufeff \r\n").startswith("%"):
        raise InputError("line 1: a directive (%YAML, %TAG) is refused; delete the line")
    yaml = YAML(typ="safe", pure=True)
    yaml.Composer = _Composer
    try:
        node = yaml.compose(text)
        return None if node is None else _plain(node)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}: " if mark is not None else ""
        problem = " ".join(str(error.problem or error.context or "malformed").split())
        raise InputError(f"{where}not valid YAML: {problem}") from None
    except YAMLError as error:
        raise InputError(f"not valid YAML: {' '.join(str(error).split())}") from None


def _plain(node: Node) -> Any:
    """A node as plain data; only the tags of JSON's types are accepted."""
    tag = str(node.tag).removeprefix("tag:yaml.org,2002:")
    if isinstance(node, ScalarNode):
        return _scalar(node, tag)
    if isinstance(node, MappingNode) and tag == "map":
        return dict(_pairs(node))
    if tag == "seq" and not isinstance(node, MappingNode):
        return [_plain(item) for item in node.value]
    raise _wrong(node, f"the tag {tag[:40]!r} is not known; leave tags out")


def _pairs(node: MappingNode) -> Iterator[tuple[Any, Any]]:
    seen = set()
    for key_node, value_node in node.value:
        key = _plain(key_node) if isinstance(key_node, ScalarNode) else None
        if isinstance(key, bool) or not isinstance(key, str | int):
            raise _wrong(key_node, "a key must be a text or a whole number; put quotes around it")
        if key in seen:
            raise _wrong(key_node, f"the duplicate key {_cut(repr(key))}; keep one of them")
        seen.add(key)
        yield key, _plain(value_node)


def _scalar(node: ScalarNode, tag: str) -> Any:
    text = str(node.value)
    if tag in ("str", "timestamp", "value"):
        return text
    if tag == "null":
        return None
    if tag == "bool" and text.lower() in ("true", "false"):
        return text.lower() == "true"
    plain = text.replace("_", "")
    if tag == "int" and (match := _INTEGER.fullmatch(plain)):
        digits, base = next((d, b) for d, b in zip(match.groups()[1:], _BASES, strict=True) if d)
        return int(match[1] + digits, base)
    if tag == "float" and len(plain) <= MOST_NUMBER_CHARACTERS:
        special = plain.lower().lstrip("+-") in (".inf", ".nan")
        try:
            return float(plain.replace(".", "", 1) if special else plain)
        except ValueError:
            pass
    if tag in ("int", "float"):
        raise _wrong(
            node,
            f"{_cut(repr(text))} is no number of at most {MOST_NUMBER_CHARACTERS} characters "
            "(16 if hexadecimal)",
        )
    raise _wrong(node, f"{_cut(repr(text))} cannot have the tag {tag[:40]!r}; leave tags out")


def _wrong(node: Node, what: str) -> InputError:
    return InputError(f"line {node.start_mark.line + 1}: not valid YAML: {what}")


# -- JSON ----------------------------------------------------------------------------------------------


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
                raise InputError(f"the key {_cut(repr(key))} appears twice in one object")
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
