"""What the commands and constructs of the shell need of the one who follows the statements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from moesim.simulator.trainers.reading.limits import Budget
from moesim.simulator.trainers.reading.script_record import ScriptRecord
from moesim.simulator.trainers.reading.shell_conditions import ShellConditions
from moesim.simulator.trainers.reading.shell_expansion import Expander
from moesim.simulator.trainers.reading.shell_scope import Scope
from moesim.simulator.trainers.reading.shell_syntax import ShellSource
from moesim.simulator.trainers.reading.unknowns import Unknowns

if TYPE_CHECKING:
    from tree_sitter import Node


class ShellFollower(Protocol):
    """Follows statements in a scope; `shell_statements.Statements` does it."""

    reading: ScriptRecord
    folder: Path | None
    unknowns: Unknowns
    budget: Budget
    notes: dict[str, None]
    scope: Scope
    expander: Expander
    source: ShellSource
    conditions: list[str]
    stdin: str | None
    line: int
    last_line: int
    depth: int
    presumed: bool
    following: list[Path]
    outer_wrappers: list[list[tuple[str, ...]]]
    assumed: list[str]

    @property
    def place(self) -> str:
        """File and line of the statement that is being followed."""

    def use(self, scope: Scope) -> None:
        """Go on in another scope."""

    def run_text(self, text: str, file: str, line: int, *, derived: bool = False) -> None:
        """Follow a whole shell text, which stands in `file` from `line` on or, `derived`, was made there."""

    def block(self, nodes: Sequence[Node]) -> None:
        """Follow statements one after the other until one of them leaves."""

    def statement(self, node: Node) -> None:
        """Follow one statement."""

    def tested(self, text: str) -> bool | None:
        """The result of `[ ]`, `[[ ]]` or `(( ))`."""

    def tested_words(self, conditions: ShellConditions, words: list[str]) -> bool | None:
        """The result of `[ words ]`."""

    def status_of(self, nodes: Sequence[Node]) -> tuple[bool | None, list[str]]:
        """The result of the statements of a condition, and what was assumed for it."""

    def either(self, condition: str, first: Callable[[], None], second: Callable[[], None]) -> None:
        """Follow two branches of a condition that is not decided, and merge what they leave."""

    def command(self, words: list[str]) -> None:
        """Follow a command whose words are expanded."""

    def localise(self, name: str) -> None:
        """Restore a variable when the function that is being followed returns."""

    def subshell(self, action: Callable[[], None]) -> None:
        """Follow an action whose changes of variables end with it."""

    def write(self, text: str) -> None:
        """Add text to the output where it is captured."""

    def captured(self, action: Callable[[], None]) -> str:
        """The output of an action."""

    def redirected(self, redirects: Sequence[tuple[str, str]], action: Callable[[], None]) -> None:
        """Follow an action with its input and output redirected."""
