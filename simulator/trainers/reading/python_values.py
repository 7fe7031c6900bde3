"""The values of a Python recipe while it is read: trees of attributes, and what is unknown."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from moesim.hwmodels.errors import InputError
from moesim.simulator.trainers.launch import Argument, Unknown
from moesim.simulator.trainers.reading.flatten import plain
from moesim.simulator.trainers.reading.limits import MOST_PARTS, Budget

_MOST_SHOWN = 200


@dataclass(slots=True)
class Tree:
    """An object of a recipe: the attributes that the file sets, with their lines, and the call that made it.

    `is_open` says that the call is of another file, so that attributes which are not set here have other
    values than none.
    """

    call: str = ""
    is_open: bool = False
    entries: dict[str, tuple[Any, int]] = field(default_factory=dict)

    def child(self, name: str, line: int) -> Tree:
        """The object that an attribute holds; a new one where the file does not set it."""
        value = self.entries.get(name, (None, line))[0]
        if not isinstance(value, Tree):
            known = value.text if isinstance(value, Unknown) else ""
            value = Tree(known, is_open=True)
            self.entries[name] = (value, line)
        return value


def measured(budget: Budget, place: str, *values: Any, but: Any = None) -> bool:
    """Whether no value is, or holds, an unknown value or an object.

    Counts the elements and characters of the values, those of an object once. Raises InputError where they
    are too many or nested too deeply, and where the values hold `but`, which then held itself.
    """
    size, is_plain = 0, True
    objects: set[int] = set()
    level: list[Any] = list(values)
    depth = 0
    while level:
        budget.depth(depth, place)
        inner: list[Any] = []
        for value in level:
            if value is but and but is not None:
                raise InputError(f"{place}: a value that holds itself cannot be read; write the values out")
            is_plain = is_plain and not isinstance(value, Unknown | Tree)
            if isinstance(value, str):
                size += len(value)
            elif isinstance(value, list | tuple):
                inner += value
            elif isinstance(value, dict):
                inner += value.values()
            elif isinstance(value, Tree) and id(value) not in objects:
                objects.add(id(value))
                inner += (item for item, _ in value.entries.values())
            size += 1
            if size + len(inner) > MOST_PARTS:
                raise InputError(
                    f"{place}: a value of more than {MOST_PARTS:,} elements and characters, the limit; write "
                    "the arguments out"
                )
        level, depth = inner, depth + 1
    budget.work(size, place)
    return is_plain


@lru_cache(maxsize=1024)
def shown(node: ast.AST) -> str:
    """The source text of an expression on one line, cut at a limit."""
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= _MOST_SHOWN else text[:_MOST_SHOWN] + "..."


def unknown(node: ast.AST, reason: str) -> Unknown:
    """An expression without a value."""
    return Unknown(shown(node), reason)


def arguments_of_tree(
    tree: Tree, file: str, budget: Budget, above: str = "", depth: int = 0
) -> list[Argument]:
    """The attributes of an object as arguments with dotted names; raises InputError for too many."""
    arguments: list[Argument] = []
    for name, (value, line) in tree.entries.items():
        dotted = f"{above}.{name}" if above else name
        place = f"{file}, line {line}"
        budget.work(20 + len(dotted), place)
        if isinstance(value, Tree):
            if value.is_open and value.call:
                arguments.append(
                    Argument(dotted, Unknown(value.call, "it is made by code of another file"), place)
                )
            if depth < 20:
                if value.call and not value.entries and not value.is_open:
                    arguments.append(Argument(dotted, value.call, place))
                arguments += arguments_of_tree(value, file, budget, dotted, depth + 1)
        elif isinstance(value, dict) and value and all(isinstance(key, str) for key in value):
            inner = Tree(entries={key: (item, line) for key, item in value.items()})
            arguments += arguments_of_tree(inner, file, budget, dotted, depth + 1) if depth < 20 else []
        else:
            measured(budget, place, value)
            arguments.append(Argument(dotted, _value(value), place))
    return arguments


def _value(value: Any) -> Any:
    if isinstance(value, list | tuple):
        items = [_value(item) for item in value]
        return plain(items)
    if isinstance(value, Tree):
        return Unknown(value.call, "it is an object inside a list")
    return plain(value)
