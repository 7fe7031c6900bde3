"""Reads YAML, JSON and TOML into arguments with dotted names, and resolves what points inside the file."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.files import read_text
from moesim.hwmodels.yaml_io import parse_mapping
from moesim.simulator.trainers.launch import Argument, LaunchFile, Machine, Unknown, Value
from moesim.simulator.trainers.reading.trainer_names import trainer_of_keys

MOST_BYTES = 300_000
"""Most bytes of one configuration or script."""
MOST_TEXT = 30_000
"""Most characters of one text after its variables are filled in."""
MOST_DEPTH = 40
"""Most levels of nested names and brackets."""
MOST_BITS = 512
"""Most bits of a whole number."""

_MOST_NESTED = 10
_INTEGER = re.compile(r"-?\d{1,18}")
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))", re.ASCII)
_OTHER_FORM = re.compile(r"\$\{[A-Za-z_]\w*[^\w}][^}]{0,200}\}", re.ASCII)
_MACHINE = {
    **dict.fromkeys(("trainer.num_nodes", "training.trainer.num_nodes", "strategy.num_nodes"), "nodes"),
    "trainer.devices": "gpus_per_node",
    "training.trainer.devices": "gpus_per_node",
    "trainer.num_gpus_per_node": "gpus_per_node",
}
"""Names that state the nodes, and the GPUs of a node."""


def read_configuration(
    data: Mapping[str, Any], text: str, file: str, environment: Mapping[str, str]
) -> LaunchFile:
    """The launch of a YAML or JSON mapping.

    A mapping MODEL_ARGS is a command line of Megatron-LM, with `${NAME}` filled from `environment`; any other
    mapping gives dotted names. Raises InputError for a mapping without entries.
    """
    if "MODEL_ARGS" not in data:
        return configuration(data, text, file, environment)
    notes: dict[str, None] = {}
    own = {str(key): _scalar(value) for key, value in _section(data, "ENV_VARS", file).items()}
    lines = YamlLines(text, file)
    raw = text.splitlines()

    def filled(value: str, place: str) -> str | Unknown:
        return _filled(value, place, environment, own, notes)

    arguments: list[Argument] = []
    for key, value in _section(data, "MODEL_ARGS", file).items():
        place = lines(f"MODEL_ARGS.{key}")
        if value is False:
            notes[f"{place}: {key} is false, so the flag is not given"] = None
            continue
        arguments.append(Argument(str(key), _argument(value, place, raw, filled), place))
    if not arguments:
        raise InputError(f"{file}: MODEL_ARGS holds no argument; list the flags of the training under it")
    seen = {key: filled(value, lines(f"ENV_VARS.{key}")) for key, value in own.items()}
    notes |= {
        f"{file}: the section {key} is not read": None
        for key in data
        if key not in ("ENV_VARS", "MODEL_ARGS")
    }
    return LaunchFile("megatron-lm", None, tuple(arguments), Machine(), seen, tuple(notes))


def _argument(value: Any, place: str, raw: list[str], filled: Any) -> Value | Unknown:
    """The value of one flag: None for true, the text as it is written for a number."""
    if value is True or value is None or value == "":
        return None
    if isinstance(value, list):
        words = [filled(_scalar(item), place) for item in value]
        return _items(words, " ".join(w.text if isinstance(w, Unknown) else w for w in words))
    text = _scalar(value)
    if isinstance(value, int | float):
        number = re.search(r"line (\d+)$", place)
        written = re.search(r":\s+([^\s#]+)\s*(?:#.*)?$", raw[int(number[1]) - 1]) if number else None
        text = written[1] if written and re.fullmatch(r"[-+.\w]+", written[1]) else text
    result: str | Unknown = filled(text, place)
    if isinstance(result, str) and not re.search(r"[\"'()\[\]]", result) and len(result.split()) > 1:
        return tuple(result.split())
    return result


def _items(items: Sequence[Value | Unknown], text: str) -> Value | Unknown:
    """The items of a list as a tuple, or an Unknown with the `text` where one has no value."""
    unknown = next((item for item in items if isinstance(item, Unknown)), None)
    if unknown is not None:
        return Unknown(text, unknown.reason)
    return tuple(item for item in items if not isinstance(item, Unknown))


def _section(data: Mapping[str, Any], key: str, file: str) -> dict[str, Any]:
    section = data.get(key) or {}
    if not isinstance(section, dict):
        raise InputError(f"{file}: {key}={str(section)[:60]!r} must be a mapping of names to values")
    return section


def _scalar(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    shown = plain(value)
    return shown if isinstance(shown, str) else "" if shown is None else str(shown)


def _filled(
    text: str,
    place: str,
    environment: Mapping[str, str],
    own: Mapping[str, str],
    notes: dict[str, None],
) -> str | Unknown:
    """The text with its variables filled in once; one that has no value makes an Unknown."""
    missing: list[str] = []

    def one(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name in environment:
            return environment[name]
        if name in own and "$" not in own[name]:
            notes[f"{place}: {match[0]} is taken from ENV_VARS of the same file"] = None
            return own[name]
        missing.append(name)
        return match[0]

    if _OTHER_FORM.search(text):
        return Unknown(text, "this form of a variable is not filled in by envsubst")
    done = _VARIABLE.sub(one, text)
    _check_text(done, text)
    if missing:
        return Unknown(done, f"the variable {missing[0]} is not set")
    return done


def configuration(
    data: Mapping[str, Any], text: str, file: str, environment: Mapping[str, str]
) -> LaunchFile:
    """The launch of a nested configuration, whose interpolations (`${model.size}`) are resolved."""
    lines = YamlLines(text, file)
    within = _Interpolations(data, environment)
    notes: dict[str, None] = {}
    entries = flattened({key: value for key, value in data.items() if key != "defaults"}, lines)
    if "defaults" in data:
        others = data["defaults"] if isinstance(data["defaults"], list) else ()
        shown = ", ".join(str(plain(item)) for item in others)
        notes[f"{lines('defaults')}: the defaults of other files are not read ({shown[:200]})"] = None
    arguments = tuple(replace(entry, value=within.value(entry.value, entry.name)) for entry in entries)
    if not arguments:
        raise InputError(f"{file}: holds no entry; give the file that configures the training")
    trainer = trainer_of_keys([argument.name for argument in arguments], text)
    places: dict[str, str] = {}
    counts: dict[str, int | Unknown] = {}
    for argument in arguments:
        value = argument.value
        if argument.name in _MACHINE and not isinstance(value, bool) and isinstance(value, int | Unknown):
            field = _MACHINE[argument.name]
            counts[field], places[field] = value, argument.place
    machine = Machine(counts.get("nodes"), counts.get("gpus_per_node"), places)
    return LaunchFile(trainer, None, arguments, machine, {}, tuple(notes))


def entries_of_text(text: str, name: str) -> tuple[Argument, ...]:
    """The entries of a configuration that an argument names; raises InputError for text that is none."""
    if name.lower().endswith(".toml"):
        return flattened(_toml(text, name), _TomlLines(text, name))
    return configuration(parse_mapping(text, name), text, name, {}).arguments


def read_toml(path: Path) -> LaunchFile:
    """The launch of a TOML file; raises InputError for text that is no TOML, too deep, or empty."""
    text = read_text(path, MOST_BYTES, "TOML launch file")
    arguments = entries_of_text(text, path.name)
    if not arguments:
        raise InputError(f"{path.name}: holds no entry; give the file that configures the training")
    trainer = trainer_of_keys([argument.name for argument in arguments], text)
    return LaunchFile(trainer or "torchtitan", None, arguments)


def _toml(text: str, name: str) -> dict[str, Any]:
    if _deepest(text) > MOST_DEPTH:
        raise InputError(f"{name}: more than {MOST_DEPTH} brackets are open at once; write the lists out")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{name}: not valid TOML: {error}") from None
    except (RecursionError, ValueError) as error:
        raise InputError(f"{name}: cannot be read: {str(error)[:200]}") from None


def _deepest(text: str) -> int:
    """The most brackets that are open at once."""
    level = deepest = 0
    for char in text:
        if char in "[{":
            level += 1
            deepest = max(deepest, level)
        elif char in "]}":
            level = max(0, level - 1)
    return deepest


class _Lines:
    """Finds the line of a dotted name in the text of a file, or of what holds it."""

    def __init__(self, text: str, file: str, above: int = 0) -> None:
        """Takes the text of a file, its name and the number of lines above the text."""
        self._file, self._above = file, above
        self._lines = self._numbers(text)

    @staticmethod
    def _numbers(text: str) -> dict[str, int]:
        raise NotImplementedError

    def __call__(self, name: str) -> str:
        """File and line of the entry."""
        while name:
            if name in self._lines:
                return f"{self._file}, line {self._above + self._lines[name]}"
            name = name.rpartition(".")[0]
        return self._file


class _TomlLines(_Lines):
    """The lines of TOML text."""

    @staticmethod
    def _numbers(text: str) -> dict[str, int]:
        lines: dict[str, int] = {}
        section = ""
        for number, line in enumerate(text.splitlines(), start=1):
            header = re.match(r"\s*\[\[?\s*([\w.\"'-]+)\s*\]", line)
            key = re.match(r"\s*([\w.\"'-]+)\s*=", line)
            if header:
                section = header[1].replace('"', "").replace("'", "") + "."
                lines.setdefault(section[:-1], number)
            elif key:
                lines.setdefault(section + key[1].replace('"', "").replace("'", ""), number)
        return lines


def flattened(
    data: Mapping[str, Any], place: Callable[[str], str], above: str = "", depth: int = 0
) -> tuple[Argument, ...]:
    """The entries of a mapping as arguments; `place` says where the entry of a dotted name is written.

    A list becomes a tuple. A mapping inside a list is written as its text, since it has no dotted name.
    Raises InputError for names of too many parts, and for numbers of too many digits.
    """
    if depth > MOST_DEPTH:
        raise InputError(
            f"{place(above)}: {above[:60]!r}... has more than {MOST_DEPTH} parts, the limit of a name; "
            "shorten it"
        )
    arguments: list[Argument] = []
    for key, value in data.items():
        name = f"{above}.{key}" if above else str(key)
        if isinstance(value, Mapping) and value:
            arguments += flattened(value, place, name, depth + 1)
        else:
            where = place(name)
            arguments.append(Argument(name, plain(value, f"{where}: {name[:80]}"), where))
    return tuple(arguments)


def check_number(value: int, place: str) -> None:
    """Raise InputError for a whole number that is too long to be written."""
    if value.bit_length() > MOST_BITS:
        raise InputError(
            f"{place}: a whole number of {value.bit_length():,} bits, above the limit of {MOST_BITS}; "
            "correct it"
        )


def plain(value: Any, place: str = "a value of the file") -> Value | Unknown:
    """A value of a configuration file as plain data; raises InputError for numbers of too many digits."""
    if isinstance(value, int):
        check_number(value, place)
    if isinstance(value, Unknown) or value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, list | tuple):
        items = [plain(item, place) for item in value]
        text = ", ".join(item.text if isinstance(item, Unknown) else repr(item) for item in items)
        return _items(items, f"[{text}]")
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {plain(item, place)}" for key, item in value.items()) + "}"
    return str(value)


class YamlLines(_Lines):
    """The lines of YAML or JSON text."""

    @staticmethod
    def _numbers(text: str) -> dict[str, int]:
        lines: dict[str, int] = {}
        stack: list[tuple[int, str]] = []
        for number, line in enumerate(text.splitlines(), start=1):
            match = re.match(
                r"(\s*)(?:([\"'])(.{1,200}?)\2\s*:|([\w.@/+-][^:#\n\"']{0,200}?)\s*:(?:\s|$))", line
            )
            if match is None:
                continue
            indent, key = len(match[1]), match[3] or match[4]
            while stack and stack[-1][0] >= indent:
                stack.pop()
            stack.append((indent, key))
            lines.setdefault(".".join(part for _, part in stack), number)
        return lines


# -- interpolations of OmegaConf: `${a.b}`, `${multiply:a,b}`, `${oc.env:NAME}` --------------------------


class _UnresolvedError(Exception):
    """Raised where an interpolation has no value; its text says why."""


class _Interpolations:
    """Resolves the interpolations of one file; every entry is resolved once, so that the work is bounded."""

    def __init__(self, data: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        self._data, self._environment = data, environment
        self._done: dict[str, Value | _UnresolvedError] = {}

    def value(self, value: Value | Unknown, name: str) -> Value | Unknown:
        """The value of the entry `name`, or an Unknown that says why it has none."""
        if isinstance(value, tuple):
            return _items([self.value(item, name) for item in value], ", ".join(map(str, value)))
        if value == "???":
            return Unknown("???", "the file leaves this value to the command line (???)")
        if not isinstance(value, str) or "${" not in value:
            return value
        try:
            return self._text(value, name, 0)
        except _UnresolvedError as error:
            return Unknown(value, str(error))

    def _text(self, text: str, name: str, depth: int) -> Value:
        if depth > _MOST_NESTED:
            raise _UnresolvedError(f"its interpolations are nested more than {_MOST_NESTED} levels deep")
        parts: list[Value] = []
        at = 0
        while at < len(text):
            start = text.find("${", at)
            if start != at:
                parts.append(text[at:] if start < 0 else text[at:start])
                at = len(text) if start < 0 else start
                continue
            end = _end(text, start)
            parts.append(self._one(text[start + 2 : end - 1], name, depth))
            at = end
        if len(parts) == 1:
            return parts[0]
        joined = "".join(_as_text(part) for part in parts)
        _check_text(joined, text)
        return joined

    def _one(self, body: str, name: str, depth: int) -> Value:
        """The value of one interpolation, whose text between the braces is `body`."""
        if "${" in body:
            body = _as_text(self._text(body, name, depth + 1))
        function, colon, rest = body.partition(":")
        if not colon:
            return self._entry(body.strip(), name, depth)
        operands = [operand.strip() for operand in rest.split(",")]
        if function == "oc.env":
            if operands[0] not in self._environment and len(operands) == 1:
                raise _UnresolvedError(f"the variable {operands[0]} is not set")
            return self._environment.get(operands[0], operands[-1])
        numbers = [int(operand) for operand in operands if _INTEGER.fullmatch(operand)]
        if function in _FUNCTIONS and len(numbers) == len(operands) == 2:
            if function.startswith("divide") and numbers[1] == 0:
                raise _UnresolvedError("it divides by zero")
            return int(_FUNCTIONS[function](numbers[0], numbers[1]))
        raise _UnresolvedError(f"the function {function[:40]!r} is not computed")

    def _entry(self, key: str, name: str, depth: int) -> Value:
        dots = len(key) - len(key.lstrip("."))
        above = name.split(".")[: -dots or None] if dots else []
        path = ".".join([*above, key.lstrip(".")])
        if path.startswith("training.") and "training" not in self._data:  # NeMo's launcher mounts it there
            path = path.removeprefix("training.")
        if path not in self._done:
            try:
                self._done[path] = self._found(path, depth)
            except _UnresolvedError as error:
                self._done[path] = error
        done = self._done[path]
        if isinstance(done, _UnresolvedError):
            raise done
        return done

    def _found(self, path: str, depth: int) -> Value:
        value: Any = self._data
        for part in path.split("."):
            if not isinstance(value, Mapping) or part not in value:
                raise _UnresolvedError(f"the file has no entry {path[:80]!r}")
            value = value[part]
        if isinstance(value, str) and "${" in value:
            return self._text(value, path, depth + 1)
        shown = plain(value)
        if value == "???" or isinstance(shown, Unknown):
            raise _UnresolvedError(f"the file leaves {path[:80]!r} to the command line (???)")
        return shown


def _end(text: str, start: int) -> int:
    level = 0
    for at in range(start, len(text)):
        if text.startswith("${", at):
            level += 1
        elif text[at] == "}":
            level -= 1
            if level == 0:
                return at + 1
    raise _UnresolvedError("an interpolation is not closed by }")


def _as_text(value: Value) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)


def _check_text(text: str, name: str) -> None:
    if len(text) > MOST_TEXT:
        raise InputError(
            f"{name[:80]!r} makes a text of more than {MOST_TEXT:,} characters, the limit; write it out"
        )


_FUNCTIONS: Mapping[str, Callable[[int, int], int]] = {
    "multiply": lambda a, b: a * b,
    "add": lambda a, b: a + b,
    "sum": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "divide_floor": lambda a, b: a // b,
    "divide_ceil": lambda a, b: -(-a // b),
}
