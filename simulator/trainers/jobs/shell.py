"""Quotes words for a shell so that nothing but the known path variables is expanded."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from moesim.simulator.trainers.jobs.placement import references, split_references
from moesim.simulator.trainers.jobs.template import JobTemplate
from moesim.simulator.trainers.variables import VARIABLES

_PLAIN = re.compile(r"[A-Za-z0-9_@%+:,./-][A-Za-z0-9_@%+=:,./-]*", re.ASCII)


def quoted(word: str) -> str:
    """One shell word: ${DATA_PATH} and the other paths are expanded, all else is taken literally."""
    pieces = split_references(word)
    if not pieces:
        return "''"
    return "".join(f'"${{{text}}}"' if is_name else _literal(text) for is_name, text in pieces)


def _literal(text: str) -> str:
    """The text in single quotes where it needs them; a leading = does, for shellcheck."""
    return text if _PLAIN.fullmatch(text) else "'" + text.replace("'", "'\"'\"'") + "'"


def one_argument_a_line(command: Sequence[str]) -> list[str]:
    """The quoted words, with the values of an argument on its line."""
    lines: list[str] = []
    for word in command:
        if lines and not word.startswith("--") and lines[-1].startswith("--"):
            lines[-1] += f" {quoted(word)}"
        else:
            lines.append(quoted(word))
    return lines


def path_lines(words: Sequence[str], template: JobTemplate) -> list[str]:
    """Lines that set the paths which the words name, or stop with a message where one is not set."""
    lines = []
    for name in references(words):
        if name in template.paths:
            lines.append(f"export {name}={shlex.quote(template.paths[name])}")
        else:
            lines.append(f': "${{{name}:?set {name} to {VARIABLES[name]}}}"')
    return lines
