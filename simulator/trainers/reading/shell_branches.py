"""Merges the states of two branches of a condition that is not decided."""

from __future__ import annotations

from moesim.simulator.trainers.launch import Unknown
from moesim.simulator.trainers.reading.shell_scope import Scope, ShellVariable, Value
from moesim.simulator.trainers.reading.unknowns import Unknowns, merged_text, merged_words


def merged_scope(ours: Scope, theirs: Scope, condition: str, unknowns: Unknowns) -> Scope:
    """The state after a condition: what both branches agree on, and choices between the rest.

    A branch that ends the script, the function or the turn of the loop has no part in what follows.
    """
    if ours.stopped and not theirs.stopped:
        return theirs
    if theirs.stopped and not ours.stopped:
        return ours
    scope = ours.copy()
    scope.functions = {**theirs.functions, **ours.functions}
    scope.files = {**theirs.files, **ours.files}
    if ours.status != theirs.status:
        scope.status = None
    for name in {**ours.variables, **theirs.variables}:
        scope.variables[name] = _merged(name, ours, theirs, condition, unknowns)
    if ours.parameters != theirs.parameters:
        scope.parameters = merged_words(ours.parameters, theirs.parameters, condition, unknowns)
    return scope


def _merged(name: str, ours: Scope, theirs: Scope, condition: str, unknowns: Unknowns) -> ShellVariable:
    a, b = ours.variables.get(name), theirs.variables.get(name)
    if a is not None and b is not None and a.value == b.value:
        return ShellVariable(a.value, a.exported or b.exported)
    exported = any(variable is not None and variable.exported for variable in (a, b))
    values: list[Value] = [None if variable is None else variable.value for variable in (a, b)]
    first, second = values
    value: Value
    if isinstance(first, dict) and isinstance(second, dict):
        value = {
            key: merged_text(first.get(key, ""), second.get(key, ""), condition, unknowns)
            for key in {**first, **second}
        }
    elif isinstance(first, dict) or isinstance(second, dict):
        value = unknowns.mark(Unknown(f"${name}", f"depends on {condition}"))
    elif isinstance(first, tuple) or isinstance(second, tuple):
        value = merged_words(_words(first), _words(second), condition, unknowns)
    else:
        value = merged_text(first or "", second or "", condition, unknowns)
    return ShellVariable(value, exported)


def _words(value: Value) -> tuple[str, ...]:
    if isinstance(value, tuple):
        return value
    return (value,) if isinstance(value, str) and value else ()


def changed_variables(before: Scope, after: Scope) -> list[str]:
    """The names of the variables whose values differ between two states."""
    names = {**before.variables, **after.variables}
    return [name for name in names if before.variables.get(name) != after.variables.get(name)]
