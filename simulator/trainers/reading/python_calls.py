"""The values of calls in a Python recipe: of its own functions, of classes with keywords, and of builtins."""

from __future__ import annotations

import ast
import copy
from typing import Any

from moesim.simulator.trainers.reading.python_expressions import evaluate, is_plain
from moesim.simulator.trainers.reading.python_follower import RecipeFollower
from moesim.simulator.trainers.reading.python_values import Tree, measured, shown, unknown

_WRAPPERS = ("Config", "Partial")


def value_of_call(recipe: RecipeFollower, node: ast.Call) -> Any:
    """The value of a call: of a function of the file, of a class with keywords, or an unknown one."""
    name = node.func.id if isinstance(node.func, ast.Name) else ""
    if name in recipe.functions and name not in recipe.locals:
        positional = [
            evaluate(recipe, argument) for argument in node.args if not isinstance(argument, ast.Starred)
        ]
        return recipe.function(recipe.functions[name], positional, _keywords(recipe, node), node)
    if isinstance(node.func, ast.Attribute):
        handled, value = _method(recipe, node, node.func)
        if handled:
            return value
    known = _builtin(recipe, name, node)
    if known is not None:
        return known[0]
    keywords = _keywords(recipe, node)
    last = node.func.attr if isinstance(node.func, ast.Attribute) else name
    values = [evaluate(recipe, argument) for argument in node.args if not isinstance(argument, ast.Starred)]
    if any(isinstance(value, Tree) for value in [*values, *keywords.values()]) and not last[:1].isupper():
        recipe.notes[
            f"{recipe.place(node)}: {shown(node)[:100]} is in another file and may change values; not read"
        ] = None
    if not last[:1].isupper():
        return Tree(shown(node), is_open=True)
    entries = {key: (value, _line(node, key)) for key, value in keywords.items()}
    label = shown(node.args[0]) if last in _WRAPPERS and node.args else shown(node.func)
    return Tree(label, entries=entries)


def _keywords(recipe: RecipeFollower, node: ast.Call) -> dict[str, Any]:
    keywords: dict[str, Any] = {}
    for keyword in node.keywords:
        value = evaluate(recipe, keyword.value)
        if keyword.arg is not None:
            keywords[keyword.arg] = value
        elif isinstance(value, dict):
            keywords |= {str(key): item for key, item in value.items()}
        else:
            recipe.notes[f"{recipe.place(node)}: **{shown(keyword.value)} is not known and was left out"] = (
                None
            )
    return keywords


def _method(recipe: RecipeFollower, node: ast.Call, function: ast.Attribute) -> tuple[bool, Any]:
    """Calls of the methods of known lists and mappings."""
    base = evaluate(recipe, function.value)
    arguments = [
        evaluate(recipe, argument) for argument in node.args if not isinstance(argument, ast.Starred)
    ]
    if isinstance(base, list) and function.attr in ("append", "extend") and len(arguments) == 1:
        added = [arguments[0]] if function.attr == "append" else arguments[0]
        if isinstance(added, list | tuple):
            measured(recipe.budget, recipe.place(node), added, but=None if added is base else base)
            base += added
            return True, None
    if isinstance(base, dict) and function.attr in ("get", "pop") and arguments and _is_key(arguments[0]):
        return True, base.get(arguments[0], arguments[1] if len(arguments) > 1 else None)
    if (
        isinstance(base, dict)
        and function.attr == "update"
        and len(arguments) == 1
        and isinstance(arguments[0], dict)
    ):
        measured(recipe.budget, recipe.place(node), *arguments[0].values(), but=base)
        base |= arguments[0]
        return True, None
    if isinstance(base, str) and function.attr in ("lower", "upper", "strip") and not arguments:
        return True, getattr(base, function.attr)()
    if isinstance(base, Tree) and not function.attr[:1].isupper():
        recipe.notes[f"{recipe.place(node)}: {shown(node)[:100]} may change values; it is not followed"] = (
            None
        )
        return True, unknown(node, "the result of a method, which is not followed")
    return False, None


def _builtin(recipe: RecipeFollower, name: str, node: ast.Call) -> tuple[Any] | None:
    """The value of some functions of Python itself, as a tuple of one."""
    if name not in (
        "dict",
        "list",
        "tuple",
        "int",
        "float",
        "str",
        "bool",
        "min",
        "max",
        "len",
        "deepcopy",
    ):
        return None
    if name == "dict" and not node.args:
        return (_keywords(recipe, node),)
    values = [evaluate(recipe, argument) for argument in node.args if not isinstance(argument, ast.Starred)]
    if node.keywords or not values or not is_plain(recipe, node, *values):
        return (unknown(node, "one of its values is not known"),)
    functions: dict[str, Any] = {
        "list": list, "tuple": tuple, "int": int, "float": float, "str": str, "bool": bool, "min": min,
        "max": max,
        "len": len, "dict": dict, "deepcopy": copy.deepcopy,
    }  # fmt: skip
    if name in ("int", "float") and isinstance(values[0], str) and len(values[0]) > 30:
        return (unknown(node, "the number is too long"),)
    try:
        return (functions[name](*values),)
    except (TypeError, ValueError, OverflowError) as error:
        return (unknown(node, str(error)[:100]),)


def _is_key(value: Any) -> bool:
    """Whether a value can be a key of a mapping."""
    return isinstance(value, str | int | float | bool | None)


def _line(node: ast.Call, key: str) -> int:
    return next((keyword.value.lineno for keyword in node.keywords if keyword.arg == key), node.lineno)
