"""Resolves OmegaConf interpolations (`${a.b}`, `${multiply:a,b}`, `${oc.env:NAME}`) inside one file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from moesim.simulator.trainers.launch import Unknown, Value
from moesim.simulator.trainers.reading.flatten import plain
from moesim.simulator.trainers.reading.limits import Budget

_MOST_NESTED = 10
_INTEGER = re.compile(r"-?\d{1,18}")


class _UnresolvedError(Exception):
    """Raised where an interpolation has no value; its text says why."""


def resolved(
    value: Value | Unknown, name: str, data: Mapping[str, Any], environment: Mapping[str, str], budget: Budget
) -> Value | Unknown:
    """The value of the entry `name` of a configuration, with its interpolations resolved, or an Unknown."""
    if isinstance(value, tuple):
        items = [resolved(item, name, data, environment, budget) for item in value]
        unknown = next((item for item in items if isinstance(item, Unknown)), None)
        if unknown is not None:
            return Unknown(", ".join(str(item) for item in value), unknown.reason)
        return tuple(item for item in items if not isinstance(item, Unknown))
    if not isinstance(value, str):
        return value
    if value == "???":
        return Unknown(value, "the file leaves this value to the command line (???)")
    if "${" not in value:
        return value
    try:
        return _text(value, name, data, environment, budget, 0)
    except _UnresolvedError as error:
        return Unknown(value, str(error))


def _text(
    text: str, name: str, data: Mapping[str, Any], environment: Mapping[str, str], budget: Budget, depth: int
) -> Value:
    if depth > _MOST_NESTED:
        raise _UnresolvedError(f"its interpolations are nested more than {_MOST_NESTED} levels deep")
    parts: list[Value] = []
    at = 0
    while at < len(text):
        start = text.find("${", at)
        if start < 0:
            parts.append(text[at:])
            break
        if start > at:
            parts.append(text[at:start])
        end = _end(text, start)
        parts.append(_one(text[start + 2 : end - 1], name, data, environment, budget, depth))
        at = end
    if len(parts) == 1:
        return parts[0]
    joined = "".join(_shown(part) for part in parts)
    budget.text(len(joined), text[:80])
    return joined


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


def _one(
    body: str, name: str, data: Mapping[str, Any], environment: Mapping[str, str], budget: Budget, depth: int
) -> Value:
    """The value of one interpolation, whose text between the braces is `body`."""
    if "${" in body:
        body = _shown(_text(body, name, data, environment, budget, depth + 1))
    function, colon, rest = body.partition(":")
    if not colon:
        return _entry(body.strip(), name, data, environment, budget, depth)
    operands = [operand.strip() for operand in rest.split(",")]
    if function == "oc.env":
        if operands[0] in environment:
            return environment[operands[0]]
        if len(operands) > 1:
            return operands[1]
        raise _UnresolvedError(f"the variable {operands[0]} is not set")
    numbers = [int(operand) for operand in operands if _INTEGER.fullmatch(operand)]
    if function in _FUNCTIONS and len(numbers) == len(operands) == 2:
        if function.startswith("divide") and numbers[1] == 0:
            raise _UnresolvedError("it divides by zero")
        return int(_FUNCTIONS[function](numbers[0], numbers[1]))
    raise _UnresolvedError(f"the function {function[:40]!r} is not computed")


def _entry(
    key: str, name: str, data: Mapping[str, Any], environment: Mapping[str, str], budget: Budget, depth: int
) -> Value:
    dots = len(key) - len(key.lstrip("."))
    above = name.split(".")[: -dots or None] if dots else []
    path = ".".join([*above, key.lstrip(".")])
    if path.startswith("training.") and "training" not in data:  # NeMo's launcher mounts the file there
        path = path.removeprefix("training.")
    value: Any = data
    for part in path.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise _UnresolvedError(f"the file has no entry {path[:80]!r}")
        value = value[part]
    if isinstance(value, str) and "${" in value:
        return _text(value, path, data, environment, budget, depth + 1)
    shown = plain(value)
    if value == "???" or isinstance(shown, Unknown):
        raise _UnresolvedError(f"the file leaves {path[:80]!r} to the command line (???)")
    return shown


def _shown(value: Value) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)


_FUNCTIONS = {
    "multiply": lambda a, b: a * b,
    "add": lambda a, b: a + b,
    "sum": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "divide_floor": lambda a, b: a // b,
    "divide_ceil": lambda a, b: -(-a // b),
}
