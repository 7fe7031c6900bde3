"""What is collected while one shell script is followed: commands, notes, unknown values and Slurm headers."""

from __future__ import annotations

from dataclasses import dataclass, field

from moesim.simulator.trainers.reading.limits import Budget
from moesim.simulator.trainers.reading.shell_scope import ShellVariable
from moesim.simulator.trainers.reading.unknowns import Unknowns

QUERIES = frozenset(
    [
        "grep",
        "egrep",
        "test",
        "[",
        "which",
        "type",
        "hash",
        "diff",
        "cmp",
        "command",
        "nvidia-smi",
        "pgrep",
        "id",
        "read",
        "ping",
    ]
)
"""Commands whose result says something about the machine, so that it cannot be taken as success."""


@dataclass(frozen=True, slots=True)
class Command:
    """A program that the script would start: its words, the wrappers in front of it, and its variables.

    `file`, `first_line` and `last_line` say where it stands, `condition` on what it depends, or "".
    `followed` counts the statements that were followed before it.
    """

    words: tuple[str, ...]
    wrappers: tuple[tuple[str, ...], ...]
    environment: dict[str, ShellVariable]
    files: dict[str, tuple[str, str]]
    file: str
    first_line: int
    last_line: int
    condition: str
    followed: int

    @property
    def place(self) -> str:
        """File and line of the command."""
        return f"{self.file}, line {self.first_line}"


@dataclass(slots=True)
class ScriptRecord:
    """Collects the results of following one launch file.

    `followed` holds file, line and text of the simple commands; `headers` the options of `#SBATCH` lines and
    their places.
    """

    budget: Budget
    unknowns: Unknowns = field(default_factory=Unknowns)
    notes: dict[str, None] = field(default_factory=dict)
    commands: list[Command] = field(default_factory=list)
    followed: list[tuple[str, int, str]] = field(default_factory=list)
    headers: list[tuple[str, str]] = field(default_factory=list)
