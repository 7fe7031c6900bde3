"""Reads every YAML and JSON file safely, as plain data of a bounded size; writes YAML; finds shipped files.

Characters, values, keys, nesting and the digits of a number are limited, so that any hostile text is refused
within a second. Aliases, tags, directives and duplicate keys are refused; a date is read as text. PyYAML
parses YAML; what a plain scalar means follows YAML 1.2 and is decided here.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ValidationInfo

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.files import is_there, read_text
from moesim.hwmodels.validation import nearest, validate_model

MAX_JSON_BYTES = 4_000_000
MAX_YAML_BYTES = 500_000
"""Far above any real scenario or calibration profile; larger data belongs in a JSON file."""
MAX_VALUES = 100_000
"""Most keys, texts, numbers, lists and mappings of one JSON file."""
MAX_YAML_VALUES = 20_000
"""Most keys and values of one YAML file."""
MAX_KEYS = 20_000
MAX_CONFIGURATION_KEYS = 100_000
"""Most keys of a model's configuration, which may name the quantisation of every matrix."""
MAX_DEPTH = 40
"""Most levels of nested mappings and lists; no shipped file has more than 6."""
MOST_NUMBER_CHARACTERS = 40
_INTEGERS = 2**63

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
        kinds = {"list": "a list", "str": "a text", "int": "a number", "float": "a number"}
        kind = kinds.get(type(data).__name__, f"a {type(data).__name__}")
        raise InputError(f"{name}: the top level is {kind}, but a mapping of keys to values is expected")
    return data


def _limit(name: str) -> int:
    return MAX_JSON_BYTES if _is_json(name) else MAX_YAML_BYTES


def _kind_of(name: str) -> str:
    return "JSON" if _is_json(name) else "YAML"


def _is_json(name: str) -> bool:
    return name.lower().endswith(".json")


# -- JSON --------------------------------------------------------------------------------------------


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


# -- YAML --------------------------------------------------------------------------------------------

_UNPRINTABLE = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_WORDS = dict.fromkeys(("", "~", "null", "Null", "NULL"))
_WORDS |= dict.fromkeys(("true", "True", "TRUE"), True) | dict.fromkeys(("false", "False", "FALSE"), False)
_INTEGER = re.compile(r"([-+]?)(?:0b([01_]+)|0o([0-7_]+)|0x([0-9a-fA-F_]+)|([0-9][0-9_]*))")
_BASES = ((2, 64), (8, 22), (16, 16), (10, MOST_NUMBER_CHARACTERS))
"""Base of each kind of integer, and its most digits."""
_FLOAT = re.compile(
    r"[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)"
    r"|\.(?:nan|NaN|NAN)"
)
_TAG = "tag:yaml.org,2002:"
_NO_KEY = object()


