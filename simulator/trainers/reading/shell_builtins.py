"""The commands of the shell that change variables, parameters or the flow, by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from moesim.simulator.trainers.reading import shell_commands, shell_files
from moesim.simulator.trainers.reading.shell_conditions import ShellConditions

if TYPE_CHECKING:
    from moesim.simulator.trainers.reading.shell_follower import ShellFollower


def _leave(kind: str) -> Callable[[ShellFollower, list[str]], None]:
    def leave(shell: ShellFollower, words: list[str]) -> None:
        shell.scope.stopped = kind
        shell.scope.left_at = shell.place
        shell.scope.status = not words or words[0] == "0"

    return leave


def _unset(shell: ShellFollower, words: list[str]) -> None:
    for word in words:
        if re.fullmatch(r"[A-Za-z_]\w*", word):
            shell.scope.set(word, None)
    shell.scope.status = True


def _shift(shell: ShellFollower, words: list[str]) -> None:
    count = int(words[0]) if words and words[0].isdigit() and len(words[0]) < 6 else 1
    shell.scope.status = count <= len(shell.scope.parameters)
    if shell.scope.status:
        shell.scope.parameters = shell.scope.parameters[count:]


def _set(shell: ShellFollower, words: list[str]) -> None:
    if "--" in words:
        shell.scope.parameters = tuple(words[words.index("--") + 1 :])
        shell.scope.given = True
    flags = [word for word in words if re.fullmatch(r"[-+][A-Za-z]+", word)]
    for flag in flags:
        if "a" in flag:
            shell.scope.everything_exported = flag[0] == "-"
    if "allexport" in words:
        shell.scope.everything_exported = "-o" in words
    shell.scope.status = True


def _test(shell: ShellFollower, words: list[str]) -> None:
    conditions = ShellConditions(shell.expander)
    shell.scope.status = shell.tested_words(conditions, words[:-1] if words[-1:] == ["]"] else words)
    shell.assumed = conditions.assumed


def _eval(shell: ShellFollower, words: list[str]) -> None:
    shell.run_text(" ".join(words), shell.source.file, shell.line, derived=True)


def _done(status: bool | None) -> Callable[[ShellFollower, list[str]], None]:
    def done(shell: ShellFollower, words: list[str]) -> None:
        shell.scope.status = status

    return done


def _source(shell: ShellFollower, words: list[str]) -> None:
    shell_files.include(shell, words)


def _written(
    action: Callable[[ShellFollower, list[str]], None],
) -> Callable[[ShellFollower, list[str]], None]:
    def written(shell: ShellFollower, words: list[str]) -> None:
        action(shell, words)
        shell.scope.status = True

    return written


def _read(shell: ShellFollower, words: list[str]) -> None:
    shell.scope.status = shell_commands.read(shell, words)


_WITHOUT_EFFECT = (
    "cd",
    "pushd",
    "popd",
    "shopt",
    "trap",
    "ulimit",
    "umask",
    "wait",
    "sleep",
    "mkdir",
    "jobs",
)
BUILTINS: dict[str, Callable[[ShellFollower, list[str]], None]] = {
    "exit": _leave("exit"), "return": _leave("return"), "break": _leave("break"),
    "continue": _leave("continue"),
    "unset": _unset, "shift": _shift, "set": _set, "test": _test, "[": _test, "eval": _eval, "read": _read,
    "echo": _written(shell_commands.echo), "printf": _written(shell_commands.printf),
    "source": _source, ".": _source, "true": _done(True), ":": _done(True), "false": _done(False),
    **{name: _done(True) for name in _WITHOUT_EFFECT},
    "mapfile": _done(None), "readarray": _done(None), "getopts": _done(False),
}  # fmt: skip
