"""Expands `$NAME` and every `${...}` form of the shell's parameters."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from moesim.simulator.trainers.launch import Unknown
from moesim.simulator.trainers.reading.shell_arithmetic import UnknownNumber
from moesim.simulator.trainers.reading.shell_transformations import sliced, transformed
from moesim.simulator.trainers.reading.shell_word_parts import BETWEEN, WordPart
from moesim.simulator.trainers.reading.shell_words import ShellTextError, skip_dollar, skip_piece
from moesim.simulator.trainers.reading.unknowns import is_known

if TYPE_CHECKING:
    from moesim.simulator.trainers.reading.shell_word_parts import WordExpander

_PARAMETER = re.compile(r"([A-Za-z_]\w*|\d+|[@*#?$!_-])", re.ASCII)
_REFERENCE = re.compile(r"[A-Za-z_]\w*(\[[\w@*]+\])?", re.ASCII)


def parameter(expander: WordExpander, body: str, raw: str, quoted: bool) -> list[WordPart]:
    """The parts of a parameter expansion, which is written as `raw` and has `body` between its braces."""
    if body.startswith("#") and len(body) > 1 and body[1] not in ":%+=?/-":
        return [WordPart(_length(expander, body[1:], raw), quoted, True)]
    if body.startswith("!") and len(body) > 1:
        return _indirect(expander, body[1:], raw, quoted)
    match = _PARAMETER.match(body)
    if match is None:
        raise ShellTextError(f"{raw[:60]!r} is no parameter of the shell")
    name, rest = match[0], body[match.end() :]
    index = None
    if rest.startswith("["):
        end = _index_end(rest)
        index, rest = rest[1 : end - 1], rest[end:]
    values = _values(expander, name, index)
    many = name in "@*" or index in ("@", "*")
    if rest:
        result = _operated(expander, name, values, rest, raw, quoted, many)
        if isinstance(result, list):
            return result
        values = result
    elif values is None:
        values = () if many else (_missing(expander, name, raw),)
    return _joined(expander, values, quoted, many, star=name == "*" or index == "*")


def _joined(
    expander: WordExpander, values: tuple[str, ...], quoted: bool, many: bool, star: bool
) -> list[WordPart]:
    if quoted and star and many:
        return [WordPart(expander.separator()[:1].join(values), True, True)]
    parts: list[WordPart] = []
    for n, value in enumerate(values):
        parts += [BETWEEN] if n else []
        parts.append(WordPart(value, quoted, True))
    return parts


def _index_end(rest: str) -> int:
    at = 1
    while at < len(rest) and rest[at] != "]":
        at = skip_piece(rest, at)
    if at >= len(rest):
        raise ShellTextError("the index of an array is not closed by ]")
    return at + 1


def _values(expander: WordExpander, name: str, index: str | None) -> tuple[str, ...] | None:
    """The value or values of a parameter; None where it is not set."""
    scope = expander.scope
    if name in "@*":
        return scope.parameters
    if name.isdigit():
        number = int(name[:6])
        if number == 0:
            return (scope.name,)
        return (scope.parameters[number - 1],) if number <= len(scope.parameters) else None
    if name == "#":
        return (str(len(scope.parameters)),)
    if name in "?$!_-":
        return (expander.unknowns.mark(Unknown(f"${name}", f"the shell sets ${name} when the script runs")),)
    if index is None:
        text = scope.text(name)
        if text is not None:
            return (text,)
        variable = scope.variables.get(name)
        return ("",) if variable is not None and variable.value is None else None
    if index in ("@", "*"):
        return scope.elements(name) if name in scope.variables else None
    return _element(expander, name, index)


def _element(expander: WordExpander, name: str, index: str) -> tuple[str, ...] | None:
    variable = expander.scope.variables.get(name)
    if variable is not None and isinstance(variable.value, dict):
        key = expander.text(index)
        if not is_known(key):
            return (expander.unknowns.mark(Unknown(f"${{{name}[{index}]}}", expander.unknowns.reason(key))),)
        value = variable.value.get(key)
        return None if value is None else (value,)
    elements = expander.scope.elements(name)
    if elements is None:
        return None
    whole = [expander.unknowns.entry(element) for element in elements]
    text = expander.within(index)
    try:
        number = expander.integer(text) if is_known(text) else None
    except UnknownNumber:
        number = None
    if number is None or any(entry is not None for entry in whole[: (number if number >= 0 else None)]):
        shown = f"${{{name}[{expander.unknowns.shown(text)}]}}"
        return (expander.unknowns.mark(Unknown(shown, "the index or the array is not known")),)
    if -len(elements) <= number < len(elements):
        return (elements[number],)
    return None


def _missing(expander: WordExpander, name: str, raw: str) -> str:
    """The mark of a parameter that is not set."""
    if name.isdigit():
        if expander.scope.given:
            return ""
        reason = f"the parameter ${name} of the script is not given"
    else:
        reason = f"the variable {name} is not set"
    return expander.unknowns.mark(Unknown(raw, reason))


def _length(expander: WordExpander, body: str, raw: str) -> str:
    match = re.fullmatch(r"([A-Za-z_]\w*|\d+|[@*])(?:\[(.*)\])?", body, re.ASCII)
    if match is None:
        raise ShellTextError(f"{raw[:60]!r} is no length of the shell")
    values = _values(expander, match[1], match[2])
    many = match[1] in "@*" or match[2] in ("@", "*")
    if values is None:
        return "0" if many else _missing(expander, match[1], raw)
    if not is_known(*values) and (not many or any(expander.unknowns.entry(v) is not None for v in values)):
        return expander.unknowns.mark(Unknown(raw, expander.unknowns.reason("".join(values))))
    return str(len(values) if many else len(values[0]))


def _indirect(expander: WordExpander, body: str, raw: str, quoted: bool) -> list[WordPart]:
    """`${!NAME}`, the variable whose name is the value of NAME, and `${!ARRAY[@]}`, its indices."""
    match = re.fullmatch(r"([A-Za-z_]\w*)\[[@*]\]", body, re.ASCII)
    if match:
        variable = expander.scope.variables.get(match[1])
        if variable is None or variable.value is None:
            return []
        value = variable.value
        keys = (
            tuple(value)
            if isinstance(value, dict)
            else tuple(map(str, range(len(expander.scope.elements(match[1]) or ()))))
        )
        return _joined(expander, keys, quoted, True, star=False)
    match = re.match(r"[A-Za-z_]\w*|\d+", body, re.ASCII)
    name = _values(expander, match[0], None) if match else None
    rest = body[match.end() :] if match else ""
    is_name = name is not None and is_known(name[0]) and _REFERENCE.fullmatch(name[0]) is not None
    if name is not None and is_name and not rest.startswith(("*", "@")):
        return parameter(expander, name[0] + rest, raw, quoted)
    reason = "the name of the variable that it refers to is not known"
    return [WordPart(expander.unknowns.mark(Unknown(raw, reason)), quoted, True)]


def _operated(
    expander: WordExpander,
    name: str,
    values: tuple[str, ...] | None,
    rest: str,
    raw: str,
    quoted: bool,
    many: bool,
) -> tuple[str, ...] | list[WordPart]:
    """The values after the operator `rest`, or the parts of the word that replaces them."""
    match = re.match(r":?[-=?+]", rest)
    if match:
        return _conditional(expander, name, values, match[0], rest[match.end() :], raw, quoted, many)
    if values is None:
        if many:
            return ()
        return (_missing(expander, name, raw),)
    variable = expander.scope.variables.get(name)
    if variable is not None and variable.value is None:
        return () if many else ("",)
    if not is_known(*values):
        changed = tuple(
            value
            if is_known(value)
            else expander.unknowns.mark(Unknown(raw, expander.unknowns.reason(value)))
            for value in values
        )
        if rest[0] == ":" and many:
            return changed[:1]
        return changed
    if rest[0] == ":":
        return sliced(expander, name, values, rest[1:], raw, many)
    if rest[0] == "@":
        return (
            values
            if rest == "@Q" and all(re.fullmatch(r"[\w./:=-]+", v) for v in values)
            else (expander.unknowns.mark(Unknown(raw, "this form of a parameter is not computed")),)
        )
    return tuple(transformed(expander, value, rest, raw) for value in values)


def _conditional(
    expander: WordExpander,
    name: str,
    values: tuple[str, ...] | None,
    operator: str,
    word: str,
    raw: str,
    quoted: bool,
    many: bool,
) -> tuple[str, ...] | list[WordPart]:
    """`${X:-word}`, `${X:=word}`, `${X:?word}` and `${X:+word}`, with and without the colon."""
    variable = expander.scope.variables.get(name)
    unset = values is None or (variable is not None and variable.value is None)
    text = " ".join(values or ())
    empty = unset or (operator[0] == ":" and not text) or (many and not values)
    kind = operator[-1]
    if not empty and not is_known(text) and operator[0] == ":" and kind != "?":
        entry = expander.unknowns.entry(text)
        if entry is not None and kind == "+":
            return (expander.unknowns.mark(Unknown(raw, expander.unknowns.reason(text))),)
        return values or ()
    if kind == "+":
        if unset and not many:
            expander.notes[f"{name} is not set, so {raw[:80]} is taken as empty"] = None
        return (
            [] if empty and not quoted else [WordPart("", quoted)] if empty else _word(expander, word, quoted)
        )
    if not empty:
        return values or ()
    if kind == "?":
        return (_missing(expander, name, raw),)
    parts = _word(expander, word, quoted)
    default = "".join(" " if part.between else part.text for part in parts)
    if unset and not (variable is not None) and not many:
        label = f"${name}" if name.isdigit() else name
        shown = expander.unknowns.shown(default)
        expander.notes[f"{label} is not set: its default {shown[:80]!r} is taken ({raw[:80]})"] = None
    if kind == "=" and re.fullmatch(r"[A-Za-z_]\w*", name):
        expander.scope.set(name, default)
    return parts


def _word(expander: WordExpander, word: str, quoted: bool) -> list[WordPart]:
    """The parts of the word of an operator; where it is not quoted, its plain text is split as well."""
    if quoted:
        return expander.quoted(_without_quotes(word))
    return [
        part if part.quoted or part.between else WordPart(part.text, False, True)
        for part in expander.pieces(word)
    ]


def _without_quotes(word: str) -> str:
    """The word of an operator inside double quotes, without the double quotes of its own."""
    kept, at = "", 0
    while at < len(word):
        if word[at] == '"':
            at += 1
            continue
        end = skip_dollar(word, at, quoted=True) if word[at] == "$" else at + 1
        end = skip_piece(word, at) if word[at] in "\\`" else end
        kept, at = kept + word[at:end], end
    return kept
