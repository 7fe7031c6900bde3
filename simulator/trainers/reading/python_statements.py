"""Follows the statements of a Python recipe on its syntax tree; nothing of the file is executed."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from moesim.hwmodels.errors import InputError
from moesim.simulator.trainers.launch import Unknown
from moesim.simulator.trainers.reading.limits import Budget
from moesim.simulator.trainers.reading.python_calls import value_of_call
from moesim.simulator.trainers.reading.python_expressions import evaluate, true_or_false
from moesim.simulator.trainers.reading.python_values import Tree, measured, shown

MOST_LISTED = 30
"""Most names of recipes in a message."""


class _Return(Exception):  # noqa: N818 - it carries a value, not a mistake
    def __init__(self, value: Any) -> None:
        self.value = value


class Recipe:
    """Follows the statements of one Python file in its own bounds; `notes` says what was not followed."""

    def __init__(self, tree: ast.Module, file: str) -> None:
        """Takes the syntax tree of a file and its name."""
        self.tree, self.file = tree, file
        self.budget = Budget(file)
        self.notes: dict[str, None] = {}
        self.functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        self.globals: dict[str, Any] = {}
        self.locals: dict[str, Any] = {}
        self.depth = 0
        self._uncertain: list[str] = []
        self._outside = 0

    def place(self, node: ast.AST) -> str:
        """File and line of a node."""
        return f"{self.file}, line {getattr(node, 'lineno', 1)}"

    def step(self, node: ast.AST) -> None:
        """Count one step of the reading."""
        self.budget.step(self.place(node))

    def module(self) -> None:
        """Follow the statements of the file that stand outside its functions."""
        self.locals = self.globals
        for node in self.tree.body:
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
                self._statement(node)

    def recipes(self) -> list[str]:
        """The functions that may be recipes, and the variables that hold a configuration."""
        public = [
            name for name, node in self.functions.items() if not name.startswith("_") and _configures(node)
        ]
        variables = [
            name
            for name, value in self.globals.items()
            if isinstance(value, Tree) and value.entries and name[0] != "_"
        ]
        return public + variables

    def chosen(self, recipe: str | None) -> str:
        """The name to read; raises InputError where it is missing or not clear."""
        names = self.recipes()
        if recipe is not None:
            if recipe in self.functions or recipe in self.globals:
                return recipe
            problem = f"there is no function {recipe!r}"
        elif len(names) == 1:
            return names[0]
        else:
            problem = (
                f"there are {len(names)} recipes and none is named"
                if names
                else "no function sets a configuration"
            )
        listed = ", ".join(names[:MOST_LISTED]) + (", ..." if len(names) > MOST_LISTED else "")
        raise InputError(f"{self.file}: {problem}; name one of {listed or 'its functions'}")

    def start(self, name: str, parameters: Mapping[str, str]) -> Any:
        """The value of a recipe, whose parameters have their defaults or the text that is given."""
        if name not in self.functions:
            return self.globals[name]
        given = {key: literal(text) for key, text in parameters.items()}
        return self.function(self.functions[name], [], given, self.functions[name])

    # -- calls ---------------------------------------------------------------------------------------

    def call(self, node: ast.Call) -> Any:
        """The value of a call."""
        return value_of_call(self, node)

    def function(
        self, node: ast.FunctionDef, positional: list[Any], keywords: dict[str, Any], call: ast.AST
    ) -> Any:
        """The value that a function of the file returns, or None."""
        self.depth += 1
        self.budget.depth(self.depth, self.place(call))
        outer, outside = self.locals, self._outside
        self._outside = len(self._uncertain)
        self.locals = self._bound(node, positional, keywords)
        value: Any = None
        try:
            for statement in node.body:
                self._statement(statement)
        except _Return as returned:
            value = returned.value
        self.locals, self._outside = outer, outside
        self.depth -= 1
        return value

    def _bound(
        self, node: ast.FunctionDef, positional: list[Any], keywords: dict[str, Any]
    ) -> dict[str, Any]:
        """The parameters of a function: given ones, defaults, and unknown ones."""
        names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
        defaults: dict[str, ast.expr] = dict(zip(reversed(names), reversed(node.args.defaults), strict=False))
        for argument, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True):
            names.append(argument.arg)
            if default is not None:
                defaults[argument.arg] = default
        bound = {name: evaluate(self, default) for name, default in defaults.items()}
        for name in names:
            bound.setdefault(name, Unknown(name, f"the parameter {name} of {node.name} is not given"))
        bound |= dict(zip(names, positional, strict=False))
        bound |= {name: value for name, value in keywords.items() if name in names}
        if node.args.kwarg is not None:
            bound[node.args.kwarg.arg] = {
                name: value for name, value in keywords.items() if name not in names
            }
        return bound

    # -- statements ----------------------------------------------------------------------------------

    def _statement(self, node: ast.stmt) -> None:
        self.step(node)
        if isinstance(node, ast.Assign):
            value = evaluate(self, node.value)
            for target in node.targets:
                self._assign(target, value, node)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            self._assign(node.target, evaluate(self, node.value), node)
        elif isinstance(node, ast.AugAssign):
            self._assign(node.target, evaluate(self, _combined(node)), node)
        elif isinstance(node, ast.Return):
            value = None if node.value is None else evaluate(self, node.value)
            if len(self._uncertain) > self._outside:
                self.notes[
                    f"{self.place(node)}: this return depends on {self._uncertain[-1]} and is not followed"
                ] = None
                return
            raise _Return(value)
        elif isinstance(node, ast.Expr):
            if isinstance(node.value, ast.Call):
                evaluate(self, node.value)
        elif isinstance(node, ast.If):
            self._if(node)
        elif isinstance(node, ast.For):
            self._for(node)
        elif isinstance(node, ast.With):
            for statement in node.body:
                self._statement(statement)
        elif isinstance(node, ast.FunctionDef):
            self.functions.setdefault(node.name, node)
        elif not isinstance(
            node, ast.Assert | ast.Pass | ast.Import | ast.ImportFrom | ast.Raise | ast.Delete | ast.AnnAssign
        ):
            self.notes[f"{self.place(node)}: a {type(node).__name__.lower()} statement is not followed"] = (
                None
            )

    def _assign(self, target: ast.expr, value: Any, node: ast.stmt) -> None:
        if isinstance(target, ast.Name):
            inside = len(self._uncertain) > self._outside
            self.locals[target.id] = self._maybe(value, self.locals.get(target.id)) if inside else value
        elif isinstance(target, ast.Attribute):
            owner = self._owner(target.value)
            if owner is not None:
                before = owner.entries.get(target.attr, (None, 0))[0]
                owner.entries[target.attr] = (self._maybe(value, before), node.lineno)
        elif isinstance(target, ast.Subscript):
            base, key = evaluate(self, target.value), evaluate(self, target.slice)
            measured(
                self.budget, self.place(node), value, but=base if isinstance(base, dict | list) else None
            )
            if isinstance(base, dict) and isinstance(key, str | int):
                base[key] = self._maybe(value, base.get(key))
            elif isinstance(base, list) and isinstance(key, int) and -len(base) <= key < len(base):
                base[key] = self._maybe(value, base[key])
            else:
                self.notes[f"{self.place(node)}: {shown(target)} is set, but it is not known"] = None
        elif isinstance(target, ast.Tuple | ast.List):
            parts = value if isinstance(value, list | tuple) and len(value) == len(target.elts) else None
            for n, element in enumerate(target.elts):
                part = (
                    parts[n]
                    if parts is not None
                    else Unknown(shown(element), "a part of a value that is not known")
                )
                self._assign(element, part, node)

    def _owner(self, node: ast.expr) -> Tree | None:
        """The object whose attribute is set."""
        if isinstance(node, ast.Name):
            value = self.locals.get(node.id, self.globals.get(node.id))
            if not isinstance(value, Tree):
                value = Tree(value.text if isinstance(value, Unknown) else node.id, is_open=True)
                self.locals[node.id] = value
            return value
        if isinstance(node, ast.Attribute):
            owner = self._owner(node.value)
            return None if owner is None else owner.child(node.attr, node.lineno)
        value = evaluate(self, node)
        return value if isinstance(value, Tree) else None

    def _maybe(self, value: Any, before: Any) -> Any:
        """A value that is set where a condition is not decided."""
        if not self._uncertain:
            return value
        texts = [self.text(v, f"{self.file}, {self._uncertain[-1]}"[:200]) for v in (value, before)]
        return Unknown(
            " or ".join(dict.fromkeys(text[:80] for text in texts)), f"depends on {self._uncertain[-1]}"
        )

    def text(self, value: Any, place: str) -> str:
        """A value as a message shows it."""
        if isinstance(value, Unknown | Tree):
            return value.text if isinstance(value, Unknown) else value.call
        return repr(value) if measured(self.budget, place, value) else f"a {type(value).__name__} of objects"

    def _if(self, node: ast.If) -> None:
        truth = true_or_false(evaluate(self, node.test))
        if truth is not None:
            for statement in node.body if truth else node.orelse:
                self._statement(statement)
            return
        self._uncertain.append(f"the condition {shown(node.test)} ({self.place(node)})")
        for statement in (*node.body, *node.orelse):
            self._statement(statement)
        self._uncertain.pop()

    def _for(self, node: ast.For) -> None:
        items = evaluate(self, node.iter)
        if not isinstance(items, list | tuple) or len(items) > 1_000:
            self.notes[f"{self.place(node)}: the loop over {shown(node.iter)} is not followed"] = None
            return
        for item in items:
            self._assign(node.target, item, node)
            for statement in node.body:
                if isinstance(statement, ast.Break | ast.Continue):
                    break
                self._statement(statement)


def _configures(node: ast.FunctionDef) -> bool:
    """Whether a function may make a configuration: it returns something, and sets or calls something."""
    returns = any(isinstance(inner, ast.Return) and inner.value is not None for inner in ast.walk(node))
    sets = any(
        isinstance(inner, ast.keyword)
        or (isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store))
        for inner in ast.walk(node)
    )
    return returns and sets


@lru_cache(maxsize=1024)
def _combined(node: ast.AugAssign) -> ast.BinOp:
    """The expression that an assignment such as `a += b` evaluates."""
    return ast.copy_location(ast.BinOp(_loaded(node.target), node.op, node.value), node)


def _loaded(target: ast.expr) -> ast.expr:
    """The target of an assignment as an expression that is read."""
    loaded = copy.copy(target)
    if isinstance(loaded, ast.Name | ast.Attribute | ast.Subscript):
        loaded.ctx = ast.Load()
    return loaded


def literal(text: str) -> Any:
    """The value of a parameter as the command line writes it."""
    if text in ("True", "False", "None"):
        return {"True": True, "False": False, "None": None}[text]
    return int(text) if re.fullmatch(r"-?\d{1,18}", text) else text
