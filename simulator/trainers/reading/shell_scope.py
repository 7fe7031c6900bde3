"""What a shell script knows at one moment: variables, parameters, functions and the files it has written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

Value = str | tuple[str, ...] | dict[str, str] | None
"""Text, an array, an associative array, or None for a variable that the script has unset."""


@dataclass(frozen=True, slots=True)
class ShellVariable:
    """A variable: its value, and whether programs that are started see it."""

    value: Value
    exported: bool = False


@dataclass(slots=True)
class Scope:
    """The state of a script; the branches of a condition work on copies that are merged afterwards.

    `parameters` are `$1`, `$2`, ...; `given` says whether the caller gave them. `assumed` is set where a
    decision took an unset variable as empty.
    """

    variables: dict[str, ShellVariable] = field(default_factory=dict)
    name: str = "script.sh"
    parameters: tuple[str, ...] = ()
    given: bool = False
    functions: dict[str, Any] = field(default_factory=dict)
    files: dict[str, tuple[str, str]] = field(default_factory=dict)
    everything_exported: bool = False
    status: bool | None = True
    stopped: str = ""
    """"exit", "return", "break" or "continue" where the statements that follow are not reached."""

    left_at: str = ""
    """The place of the statement that left, where `stopped` is set."""

    def copy(self) -> Scope:
        """A scope whose changes do not reach this one."""
        return replace(
            self,
            variables=dict(self.variables),
            functions=dict(self.functions),
            files=dict(self.files),
        )

    def set(self, name: str, value: Value, *, export: bool | None = None) -> None:
        """Assign a variable, which stays exported if it was."""
        before = self.variables.get(name)
        if export is None:
            export = self.everything_exported or (before is not None and before.exported)
        self.variables[name] = ShellVariable(value, export)

    def written(self, name: str) -> tuple[str, str] | None:
        """The text of a file that the script has written, and where; None for any other file."""
        return self.files.get(name.removeprefix("./"))

    def write_file(self, name: str, text: str, place: str) -> None:
        """Keep the text of a file that the script writes."""
        self.files[name.removeprefix("./")] = (text, place)

    def text(self, name: str) -> str | None:
        """The text of a variable (of an array, its first element), or None where it has none."""
        variable = self.variables.get(name)
        value = variable.value if variable is not None else None
        if isinstance(value, tuple):
            return value[0] if value else None
        if isinstance(value, dict):
            return value.get("0")
        return value

    def elements(self, name: str) -> tuple[str, ...] | None:
        """The elements of an array, of a text that text alone; None where the variable is not set."""
        variable = self.variables.get(name)
        value = variable.value if variable is not None else None
        if isinstance(value, dict):
            return tuple(value.values())
        return (value,) if isinstance(value, str) else value


Substitution = Callable[[str], str]
"""The output of the command of `$( )`, with a mark where it is not known."""
