"""Computes the expressions of a Python recipe from its syntax tree; nothing of the file is executed."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from moesim.simulator.trainers.launch import Unknown
from moesim.simulator.trainers.reading.limits import MOST_LINE
from moesim.simulator.trainers.reading.python_values import Tree, measured, shown, unknown

if TYPE_CHECKING:
    from moesim.simulator.trainers.reading.python_follower import RecipeFollower

_MOST_NUMBER = 10**18
_MOST_ITEMS = 5_000
_MAKING = (ast.List, ast.Tuple, ast.Set, ast.Dict, ast.BinOp, ast.JoinedStr, ast.Call)
"""Expressions that make a new value, whose size is limited."""
OTHER_FILE = "it is a name of another file"
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Is: lambda a, b: a is b or a == b,
    ast.IsNot: lambda a, b: not (a is b or a == b),
    ast.In: lambda a, b: a in b, ast.NotIn: lambda a, b: a not in b,
}  # fmt: skip


def evaluate(recipe: RecipeFollower, node: ast.expr) -> Any:
    """The value of an expression: plain data, a Tree, or an Unknown with its source text."""
    recipe.step(node)
    handler = _HANDLERS.get(type(node))
    if handler is None:
        return unknown(node, "this kind of expression is not computed")
    recipe.depth += 1
    recipe.budget.depth(recipe.depth, recipe.place(node))
    value = handler(recipe, node)
    recipe.depth -= 1
    if isinstance(node, _MAKING):
        measured(recipe.budget, recipe.place(node), value)
    return value


def is_plain(recipe: RecipeFollower, node: ast.expr, *values: Any) -> bool:
    """Whether no value is, or holds, an unknown value or an object; raises InputError as `measured`."""
    return measured(recipe.budget, recipe.place(node), *values)


def _name(recipe: RecipeFollower, node: ast.Name) -> Any:
    if node.id in recipe.locals:
        return recipe.locals[node.id]
    if node.id in recipe.globals:
        return recipe.globals[node.id]
    return unknown(node, OTHER_FILE)


def _attribute(recipe: RecipeFollower, node: ast.Attribute) -> Any:
    base = evaluate(recipe, node.value)
    if isinstance(base, Tree):
        if node.attr in base.entries:
            return base.entries[node.attr][0]
        return unknown(node, "the file does not set it")
    return unknown(
        node, base.reason if isinstance(base, Unknown) and base.reason == OTHER_FILE else "it is not computed"
    )


def _list(recipe: RecipeFollower, node: ast.List | ast.Tuple | ast.Set) -> Any:
    items: list[Any] = []
    for element in node.elts:
        if isinstance(element, ast.Starred):
            value = evaluate(recipe, element.value)
            if not isinstance(value, list | tuple):
                return unknown(node, "one of its parts is not known")
            items += value
        else:
            items.append(evaluate(recipe, element))
    return items if isinstance(node, ast.List) else tuple(items)


def _dict(recipe: RecipeFollower, node: ast.Dict) -> Any:
    pairs: dict[Any, Any] = {}
    for key_node, value_node in zip(node.keys, node.values, strict=True):
        value = evaluate(recipe, value_node)
        if key_node is None:
            if not isinstance(value, dict):
                return unknown(node, "one of its parts is not known")
            pairs |= value
            continue
        key = evaluate(recipe, key_node)
        if not isinstance(key, str | int | bool | float | None):
            key = shown(key_node)
        pairs[key] = value
    return pairs


def _unary(recipe: RecipeFollower, node: ast.UnaryOp) -> Any:
    value = evaluate(recipe, node.operand)
    if isinstance(node.op, ast.Not):
        truth = true_or_false(value)
        return unknown(node, _reason(value)) if truth is None else not truth
    if isinstance(value, int | float) and not isinstance(node.op, ast.Invert):
        return -value if isinstance(node.op, ast.USub) else +value
    return unknown(node, _reason(value))


def _reason(*values: Any) -> str:
    return next((value.reason for value in values if isinstance(value, Unknown)), "it is not computed")


def _binary(recipe: RecipeFollower, node: ast.BinOp) -> Any:
    left, right = evaluate(recipe, node.left), evaluate(recipe, node.right)
    function = _BINARY.get(type(node.op))
    if not is_plain(recipe, node, left, right):
        return unknown(node, _reason(left, right))
    numbers = all(isinstance(value, int | float) and abs(value) < _MOST_NUMBER for value in (left, right))
    if isinstance(node.op, ast.Pow) and numbers and 0 <= right <= 60 and abs(left) <= 1_000_000:
        result = left**right if abs(left) <= 2 or right <= 6 else None
        return unknown(node, "the number is too large") if result is None else result
    sizes = [len(value) if isinstance(value, str | list | tuple) else value for value in (left, right)]
    if function is None or not (
        numbers
        or (
            isinstance(node.op, ast.Add)
            and type(left) is type(right)
            and isinstance(left, str | list | tuple)
        )
        or (
            isinstance(node.op, ast.Mult)
            and isinstance(right if isinstance(left, str | list) else left, int)
            and isinstance(left if isinstance(left, str | list) else right, str | list)
        )
    ):
        return unknown(node, "it is not computed")
    if (
        not numbers
        and (sizes[0] * max(sizes[1], 1) if isinstance(node.op, ast.Mult) else sum(sizes)) > _MOST_ITEMS
    ):
        return unknown(node, f"it has more than {_MOST_ITEMS} parts")
    try:
        return function(left, right)
    except (ArithmeticError, TypeError, ValueError) as error:
        return unknown(node, str(error)[:100])


def _compare(recipe: RecipeFollower, node: ast.Compare) -> Any:
    left = evaluate(recipe, node.left)
    for op, right_node in zip(node.ops, node.comparators, strict=True):
        right = evaluate(recipe, right_node)
        if isinstance(op, ast.Is | ast.IsNot) and right is None and isinstance(left, Tree):
            return isinstance(op, ast.IsNot)
        if not is_plain(recipe, node, left, right):
            return unknown(node, _reason(left, right))
        try:
            if not _COMPARE[type(op)](left, right):
                return False
        except TypeError:
            return unknown(node, "it is not computed")
        left = right
    return True


def _boolean(recipe: RecipeFollower, node: ast.BoolOp) -> Any:
    value: Any = None
    for part in node.values:
        value = evaluate(recipe, part)
        truth = true_or_false(value)
        if truth is None:
            return unknown(node, _reason(value))
        if truth == isinstance(node.op, ast.Or):
            return value
    return value


def _if(recipe: RecipeFollower, node: ast.IfExp) -> Any:
    truth = true_or_false(evaluate(recipe, node.test))
    if truth is None:
        return unknown(node, f"depends on the condition {shown(node.test)}")
    return evaluate(recipe, node.body if truth else node.orelse)


def true_or_false(value: Any) -> bool | None:
    """Whether a value counts as true, or None where that is not known."""
    if isinstance(value, Unknown):
        return None
    return True if isinstance(value, Tree) else bool(value)


def _joined(recipe: RecipeFollower, node: ast.JoinedStr) -> Any:
    text = ""
    for part in node.values:
        if isinstance(part, ast.Constant):
            text += str(part.value)
            continue
        if not isinstance(part, ast.FormattedValue):
            return unknown(node, "it is not computed")
        value = evaluate(recipe, part.value)
        if not is_plain(recipe, node, value) or part.format_spec is not None or part.conversion != -1:
            return unknown(node, _reason(value))
        text += str(value)
        if len(text) > MOST_LINE:
            return unknown(node, f"it has more than {MOST_LINE} characters")
    return text


def _subscript(recipe: RecipeFollower, node: ast.Subscript) -> Any:
    base = evaluate(recipe, node.value)
    key = evaluate(recipe, node.slice)
    if isinstance(base, dict | list | tuple) and is_plain(recipe, node, key):
        try:
            return base[key]
        except (KeyError, IndexError, TypeError):
            return unknown(node, "the file does not set it")
    return unknown(node, _reason(base, key))


def _constant(recipe: RecipeFollower, node: ast.Constant) -> Any:
    value = node.value
    return (
        value if isinstance(value, str | int | float | bool | None) else unknown(node, "it is not computed")
    )


def _call(recipe: RecipeFollower, node: ast.Call) -> Any:
    return recipe.call(node)


_HANDLERS: dict[type[ast.expr], Callable[[RecipeFollower, Any], Any]] = {
    ast.Name: _name, ast.Attribute: _attribute, ast.List: _list, ast.Tuple: _list, ast.Set: _list,
    ast.Dict: _dict,
    ast.UnaryOp: _unary, ast.BinOp: _binary, ast.Compare: _compare, ast.BoolOp: _boolean, ast.IfExp: _if,
    ast.JoinedStr: _joined, ast.Subscript: _subscript, ast.Constant: _constant, ast.Call: _call,
}  # fmt: skip
