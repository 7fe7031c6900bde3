"""What expressions and calls of a Python recipe need of the one who follows its statements."""

from __future__ import annotations

import ast
from typing import Any, Protocol

from moesim.simulator.trainers.reading.limits import Budget


class RecipeFollower(Protocol):
    """Follows the statements of a recipe; `python_statements.Recipe` does it."""

    budget: Budget
    notes: dict[str, None]
    functions: dict[str, ast.FunctionDef]
    globals: dict[str, Any]
    locals: dict[str, Any]
    depth: int

    def place(self, node: ast.AST) -> str:
        """File and line of a node."""

    def step(self, node: ast.AST) -> None:
        """Count one step of the reading."""

    def call(self, node: ast.Call) -> Any:
        """The value of a call."""

    def function(
        self, node: ast.FunctionDef, positional: list[Any], keywords: dict[str, Any], call: ast.AST
    ) -> Any:
        """The value that a function of the file returns."""
