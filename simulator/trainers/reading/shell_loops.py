"""Follows the loops of a shell script, in bounds; what a loop of unknown length changes becomes unknown."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from moesim.hwmodels.errors import InputError
from moesim.simulator.trainers.launch import Unknown
from moesim.simulator.trainers.reading.shell_branches import changed_variables
from moesim.simulator.trainers.reading.shell_words import scan

if TYPE_CHECKING:
    from tree_sitter import Node

    from moesim.simulator.trainers.reading.shell_follower import ShellFollower
_MOST_SHOWN = 100
_MOST_TURNS = 200
"""Most turns of a `while` loop; one that runs longer waits for something that no text decides."""


def shown(shell: ShellFollower, nodes: Sequence[Node]) -> str:
    """The source text of statements on one line, cut at a limit."""
    text = " ".join(" ".join(shell.source.text(node) for node in nodes).split()).rstrip("; ")
    return text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 3] + "..."


def described(shell: ShellFollower, nodes: Sequence[Node]) -> str:
    """A condition and its place, for notes and reasons."""
    return f"the condition {shown(shell, nodes)} ({shell.source.place(nodes[0])})"


def for_loop(shell: ShellFollower, node: Node) -> None:
    """Follow `for NAME in WORDS`."""
    variable = node.child_by_field_name("variable")
    assert variable is not None
    name = shell.source.text(variable)
    nodes = node.children_by_field_name("value")
    body = node.child_by_field_name("body")
    assert body is not None
    if nodes:
        text = shell.source.data[nodes[0].start_byte : nodes[-1].end_byte].decode(errors="replace")
        words = [field for raw in scan(text).words for field in shell.expander.fields(raw)]
    elif any(child.type == "in" for child in node.children):
        words = []
    else:
        words = list(shell.scope.parameters)
    if any(shell.unknowns.entry(word) is not None for word in words) and len(words) == 1:
        shell.notes[
            f"{shell.place}: the loop runs over {shell.unknowns.shown(words[0])[:60]}, which is not known"
        ] = None
        _uncertain(shell, f"the loop over {name} ({shell.place})", lambda: _turn(shell, name, words[0], body))
        return
    for word in words:
        _turn(shell, name, word, body)
        if _left(shell):
            break


def _turn(shell: ShellFollower, name: str, word: str, body: Node) -> None:
    shell.scope.set(name, word)
    shell.budget.step(shell.place)
    shell.statement(body)


def _left(shell: ShellFollower) -> bool:
    """Whether the statements in a loop's turn left the loop."""
    if shell.scope.stopped == "continue":
        shell.scope.stopped = ""
    if shell.scope.stopped == "break":
        shell.scope.stopped = ""
        return True
    return bool(shell.scope.stopped)


def _uncertain(shell: ShellFollower, label: str, turn: Callable[[], None]) -> None:
    """Follow a turn that may run any number of times: what it changes is not known afterwards."""
    before = shell.scope
    shell.use(before.copy())
    shell.conditions.append(label)
    turn()
    shell.conditions.pop()
    after = shell.scope
    after.stopped = ""
    for name in changed_variables(before, after):
        text = after.text(name)
        shown = shell.unknowns.shown(text)[:80] if text else name
        after.set(name, shell.unknowns.mark(Unknown(f"${name} ({shown})", f"it is set in {label}")))
    after.parameters = before.parameters
    after.status = None


def c_loop(shell: ShellFollower, node: Node) -> None:
    """Follow `for ((a; b; c))`."""
    text = shell.source.text(node)
    match = re.match(r"for\s*\(\((.*?)\)\)\s*;?\s*(?:do\b|\{)", text, re.DOTALL)
    parts = match[1].split(";") if match else []
    body = node.child_by_field_name("body")
    if len(parts) != 3 or body is None:
        raise InputError(f"{shell.place}: this loop is not read; write `for ((a; b; c)); do`")
    shell.tested(f"(({parts[0]}))")
    while True:
        goes_on = True if not parts[1].strip() else shell.tested(f"(({parts[1]}))")
        if goes_on is None:
            _uncertain(shell, f"the loop at {shell.place}", lambda: shell.statement(body))
            return
        if not goes_on:
            return
        shell.budget.step(shell.place)
        shell.statement(body)
        if _left(shell):
            return
        shell.tested(f"(({parts[2]}))")


def while_loop(shell: ShellFollower, node: Node) -> None:
    """Follow `while` and `until`."""
    until = node.children[0].type == "until"
    body = next(child for child in node.children if child.type == "do_group")
    conditions = [child for child in node.children if child.is_named and child is not body and child != body]
    turns = 0
    while True:
        shell.budget.step(shell.place)
        turns += 1
        status, assumed = shell.status_of(conditions)
        if status is None or turns > _MOST_TURNS:
            label = f"the loop while {shown(shell, conditions)} ({shell.source.place(node)})"
            shell.notes[f"{label} is not followed, since its end is not known"] = None
            _uncertain(shell, label, lambda: shell.statement(body))
            return
        if assumed:
            shell.notes[
                f"{described(shell, conditions)} is taken as {str(status).lower()}, "
                f"since {', '.join(assumed)}"
            ] = None
        if status == until:
            shell.scope.status = True
            return
        shell.statement(body)
        if _left(shell):
            return
