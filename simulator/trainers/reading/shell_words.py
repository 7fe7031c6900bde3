"""Splits shell text into raw words and redirections, whose quotes are left as they are written."""

from __future__ import annotations

import re
from dataclasses import dataclass

_REDIRECT = re.compile(r"&>>|&>|<<<|<<-|<<|<>|>>|>\||>&|<&|<|>")
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^\]]*\])?(\+)?=", re.ASCII)
NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_MOST_NESTED = 30


class ShellTextError(ValueError):
    """Raised for shell text that cannot be read, such as a quote that is not closed."""


@dataclass(frozen=True, slots=True)
class Scanned:
    """The raw words of a simple command, its redirections (operator, raw target), and the text behind it."""

    words: tuple[str, ...]
    redirects: tuple[tuple[str, str], ...]
    rest: str


def scan(text: str, *, lines: bool = False) -> Scanned:
    """Split the text of a simple command; with `lines`, of an array, whose words stand on several lines.

    A newline ends a command, and `rest` is the text after it. Raises ShellTextError for an unclosed quote or
    an operator.
    """
    words: list[str] = []
    redirects: list[tuple[str, str]] = []
    operator: str | None = None
    at, begun, word = 0, False, ""

    def finish() -> None:
        nonlocal begun, word, operator
        if not begun:
            return
        if operator is None:
            words.append(word)
        else:
            redirects.append((operator, word))
        operator, begun, word = None, False, ""

    while at < len(text):
        char = text[at]
        if text.startswith(("\\\n", "\\\r\n"), at):
            at += 2 if text[at + 1] == "\n" else 3
            continue
        if char in " \t\r":
            finish()
            at += 1
        elif char == "\n":
            finish()
            at += 1
            if not lines:
                return Scanned(tuple(words), tuple(redirects), text[at:])
        elif char == "#" and not begun:
            end = text.find("\n", at)
            at = len(text) if end < 0 else end
        elif text.startswith(("<(", ">("), at):
            end = skip_parentheses(text, at + 1)
            word, begun, at = word + text[at:end], True, end
        elif char in "<>" or text.startswith("&>", at):
            match = _REDIRECT.match(text, at)
            assert match is not None
            descriptor = word if word.isdigit() else ""
            if descriptor:
                begun, word = False, ""
            finish()
            operator = descriptor + match[0]
            at = match.end()
        elif char == "(" and ASSIGNMENT.fullmatch(word):
            end = skip_parentheses(text, at)
            word, at = word + text[at:end], end
        elif char in ";|&()":
            raise ShellTextError(f"an unexpected {char!r} stands in a command")
        else:
            end = skip_piece(text, at)
            word, begun, at = word + text[at:end], True, end
    finish()
    return Scanned(tuple(words), tuple(redirects), "")


def skip_piece(text: str, at: int, depth: int = 0) -> int:
    """The end of the quoted text, substitution, escape or character that begins at `at`."""
    if depth > _MOST_NESTED:
        raise ShellTextError(f"quotes and substitutions are nested more than {_MOST_NESTED} levels deep")
    char = text[at]
    if char == "\\":
        return min(at + 2, len(text))
    if char == "'":
        return _find(text, "'", at + 1, "the quote '")
    if char == '"':
        return _skip_double(text, at, depth)
    if char == "`":
        return _skip_backtick(text, at)
    if char == "$":
        return skip_dollar(text, at, depth)
    return at + 1


def skip_dollar(text: str, at: int, depth: int = 0, *, quoted: bool = False) -> int:
    """The end of the expansion that begins with the `$` at `at`."""
    if text.startswith("${", at):
        return _skip_brace(text, at + 1, depth, quoted)
    if text.startswith("$((", at):
        end = _skip_arithmetic(text, at + 3, depth)
        if end is not None:
            return end
    if text.startswith("$(", at):
        return skip_parentheses(text, at + 1, depth)
    if text.startswith("$[", at):
        return _find(text, "]", at + 2, "$[")
    if text.startswith("$'", at) and not quoted:
        end = at + 2
        while end < len(text) and text[end] != "'":
            end += 2 if text[end] == "\\" else 1
        if end >= len(text):
            raise ShellTextError("the quote $' is not closed")
        return end + 1
    match = NAME.match(text, at + 1)
    if match:
        return match.end()
    if at + 1 < len(text) and text[at + 1] in "0123456789@*#?$!-_":
        return at + 2
    return at + 1


def skip_parentheses(text: str, at: int, depth: int = 0) -> int:
    """The position after the parenthesis that closes the one at `at`."""
    level = 0
    begins = True
    while at < len(text):
        char = text[at]
        if char == "(":
            level, at = level + 1, at + 1
        elif char == ")":
            level, at = level - 1, at + 1
            if level == 0:
                return at
        elif char == "#" and begins:
            end = text.find("\n", at)
            at = len(text) if end < 0 else end
        else:
            at = skip_piece(text, at, depth + 1)
        begins = char in " \t\n;|&("
    raise ShellTextError("a parenthesis is not closed")


def _skip_double(text: str, at: int, depth: int) -> int:
    end = at + 1
    while end < len(text):
        char = text[end]
        if char == '"':
            return end + 1
        if char == "\\":
            end += 2
        elif char == "$":
            end = skip_dollar(text, end, depth + 1, quoted=True)
        elif char == "`":
            end = _skip_backtick(text, end)
        else:
            end += 1
    raise ShellTextError('the quote " is not closed')


def _skip_backtick(text: str, at: int) -> int:
    end = at + 1
    while end < len(text):
        if text[end] == "`":
            return end + 1
        end += 2 if text[end] == "\\" else 1
    raise ShellTextError("the quote ` is not closed")


def _skip_brace(text: str, at: int, depth: int, quoted: bool) -> int:
    """The position after the `}` that closes the `{` at `at`."""
    if depth > _MOST_NESTED:
        raise ShellTextError(f"quotes and substitutions are nested more than {_MOST_NESTED} levels deep")
    end = at + 1
    while end < len(text):
        char = text[end]
        if char == "}":
            return end + 1
        if char == "'" and quoted:
            end += 1
        else:
            end = skip_piece(text, end, depth + 1)
    raise ShellTextError("${ is not closed by }")


def _skip_arithmetic(text: str, at: int, depth: int) -> int | None:
    """The position after the `))` of an arithmetic expansion whose text begins at `at`, or None."""
    level = 0
    while at < len(text):
        if text[at] == "(":
            level, at = level + 1, at + 1
        elif text[at] == ")":
            if level == 0:
                return at + 2 if text.startswith("))", at) else None
            level, at = level - 1, at + 1
        else:
            at = skip_piece(text, at, depth + 1)
    return None


def _find(text: str, char: str, at: int, what: str) -> int:
    end = text.find(char, at)
    if end < 0:
        raise ShellTextError(f"{what} is not closed")
    return end + 1
