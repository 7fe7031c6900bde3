"""No regular expression repeats without bound what itself varies in length: such ones may never end."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("hwmodels", "simulator", "kernels", "app", "src/moesim")
MANY = 100
"""Repeats from which a quantifier counts as unbounded."""


def nested(pattern: str) -> bool:
    """Whether a quantifier of variable length stands inside an unbounded one, as in (a*)* or (a{1,9})+."""
    parser = re._parser  # type: ignore[attr-defined]
    repeats = {"MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"}

    def inside(items: Any, unbounded: bool) -> bool:
        for name, argument in items:
            if str(name) in repeats:
                least, most, body = argument
                if unbounded and least != most and most > 1:
                    return True
                if inside(body, unbounded or most >= MANY):
                    return True
            elif any(inside(body, unbounded) for body in bodies(argument)):
                return True
        return False

    def bodies(argument: Any) -> Iterator[Any]:
        if isinstance(argument, parser.SubPattern):
            yield argument
        elif isinstance(argument, list | tuple):
            for part in argument:
                yield from bodies(part)

    return inside(parser.parse(pattern), False)


def constants(node: ast.expr) -> str | None:
    """The text of a pattern; parts of an f-string that are filled in stand as one letter."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "x" for part in node.values)
    return None


def patterns() -> Iterator[tuple[str, str]]:
    """(place, pattern) of every call of the module re, and of every `pattern=` of a field."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text("utf-8")
            if not re.search(r"\bre\.\w+\(|\bpattern=", text):
                continue
            for node in ast.walk(ast.parse(text)):
                if not isinstance(node, ast.Call):
                    continue
                called = node.func
                of_re = isinstance(called, ast.Attribute) and getattr(called.value, "id", "") == "re"
                found = node.args[:1] if of_re and getattr(called, "attr", "") != "escape" else []
                for word in node.keywords:
                    if word.arg == "pattern":
                        found.append(word.value)
                for pattern in filter(None, map(constants, found)):
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", pattern


def test_patterns_have_no_nested_quantifiers() -> None:
    found = list(patterns())
    assert len(found) > 30
    bad = [f"{place}: {pattern}" for place, pattern in found if nested(pattern)]
    assert not bad


@pytest.mark.parametrize(
    "pattern", [r"(a*)*", r"(?:a+b?)+", r"^\s*(\x1b\[[0-9;]*m)*x", r"(a{1,9})+", r"((a|b+))*"]
)
def test_nested_quantifiers_are_told(pattern: str) -> None:
    assert nested(pattern)


@pytest.mark.parametrize(
    "pattern", [r"a*b*", r"(?:,[01])*", r"(a*)?", r"(?:/[a-z]+){1,2}", r"(ab{3})*", r"[a*]+"]
)
def test_others_pass(pattern: str) -> None:
    assert not nested(pattern)
