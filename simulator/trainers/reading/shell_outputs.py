"""Computes the output of the few programs whose result follows from known text, such as cat and basename."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from moesim.simulator.trainers.launch import Unknown
from moesim.simulator.trainers.reading.shell_commands import NOT_RUN
from moesim.simulator.trainers.reading.unknowns import is_known

if TYPE_CHECKING:
    from moesim.simulator.trainers.reading.shell_follower import ShellFollower


def cat(shell: ShellFollower, words: list[str]) -> None:
    """`cat` of files that the script wrote, or of its input."""
    if not words or words == ["-"]:
        shell.write(shell.stdin if shell.stdin is not None else shell.unknowns.mark(Unknown("cat", NOT_RUN)))
        return
    for word in words:
        written = shell.scope.written(word)
        if written is not None:
            shell.write(written[0])
        elif not word.startswith("-"):
            reason = "the text of another file, which is not read"
            shell.write(shell.unknowns.mark(Unknown(f"$(cat {shell.unknowns.shown(word)})", reason)))


def tee(shell: ShellFollower, words: list[str]) -> None:
    """`tee`, which writes its input to files as well."""
    text = shell.stdin if shell.stdin is not None else shell.unknowns.mark(Unknown("tee", NOT_RUN))
    for word in words:
        if not word.startswith("-") and is_known(word):
            old = (shell.scope.written(word) or ("", ""))[0] if "-a" in words else ""
            shell.scope.write_file(word, old + text, shell.place)
    shell.write(text)


COMPUTED = frozenset(["basename", "dirname", "expr", "seq"])


def computed(shell: ShellFollower, name: str, words: list[str]) -> None:
    """`basename`, `dirname`, `expr` and `seq` of known words."""
    text = _result(name, words) if is_known(*words) else None
    if text is None:
        shown = f"{name} {' '.join(map(shell.unknowns.shown, words))}"
        reason = NOT_RUN if is_known(*words) else shell.unknowns.reason("".join(words))
        text = shell.unknowns.mark(Unknown(shown[:100], reason))
    shell.write(text + "\n")


def _result(name: str, words: list[str]) -> str | None:
    if name in ("basename", "dirname") and words and not words[0].startswith("-"):
        path = words[0].rstrip("/")
        head, slash, tail = path.rpartition("/")
        if name == "dirname":
            return (head or "/") if slash else "."
        suffix = words[1] if len(words) > 1 else ""
        return tail.removesuffix(suffix) if tail != suffix else tail
    if name == "expr" and len(words) == 3 and all(re.fullmatch(r"-?\d{1,15}", words[n]) for n in (0, 2)):
        a, b = int(words[0]), int(words[2])
        if words[1] in ("/", "%") and b == 0:
            return None
        quotient = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1) if b else 0
        results = {"+": a + b, "-": a - b, "*": a * b, "/": quotient, "%": a - quotient * b}
        return str(results[words[1]]) if words[1] in results else None
    if name == "seq" and 1 <= len(words) <= 3 and all(re.fullmatch(r"-?\d{1,6}", word) for word in words):
        numbers = [int(word) for word in words]
        first, step = (numbers[0] if len(words) > 1 else 1), (numbers[1] if len(words) == 3 else 1)
        if step == 0 or abs(numbers[-1] - first) // abs(step) > 1_000:
            return None
        return "\n".join(map(str, range(first, numbers[-1] + (1 if step > 0 else -1), step)))
    return None
