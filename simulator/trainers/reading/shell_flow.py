"""Follows the control flow of a shell script: lists, pipelines, if, case and here-documents."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from moesim.hwmodels.errors import InputError
from moesim.simulator.trainers.reading import shell_loops
from moesim.simulator.trainers.reading import shell_patterns as patterns
from moesim.simulator.trainers.reading.shell_loops import described
from moesim.simulator.trainers.reading.shell_words import scan
from moesim.simulator.trainers.reading.unknowns import is_known

if TYPE_CHECKING:
    from tree_sitter import Node

    from moesim.simulator.trainers.reading.shell_follower import ShellFollower


def _body(shell: ShellFollower, node: Node) -> None:
    shell.block(node.children)


def _list(shell: ShellFollower, node: Node) -> None:
    """`a && b` and `a || b`."""
    left, operator, right = node.children[0], node.children[1].type, node.children[-1]
    shell.assumed = []
    shell.statement(left)
    status, assumed = shell.scope.status, shell.assumed
    if shell.scope.stopped:
        return
    if status is None and shell.presumed:
        status = True
    if status is None:
        condition = described(shell, [left])
        first = lambda: shell.statement(right)  # noqa: E731
        if operator == "&&":
            shell.either(condition, first, lambda: None)
        else:
            shell.either(condition, lambda: None, first)
    elif status == (operator == "&&"):
        _assumed(shell, [left], assumed, status, lambda: shell.statement(right), lambda: None)


def _assumed(
    shell: ShellFollower,
    condition: Sequence[Node],
    assumed: list[str],
    status: bool,
    chosen: Callable[[], None],
    other: Callable[[], None],
) -> None:
    """Follow the branch that a condition chose; one that ends the script is left if it was only assumed."""
    if not assumed:
        chosen()
        return
    before = shell.scope
    shell.use(before.copy())
    commands = len(shell.reading.commands)
    chosen()
    since = ", ".join(dict.fromkeys(assumed))
    label = f"{described(shell, condition)} is taken as {str(status).lower()}, since {since}"
    if (
        shell.scope.stopped
        and len(shell.reading.commands) == commands
        and shell.scope.stopped in ("exit", "return")
    ):
        shell.use(before)
        label = f"{described(shell, condition)} would end the script, since {since}; it is taken as given"
        other()
    shell.notes[label] = None


def _pipeline(shell: ShellFollower, node: Node) -> None:
    stages = [child for child in node.children if child.is_named and child.type != "comment"]
    before = shell.stdin
    for n, stage in enumerate(stages):

        def follow(stage: Node = stage) -> None:
            shell.subshell(lambda: shell.statement(stage))

        if n == len(stages) - 1:
            follow()
        else:
            shell.stdin = shell.captured(follow)
            if not is_known(shell.stdin):
                shell.stdin = None
    shell.stdin = before
    shell.scope.status = None if len(stages) > 1 and shell.scope.status is None else shell.scope.status


def _negated(shell: ShellFollower, node: Node) -> None:
    shell.block(node.children)
    status = shell.scope.status
    shell.scope.status = None if status is None else not status


def _if(shell: ShellFollower, node: Node) -> None:
    clauses: list[tuple[list[Node], list[Node]]] = []
    parts = [node, *(child for child in node.children if child.type in ("elif_clause", "else_clause"))]
    for part in parts:
        conditions: list[Node] = []
        body: list[Node] = []
        into = body if part.type == "else_clause" else conditions
        for child in part.children:
            if child.type == "then":
                into = body
            elif child.is_named and child.type not in ("comment", "elif_clause", "else_clause"):
                into.append(child)
        clauses.append((conditions, body))
    shell.scope.status = True
    _clauses(shell, clauses, 0)


def _clauses(shell: ShellFollower, clauses: list[tuple[list[Node], list[Node]]], at: int) -> None:
    if at == len(clauses):
        return
    conditions, body = clauses[at]

    def this() -> None:
        shell.scope.status = True
        shell.block(body)

    def others() -> None:
        shell.scope.status = True
        _clauses(shell, clauses, at + 1)

    if not conditions:
        this()
        return
    status, assumed = shell.status_of(conditions)
    if status is None:
        shell.either(described(shell, conditions), this, others)
    elif status:
        _assumed(shell, conditions, assumed, True, this, others)
    else:
        _assumed(shell, conditions, assumed, False, others, this)


def _case(shell: ShellFollower, node: Node) -> None:
    subject = node.child_by_field_name("value")
    assert subject is not None
    value = shell.expander.text(shell.source.text(subject))
    _items(shell, node, value, [child for child in node.children if child.type == "case_item"], 0)


def _items(shell: ShellFollower, node: Node, value: str, items: list[Node], at: int) -> None:
    if at == len(items):
        return
    item = items[at]
    closing = next(n for n, child in enumerate(item.children) if child.type == ")")
    texts = [shell.source.text(child) for child in item.children[:closing] if child.type not in ("|", "(")]
    body = [child for child in item.children[closing + 1 :] if child.is_named]
    through = [child for child in item.children if child.type in (";&", ";;&")]
    if through:
        raise InputError(f"{shell.source.place(item)}: ;& in a case is not read; write the branch out")
    result: bool | None = False
    for text in texts:
        pieces = shell.expander.pattern(text)
        everything = text == "*"
        if everything or (
            is_known(value, *(part for part, _ in pieces))
            and patterns.matches(patterns.pattern_of(pieces), value, shell.expander.count)
        ):
            result = True
            break
        if not is_known(value, *(part for part, _ in pieces)):
            result = None
    if result is None:
        shown = shell.source.text(node).splitlines()[0][:60]
        condition = f"the branch {' | '.join(texts)[:60]!r} of {shown!r} ({shell.source.place(item)})"
        shell.either(condition, lambda: shell.block(body), lambda: _items(shell, node, value, items, at + 1))
    elif result:
        shell.scope.status = True
        shell.block(body)
    else:
        _items(shell, node, value, items, at + 1)


def _function(shell: ShellFollower, node: Node) -> None:
    name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
    assert name is not None and body is not None
    shell.scope.functions[shell.source.text(name)] = (shell.source, body)


def _subshell(shell: ShellFollower, node: Node) -> None:
    text = shell.source.text(node)
    if text.startswith("((") and text.endswith(
        "))"
    ):  # after `!`, the tree takes arithmetic for two subshells
        shell.scope.status = shell.tested(text)
        return
    shell.subshell(lambda: shell.block(node.children))


def _redirected(shell: ShellFollower, node: Node) -> None:
    body = node.child_by_field_name("body")
    redirects: list[tuple[str, str]] = []
    document: str | None = None
    tails: list[Node] = []
    for child in node.children:
        if child.type == "heredoc_redirect":
            document = _document(shell, child)
            for part in child.children:
                if part.type == "file_redirect":
                    redirects += _redirects(shell, part)
                elif part.is_named and part.type not in ("heredoc_start", "heredoc_body", "heredoc_end"):
                    tails.append(part)
        elif child.type in ("file_redirect", "herestring_redirect"):
            redirects += _redirects(shell, child)
    before = shell.stdin

    def action() -> None:
        if document is not None:
            shell.stdin = document
        if body is not None:
            shell.statement(body)

    shell.redirected(redirects, action)
    shell.stdin = before
    for tail in tails:
        if tail.type in ("command", "pipeline", "list", "redirected_statement"):
            shell.notes[f"{shell.place}: what follows the here-document on its line is not followed"] = None


def _redirects(shell: ShellFollower, node: Node) -> tuple[tuple[str, str], ...]:
    scanned = scan(shell.source.text(node))
    if scanned.words or scanned.rest:
        raise InputError(
            f"{shell.source.place(node)}: words follow a redirection ({' '.join(scanned.words)[:60]}); "
            "put them before it"
        )
    return scanned.redirects


def _document(shell: ShellFollower, node: Node) -> str:
    """The text of a here-document, expanded unless its delimiter is quoted."""
    start = next(child for child in node.children if child.type == "heredoc_start")
    end = next((child for child in node.children if child.type == "heredoc_end"), None)
    data = shell.source.data
    first = data.find(b"\n", start.end_byte) + 1
    last = data.rfind(b"\n", 0, end.start_byte) + 1 if end is not None else node.end_byte
    text = data[first:last].decode(errors="replace") if first and last > first else ""
    if node.children[0].type == "<<-":
        text = re.sub(r"^\t+", "", text, flags=re.MULTILINE)
    delimiter = shell.source.text(start)
    return text if re.search(r"[\"'\\]", delimiter) else shell.expander.within(text)


HANDLERS: dict[str, Callable[[ShellFollower, Node], None]] = {
    "program": _body, "list": _list, "pipeline": _pipeline, "negated_command": _negated, "if_statement": _if,
    "case_statement": _case, "for_statement": shell_loops.for_loop,
    "c_style_for_statement": shell_loops.c_loop, "while_statement": shell_loops.while_loop,
    "function_definition": _function, "compound_statement": _body, "do_group": _body, "subshell": _subshell,
    "redirected_statement": _redirected,
}  # fmt: skip
