"""The commands of the shell itself: assignments, export, declare, read, echo and printf."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from moesim.simulator.trainers.launch import Unknown
from moesim.simulator.trainers.reading.shell_arithmetic import UnknownNumber
from moesim.simulator.trainers.reading.shell_expansion import split_fields
from moesim.simulator.trainers.reading.shell_scope import Value
from moesim.simulator.trainers.reading.shell_words import ASSIGNMENT, ShellTextError, scan
from moesim.simulator.trainers.reading.unknowns import is_known

if TYPE_CHECKING:
    from moesim.simulator.trainers.reading.shell_follower import ShellFollower

NOT_RUN = "the output of a command, which is never run"
DECLARATIONS = ("export", "declare", "typeset", "local", "readonly")
_MOST_INDEX = 10_000


def assign(shell: ShellFollower, raw: str, *, export: bool | None = None, options: str = "") -> None:
    """Carry out one raw assignment, `NAME=value`, `NAME+=value`, `NAME[i]=value` or `NAME=(...)`."""
    match = ASSIGNMENT.match(raw)
    assert match is not None
    name, index, plus = match[1], match[2], bool(match[3])
    text = raw[match.end() :]
    scope, expander = shell.scope, shell.expander
    before = scope.variables.get(name)
    value: Value
    if text.startswith("(") and index is None:
        value = _array(
            shell, text[1:-1], "A" in options or (before is not None and isinstance(before.value, dict))
        )
        if plus and isinstance(value, dict):
            value = {**(before.value if before and isinstance(before.value, dict) else {}), **value}
        elif plus and not isinstance(value, dict) and value is not None:
            value = (*(scope.elements(name) or ()), *value)
    else:
        value = expander.text(text)
        if "i" in options and is_known(value):
            value = expander.number(value, value)
        if index is not None:
            value = _indexed(shell, name, index[1:-1], value, plus)
        elif before is not None and isinstance(before.value, tuple):
            first = (before.value[0] if before.value else "") if plus else ""
            value = (first + value, *before.value[1:])
        elif plus:
            value = (scope.text(name) or _unset(shell, name)) + value
    size = sum(map(len, value)) if isinstance(value, tuple | dict) else len(value or "")
    if isinstance(value, str):
        shell.budget.text(size, name)
    if isinstance(value, tuple | dict):
        shell.budget.words(len(value), shell.place)
    scope.set(name, value, export=export)


def _unset(shell: ShellFollower, name: str) -> str:
    """What `NAME+=` adds to where NAME is not set: nothing, and a note says so."""
    if name not in shell.scope.variables:
        shell.notes[f"{name} is not set before {shell.place} adds to it, and is taken as empty"] = None
    return ""


def _array(shell: ShellFollower, text: str, associative: bool) -> Value:
    scanned = scan(text, lines=True)
    if associative or any(re.match(r"\[[^\]]+\]=", word) for word in scanned.words):
        pairs: dict[str, str] = {}
        for word in scanned.words:
            match = re.match(r"\[([^\]]+)\]=", word)
            if match is None:
                raise ShellTextError(f"{word[:60]!r} has no [key]=, in an array of pairs")
            pairs[shell.expander.text(match[1])] = shell.expander.text(word[match.end() :])
        if not associative and all(key.isdigit() for key in pairs):
            return tuple(pairs[key] for key in sorted(pairs, key=int))
        return pairs
    words: list[str] = []
    for word in scanned.words:
        words += shell.expander.fields(word)
        shell.budget.words(len(words), shell.place)
    return tuple(words)


def _indexed(shell: ShellFollower, name: str, index: str, value: str, plus: bool) -> Value:
    before = shell.scope.variables.get(name)
    if before is not None and isinstance(before.value, dict):
        key = shell.expander.text(index)
        return {**before.value, key: (before.value.get(key, "") if plus else "") + value}
    elements = list(shell.scope.elements(name) or ())
    try:
        at = shell.expander.integer(shell.expander.within(index))
    except (UnknownNumber, ShellTextError):
        at = -1
    if not 0 <= at < _MOST_INDEX:
        return (
            shell.unknowns.mark(
                Unknown(f"${{{name}[@]}}", f"its element {index[:40]!r} is set by an unknown index")
            ),
        )
    elements += [""] * (at + 1 - len(elements))
    elements[at] = (elements[at] if plus else "") + value
    return tuple(elements)


def declare(shell: ShellFollower, command: str, raws: list[str]) -> None:
    """`export`, `declare`, `local` and `readonly`, with their options and assignments."""
    export = True if command == "export" else None
    options = ""
    for raw in raws:
        match = ASSIGNMENT.match(raw)
        if match is None:
            for word in shell.expander.fields(raw):
                found = ASSIGNMENT.match(word)
                if word.startswith(("-", "+")):
                    options += word[1:]
                    if command == "export" and "n" in word:
                        export = False
                elif found is not None:
                    shell.scope.set(found[1], word[found.end() :], export=export)
                elif re.fullmatch(r"[A-Za-z_]\w*", word, re.ASCII):
                    _declared(shell, command, word, options, export)
            continue
        if command in ("local", "declare", "typeset") and "g" not in options:
            shell.localise(match[1])
        assign(shell, raw, export=True if "x" in options else export, options=options)
        if "n" in options and command != "export":
            mark = Unknown(f"${match[1]}", "a reference to another variable, which is not followed")
            shell.scope.set(match[1], shell.unknowns.mark(mark))


def _declared(shell: ShellFollower, command: str, name: str, options: str, export: bool | None) -> None:
    """A name without a value."""
    variable = shell.scope.variables.get(name)
    if command == "export" or "x" in options:
        if variable is not None:
            shell.scope.set(name, variable.value, export=export if export is not None else True)
        return
    if command in ("local", "declare", "typeset") and "p" not in options and "f" not in options:
        shell.localise(name)
        local = command == "local"
        if "A" in options and (local or variable is None):
            shell.scope.set(name, {})
        elif "a" in options and (local or variable is None):
            shell.scope.set(name, ())
        elif local:
            shell.scope.set(name, None)


def echo(shell: ShellFollower, words: list[str]) -> None:
    """Write words to the captured output."""
    newline = True
    escapes = False
    while words and re.fullmatch(r"-[neE]+", words[0]):
        newline = newline and "n" not in words[0]
        escapes = escapes or "e" in words[0]
        words = words[1:]
    text = " ".join(words)
    if escapes:
        text = text.replace("\\n", "\n").replace("\\t", "\t")
    shell.write(text + ("\n" if newline else ""))


def printf(shell: ShellFollower, words: list[str]) -> None:
    """`printf` with %s and %d; another format makes the output unknown."""
    if words[:1] == ["-v"] and len(words) > 2:
        text = _formatted(words[2], words[3:])
        mark = shell.unknowns.mark(Unknown(" ".join(words), "this format of printf is not computed"))
        shell.scope.set(words[1], mark if text is None else text)
        return
    text = _formatted(words[0], words[1:]) if words else ""
    shell.write(shell.unknowns.mark(Unknown("printf", NOT_RUN)) if text is None else text)


def _formatted(rule: str, words: list[str]) -> str | None:
    rule = rule.replace("\\n", "\n").replace("\\t", "\t")
    parts = re.split(r"(%[a-zA-Z%0-9.-]+?(?<=[a-zA-Z%]))", rule)
    wanted = sum(part.startswith("%") and part != "%%" for part in parts)
    if any(part.startswith("%") and part not in ("%s", "%d", "%%") for part in parts) or "%" in "".join(
        parts[::2]
    ):
        return None
    done, left = "", list(words)
    while True:
        for part in parts:
            if part in ("%s", "%d"):
                done += left.pop(0) if left else "" if part == "%s" else "0"
            else:
                done += "%" if part == "%%" else part
        if not left or not wanted or len(done) > 100_000:
            return done


def read(shell: ShellFollower, words: list[str]) -> bool | None:
    """`read NAME ...` from text that is known, or unknown values for its names."""
    names: list[str] = []
    array = None
    delimiter: str | None = "\n"
    raw = False
    at = 0
    while at < len(words):
        word = words[at]
        if word.startswith("-") and len(word) > 1:
            raw = raw or "r" in word
            if word[-1] in "dapntu" and at + 1 < len(words):
                at += 1
                if word[-1] == "d":
                    delimiter = words[at] or None
                elif word[-1] == "a":
                    array = words[at]
        else:
            names.append(word)
        at += 1
    text = shell.stdin
    if text is None or (not raw and "\\" in text):
        reason = "it is read from input that the file does not hold"
        for name in [*names, *([array] if array else [])]:
            shell.scope.set(name, shell.unknowns.mark(Unknown(f"${name}", reason)))
        return None
    line, separator, rest = (text, "", "") if delimiter is None else text.partition(delimiter)
    shell.stdin = rest
    split, _, _ = split_fields(line, shell.expander.separator())
    if array:
        shell.scope.set(array, tuple(split))
    elif len(names) == 1:
        shell.scope.set(names[0], line.strip(" \t\n") if shell.expander.separator() else line)
    else:
        for n, name in enumerate(names):
            last = n == len(names) - 1
            shell.scope.set(name, (" ".join(split[n:]) if last else split[n]) if n < len(split) else "")
    return bool(separator) or None
