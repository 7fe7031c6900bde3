"""The parts of a word of the shell, and what expands them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from moesim.simulator.trainers.reading.shell_scope import Scope
from moesim.simulator.trainers.reading.unknowns import Unknowns


@dataclass(frozen=True, slots=True)
class WordPart:
    """A part of a word: `quoted` text is never split, `expanded` text is where it is not quoted.

    `between` marks the place between two elements of an array, which are separate fields.
    """

    text: str
    quoted: bool = False
    expanded: bool = False
    between: bool = False


BETWEEN = WordPart("", between=True)


class WordExpander(Protocol):
    """Expands words in a scope; `shell_expansion.Expander` does it."""

    scope: Scope
    unknowns: Unknowns
    notes: dict[str, None]

    def text(self, raw: str) -> str:
        """The text of a raw word that is not split."""

    def within(self, body: str) -> str:
        """The text of a here-document or an arithmetic expression."""

    def pattern(self, raw: str) -> list[tuple[str, bool]]:
        """The pieces of a pattern, each with whether it was quoted."""

    def pieces(self, raw: str) -> list[WordPart]:
        """The parts of a raw word, expanded but not split."""

    def quoted(self, body: str, *, document: bool = False) -> list[WordPart]:
        """The parts of text between double quotes."""

    def integer(self, expression: str) -> int:
        """The value of an arithmetic expression; raises UnknownNumber where it has none."""

    def count(self, work: int) -> None:
        """Count the work of a pattern; raises InputError beyond the limit."""

    def separator(self) -> str:
        """The characters that split unquoted text."""
