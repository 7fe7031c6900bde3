"""The values of a Python recipe while it is read: trees of attributes, and what is unknown."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import Any

from moesim.simulator.trainers.launch import Argument, Unknown
from moesim.simulator.trainers.reading.flatten import plain

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


def shown(node: ast.AST) -> str:
    """The source text of an expression on one line, cut at a limit."""
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= _MOST_SHOWN else text[:_MOST_SHOWN] + "..."


def unknown(node: ast.AST, reason: str) -> Unknown:
    """An expression without a value."""
    return Unknown(shown(node), reason)


def arguments_of_tree(tree: Tree, file: str, above: str = "", depth: int = 0) -> list[Argument]:
    """The attributes of an object as arguments with dotted names."""
    arguments: list[Argument] = []
    for name, (value, line) in tree.entries.items():
        dotted = f"{above}.{name}" if above else name
        place = f"{file}, line {line}"
        if isinstance(value, Tree):
            if value.is_open and value.call:
                arguments.append(
                    Argument(dotted, Unknown(value.call, "it is made by code of another file"), place)
                )
            if depth < 20:
                if value.call and not value.entries and not value.is_open:
                    arguments.append(Argument(dotted, value.call, place))
                arguments += arguments_of_tree(value, file, dotted, depth + 1)
        elif isinstance(value, dict) and value and all(isinstance(key, str) for key in value):
            inner = Tree(entries={key: (item, line) for key, item in value.items()})
            arguments += arguments_of_tree(inner, file, dotted, depth + 1) if depth < 20 else []
        else:
            arguments.append(Argument(dotted, _value(value), place))
    return arguments


def _value(value: Any) -> Any:
    if isinstance(value, list | tuple):
        items = [_value(item) for item in value]
        return plain(items)
    if isinstance(value, Tree):
        return Unknown(value.call, "it is an object inside a list")
    return plain(value)