def _parse_yaml(text: str) -> Any:
    """The data of a YAML text. Raises InputError, with the line, for malformed or refused text."""
    import yaml

    check_text(text)
    odd = _UNPRINTABLE.search(text)
    if odd is not None:
        raise _wrong(text.count("\n", 0, odd.start()), f"the character {odd[0]!r} is not allowed")
    try:
        return _built(yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = " ".join(str(error.problem or error.context or "malformed").split())
        if "nesting depth" in problem:  # the parser's own limit, which it meets where it looks ahead
            raise _too_deep(mark.line) from None
        raise _wrong(None if mark is None else mark.line, problem) from None
    except yaml.YAMLError as error:
        raise _wrong(None, " ".join(str(error).split())) from None


def _built(events: Any) -> Any:
    """The data that a text's events describe, built without recursion and refused beyond the limits.

    Aliases are refused, since ten lines of them can expand to gigabytes and no shipped file needs one.
    """
    import yaml

    document: list[Any] = []
    holders: list[Any] = [document]
    keys: list[Any] = [_NO_KEY]
    values = 0
    for event in events:
        kind, line = type(event), event.start_mark.line
        if kind is yaml.ScalarEvent:
            value = _scalar(event)
        elif kind is yaml.MappingStartEvent or kind is yaml.SequenceStartEvent:
            value = {} if kind is yaml.MappingStartEvent else []
            tag = str(event.tag or "").removeprefix(_TAG)
            if tag not in ("", "seq" if value == [] else "map"):  # only that of its own kind
                raise _wrong(line, f"the tag {tag[:40]!r} is not known; leave tags out")
        elif kind is yaml.MappingEndEvent or kind is yaml.SequenceEndEvent:
            holders.pop()
            keys.pop()
            continue
        elif kind is yaml.AliasEvent:
            raise InputError(
                f"line {line + 1}: the YAML alias *{event.anchor} is refused; write the value out"
            )
        else:
            if getattr(event, "version", None) or getattr(event, "tags", None):
                raise InputError(f"line {line + 1}: a directive (%YAML, %TAG) is refused; delete the line")
            if document and hasattr(event, "version"):
                raise _wrong(line, "a second document starts here; keep one of them in the file")
            continue
        values += 1
        if values > MAX_YAML_VALUES:
            raise InputError(
                f"line {line + 1}: more than {MAX_YAML_VALUES:,} keys and values, the limit of a YAML file; "
                "write so many as JSON"
            )
        holder = holders[-1]
        if isinstance(holder, list):
            holder.append(value)
        elif keys[-1] is _NO_KEY:
            if isinstance(value, bool) or not isinstance(value, str | int):
                raise _wrong(line, "a key must be a text or a whole number; put quotes around it")
            if value in holder:
                raise _wrong(line, f"the duplicate key {cut(repr(value))}; keep one of them")
            keys[-1] = value
            continue
        else:
            holder[keys[-1]] = value
            keys[-1] = _NO_KEY
        if kind is not yaml.ScalarEvent:
            if len(holders) > MAX_DEPTH:
                raise _too_deep(line)
            holders.append(value)
            keys.append(_NO_KEY)
    return document[0] if document else None


def _scalar(event: Any) -> Any:
    """A scalar as text, number, boolean or null: by its form where it is plain, as YAML 1.2 has it."""
    text, tag = event.value, event.tag
    if tag is None and not event.implicit[0]:
        return text
    line = event.start_mark.line
    if tag is not None:
        name = str(tag).removeprefix(_TAG)
        if name in ("str", "timestamp", "!"):
            return text
        value = _plain(text, line)
        if {"null": "NoneType"}.get(name, name) != type(value).__name__:  # only tags of JSON's types
            raise _wrong(line, f"{cut(repr(text))} cannot have the tag {name[:40]!r}; leave tags out")
        return value
    if text == "<<":
        raise _wrong(line, "the merge key << is refused; write the keys out, or put quotes around it")
    return _plain(text, line)


def _plain(text: str, line: int) -> Any:
    """What a plain scalar means."""
    return _number(text, line) if text[:1] in _NUMBER_STARTS and text else _WORDS.get(text, text)


_NUMBER_STARTS = frozenset("-+.0123456789")


def _number(text: str, line: int) -> Any:
    """A plain scalar that starts like a number, as that or as text (a date, a version, a quantity)."""
    integer = _INTEGER.fullmatch(text)
    if integer is not None:
        digits, (base, most) = next(
            (found.replace("_", ""), limit)
            for found, limit in zip(integer.groups()[1:], _BASES, strict=True)
            if found
        )
        if 0 < len(digits) <= most:
            return int(integer[1] + digits, base)
    elif _FLOAT.fullmatch(text):
        plain = text.replace("_", "")
        if len(plain) <= MOST_NUMBER_CHARACTERS:
            return float(plain.replace(".", "", 1) if plain[-1].isalpha() else plain)
    else:
        return text
    raise _wrong(
        line,
        f"{cut(repr(text))} is no number of at most {MOST_NUMBER_CHARACTERS} characters (16 if hexadecimal)",
    )


def _too_deep(line: int) -> InputError:
    return InputError(f"line {line + 1}: nested too deeply, more than {MAX_DEPTH} levels")


def _wrong(line: int | None, what: str) -> InputError:
    """The error about the line of this index, which counts from 0."""
    return InputError(f"{'' if line is None else f'line {line + 1}: '}not valid YAML: {what}")


def dump_mapping(data: dict[str, Any], width: int = 100, compact: frozenset[str] | None = None) -> str:
    """YAML text of plain data in its given key order; `parse_mapping` reads it back.

    Lines break at words after about `width` characters. Where `compact` is given, lists without lists and
    mappings, and the values of keys of these names, stand in one line. Texts that readers of YAML 1.1 would
    take for something else are quoted as well.
    """
    import yaml

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]  # PyYAML has no types
        def ignore_aliases(self, data: Any) -> bool:
            return True

        def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
            own = _tag_of(value) if kind is yaml.ScalarNode and implicit[0] else None
            return own or super().resolve(kind, value, implicit)

        def represent_sequence(self, tag: str, sequence: Any, flow_style: bool | None = None) -> Any:
            one_line = compact is not None and not any(isinstance(item, dict | list) for item in sequence)
            return super().represent_sequence(tag, sequence, one_line or None)

        def represent_mapping(self, tag: str, mapping: Any, flow_style: bool | None = None) -> Any:
            node = super().represent_mapping(tag, mapping, flow_style)
            for key, value in node.value:
                if compact and key.value in compact:
                    value.flow_style = True
            return node

    def text(dumper: Any, value: str) -> Any:
        return dumper.represent_scalar(_TAG + "str", value, style="|" if "\n" in value else None)

    def number(dumper: Any, value: float) -> Any:
        plain = (
            repr(value) if math.isfinite(value) else f"{value}".replace("inf", ".inf").replace("nan", ".nan")
        )
        return dumper.represent_scalar(_TAG + "float", plain)

    Dumper.add_representer(str, text)
    Dumper.add_representer(float, number)
    written: str = yaml.dump(
        data, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=width, default_flow_style=False
    )
    return written


