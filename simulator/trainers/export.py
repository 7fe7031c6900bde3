"""A plan as the arguments of a trainer, with the variables that a user fills in."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Words = str | tuple[str, ...] | None
"""Value of an argument: one word, several, or None for an argument without a value. A word such as
"$DATA_PATH" stands for a variable of the shell."""


@dataclass(frozen=True, slots=True)
class Export:
    """Arguments of a trainer for one plan, by group ("model", "parallelism", ...) and flag.

    `variables` maps the shell variables that the arguments use to what each must hold. `environment` holds
    what the trainer must find there. `unspelled` are sentences on what the arguments cannot express, so that
    the run would differ from what was priced; none where the run is exactly the priced plan. `comments` are
    further lines for the reader.
    """

    trainer: str
    headline: str
    groups: Mapping[str, Mapping[str, Words]]
    variables: Mapping[str, str]
    environment: Mapping[str, str]
    gpus: int
    unspelled: tuple[str, ...] = ()
    comments: tuple[str, ...] = ()

    @property
    def arguments(self) -> dict[str, Words]:
        """All arguments by flag."""
        return {flag: value for group in self.groups.values() for flag, value in group.items()}

    def words(self, variables: Mapping[str, str]) -> list[str]:
        """The arguments as a program receives them, with the variables filled in.

        Raises KeyError for a variable that is missing.
        """
        found: list[str] = []
        for flag, value in self.arguments.items():
            values = () if value is None else (value,) if isinstance(value, str) else value
            found += [flag, *(variables[v[1:]] if v.startswith("$") else v for v in values)]
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "trainer": self.trainer,
            "groups": {name: dict(group) for name, group in self.groups.items()},
            "variables": dict(self.variables),
            "environment": dict(self.environment),
            "gpus": self.gpus,
            "unspelled": list(self.unspelled),
        }

    def text(self) -> str:
        """A shell fragment: comments, the variables that must be set, and the array MODEL_ARGS and others.

        It ends with `TRAINING_ARGS=(...)`, which joins all groups.
        """
        lines = [f"# {self.trainer}: {self.headline}"]
        lines += [f"# {line}" for line in self.comments]
        lines += [f"# not spelled: {sentence}" for sentence in self.unspelled]
        lines += [f"export {name}={shlex.quote(value)}" for name, value in self.environment.items()]
        lines += [f': "${{{name}:?{holds}}}"' for name, holds in self.variables.items()]
        names = []
        for group, arguments in self.groups.items():
            names.append(f"{group.upper().replace(' ', '_')}_ARGS")
            lines.append(f"{names[-1]}=(")
            lines += [f"    {' '.join([flag, *quoted(value)])}" for flag, value in arguments.items()]
            lines.append(")")
        joined = " ".join(f'"${{{name}[@]}}"' for name in names)
        return "\n".join([*lines, f"TRAINING_ARGS=({joined})"]) + "\n"


def quoted(value: Words) -> list[str]:
    """The words of a value as a shell reads them back; variables stay variables."""
    values = () if value is None else (value,) if isinstance(value, str) else value
    return [f'"{v}"' if v.startswith("$") else shlex.quote(v) for v in values]
