"""Matches the patterns of the shell (`*`, `?`, `[a-z]`) in time that the sizes of pattern and text bound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

MOST_MATCHED = 4_000
"""Most characters of a text in which a pattern is replaced."""


@dataclass(frozen=True, slots=True)
class Token:
    """One part of a pattern: `kind` is "char", "any", "many" or "set"; a set may be `negated`."""

    kind: str
    characters: str = ""
    negated: bool = False

    def accepts(self, char: str) -> bool:
        """Whether this part, where it stands for one character, stands for `char`."""
        if self.kind == "any":
            return True
        if self.kind == "char":
            return char == self.characters
        return (char in self.characters) != self.negated


Pattern = tuple[Token, ...]

Count = Callable[[int], None]
"""Is told the work of each step, and raises InputError where that is too much."""


def pattern_of(pieces: list[tuple[str, bool]]) -> Pattern:
    """The pattern of pieces of text, each with whether it was quoted; quoted characters match themselves."""
    flat = [(char, quoted) for text, quoted in pieces for char in text]
    tokens: list[Token] = []
    at = 0
    while at < len(flat):
        char, quoted = flat[at]
        at += 1
        if quoted or char not in "*?[\\":
            tokens.append(Token("char", char))
        elif char == "\\" and at < len(flat):
            tokens.append(Token("char", flat[at][0]))
            at += 1
        elif char == "*":
            if not tokens or tokens[-1].kind != "many":
                tokens.append(Token("many"))
        elif char == "?":
            tokens.append(Token("any"))
        else:
            token, at = _set(flat, at)
            tokens.append(token)
    return tuple(tokens)


def _set(flat: list[tuple[str, bool]], at: int) -> tuple[Token, int]:
    """The set after a `[`, or the character itself where no `]` follows."""
    text = "".join(char for char, _ in flat)
    negated = text[at : at + 1] in ("!", "^")
    start = end = at + negated
    members = ""
    while end < len(text):
        if text[end] == "]" and end > start:
            return Token("set", members, negated), end + 1
        if text.startswith("[:", end) and (close := text.find(":]", end)) > 0:
            members += _CLASSES.get(text[end + 2 : close], "")
            end = close + 2
        elif text[end + 1 : end + 2] == "-" and text[end + 2 : end + 3] not in ("", "]"):
            first, last = ord(text[end]), min(ord(text[end + 2]), 127)
            members += "".join(map(chr, range(first, last + 1)))
            end += 3
        else:
            members += text[end]
            end += 1
    return Token("char", "["), at


_CLASSES = {"space": " \t\n\r\v\f", "digit": "0123456789", "blank": " \t"}


def ends(pattern: Pattern, text: str, count: Count) -> list[int]:
    """Every length of a beginning of `text` that the whole pattern matches, in order."""
    states = _closed({0}, pattern)
    lengths = [0] if len(pattern) in states else []
    for n, char in enumerate(text, start=1):
        count(1 + len(states))
        after = set()
        for state in states:
            if state < len(pattern):
                token = pattern[state]
                if token.kind == "many":
                    after.add(state)
                elif token.accepts(char):
                    after.add(state + 1)
        states = _closed(after, pattern)
        if not states:
            break
        if len(pattern) in states:
            lengths.append(n)
    return lengths


def _closed(states: set[int], pattern: Pattern) -> set[int]:
    closed = set(states)
    for state in states:
        while state < len(pattern) and pattern[state].kind == "many":
            state += 1
            closed.add(state)
    return closed


def matches(pattern: Pattern, text: str, count: Count) -> bool:
    """Whether the pattern matches the whole text."""
    lengths = ends(pattern, text, count)
    return bool(lengths) and lengths[-1] == len(text)


def without_prefix(pattern: Pattern, text: str, count: Count, *, longest: bool) -> str:
    """`${text#pattern}`, or `${text##pattern}` with `longest`."""
    lengths = ends(pattern, text, count)
    return text if not lengths else text[lengths[-1 if longest else 0] :]


def without_suffix(pattern: Pattern, text: str, count: Count, *, longest: bool) -> str:
    """`${text%pattern}`, or `${text%%pattern}` with `longest`."""
    return without_prefix(pattern[::-1], text[::-1], count, longest=longest)[::-1]


def replaced(pattern: Pattern, text: str, by: str, count: Count, *, every: bool) -> str:
    """`${text/pattern/by}`, or `${text//pattern/by}` with `every`; the longest match is replaced."""
    if not text:
        return by if matches(pattern, text, count) and pattern else text
    done, at = "", 0
    while at < len(text):
        lengths = ends(pattern, text[at:], count)
        if lengths and lengths[-1]:
            done, at = done + by, at + lengths[-1]
            if not every:
                break
        else:
            done, at = done + text[at], at + 1
    return done + text[at:]