def _tag_of(plain: str) -> str | None:
    """The tag of a plain scalar that is read as something else than text, or refused."""
    try:
        value = _plain(plain, 0)
    except InputError:
        return _TAG + "int"
    kind = {"NoneType": "null"}.get(type(value).__name__, type(value).__name__)
    return None if kind == "str" else _TAG + kind


# -- limits of both ----------------------------------------------------------------------------------


def check(data: Any, most_values: int, most_keys: int) -> None:
    """Raise InputError for too many values or keys, too deep nesting, and illegal texts or numbers."""
    left, keys = most_values, most_keys
    todo: list[tuple[Any, int]] = [(data, 0)]
    while todo:
        value, depth = todo.pop()
        if isinstance(value, dict):
            keys -= len(value)
            for key in value:
                check_text(key if isinstance(key, str) else "")
            inside = list(value.values())
        elif isinstance(value, list):
            inside = value
        else:
            if isinstance(value, str):
                check_text(value)
            elif isinstance(value, int):
                if not -_INTEGERS <= value < _INTEGERS:
                    raise InputError(
                        f"{cut(hex(value))} is out of range: whole numbers are from -2^63 to 2^63-1; "
                        f"nearest: {_INTEGERS - 1 if value > 0 else -_INTEGERS}"
                    )
            elif value is not None and not math.isfinite(value):
                raise InputError(f"{value} is out of range: numbers are finite, below 1.8e308")
            continue
        left -= len(inside)
        if left < 0 or keys < 0:
            what = f"{most_values:,} values" if left < 0 else f"{most_keys:,} keys"
            raise InputError(f"more than {what}, the limit of one file")
        if depth >= MAX_DEPTH:
            raise InputError(f"nested too deeply, more than {MAX_DEPTH} levels")
        todo.extend((item, depth + 1) for item in inside)


def check_text(text: str) -> None:
    """Raise InputError for a zero byte or half of a surrogate pair."""
    if text.isascii():
        if "\0" in text:
            raise InputError(f"the text {cut(repr(text))} contains a zero byte")
    else:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"character {error.start + 1} of the text {cut(ascii(text))} is half of a pair "
                "(a surrogate), which no file can hold"
            ) from None


def cut(text: str) -> str:
    """The text, shortened to 60 characters for a message."""
    return text if len(text) <= 60 else text[:57] + "..."


# -- files that ship and files of the user ---------------------------------------------------------

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
