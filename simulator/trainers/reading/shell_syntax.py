"""Parses shell text into a syntax tree; tree-sitter finds the statements, and nothing is run."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moesim.hwmodels.errors import InputError
from moesim.simulator.trainers.launch import Unknown
from moesim.simulator.trainers.reading.unknowns import PRIVATE, Unknowns

if TYPE_CHECKING:
    from tree_sitter import Node

_PLACEHOLDER = re.compile(r"(?<![<\w&])<[A-Za-z][^<>\n|;&${}\"'`]{0,200}(?<![\s])>(?![>&(])")
_TRAILING = re.compile(r"(?<!\\)\\(?:\n[ \t\n]*\Z|\Z|(?=\n[ \t]*\n))")


@dataclass(frozen=True, slots=True)
class ShellSource:
    """A shell text and where it stands: `file` is its name, `line` the line of its first character.

    All of a `derived` text, which the script made (`bash -c "$TEXT"`), counts as the line that made it.
    """

    data: bytes
    file: str
    line: int
    derived: bool = False

    def text(self, node: Node) -> str:
        """The text of a node."""
        return self.data[node.start_byte : node.end_byte].decode(errors="replace")

    def place(self, node: Node) -> str:
        """File and line of a node."""
        return f"{self.file}, line {self.lines(node)[0]}"

    def lines(self, node: Node) -> tuple[int, int]:
        """The first and last line of a node."""
        if self.derived:
            return self.line, self.line
        return self.line + node.start_point[0], self.line + node.end_point[0]


def parse(
    text: str, file: str, unknowns: Unknowns, line: int = 1, *, derived: bool = False
) -> tuple[ShellSource, Node]:
    """The source and the root node of a shell text.

    Texts such as `<path of the data>`, which a user fills in, become unknown values. Raises InputError,
    naming the line, for text that the grammar of bash does not allow.
    """

    def hide(match: re.Match[str]) -> str:
        return unknowns.mark(Unknown(match[0], "a placeholder that the user fills in"))

    text = _PLACEHOLDER.sub(hide, text.replace("\r\n", "\n"))
    text = _TRAILING.sub(lambda match: match[0].replace("\\", " "), text)
    data = text.encode()
    tree = _parser().parse(data)
    source = ShellSource(data, file, line, derived)
    if tree.root_node.has_error:
        raise _refused(source, tree.root_node)
    return source, tree.root_node


def check_text(text: str, file: str) -> str:
    """The text, which must not hold the private characters that mark unknown values."""
    match = PRIVATE.search(text)
    if match:
        line = text.count("\n", 0, match.start()) + 1
        raise InputError(f"{file}, line {line}: holds the private character {match[0]!a}; delete it")
    return text


def _refused(source: ShellSource, root: Node) -> InputError:
    node = root
    while True:
        inner = [child for child in node.children if child.has_error or child.is_missing]
        if not inner or (node.is_error and not any(c.is_error or c.is_missing for c in inner)):
            break
        node = inner[0]
    near = source.text(node).strip().splitlines()
    shown = f" near {near[0][:60]!r}" if near else ""
    return InputError(
        f"{source.place(node)}: the shell text cannot be parsed{shown}; close its quotes and brackets, or "
        "keep only the part that starts the training"
    )


@functools.cache
def _parser() -> Any:
    import tree_sitter_bash
    from tree_sitter import Language, Parser

    return Parser(Language(tree_sitter_bash.language()))
