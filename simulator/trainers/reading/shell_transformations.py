"""Changes the value of a parameter: `${X:1:2}`, `${X%pattern}`, `${X/a/b}` and `${X^^}`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from moesim.simulator.trainers.launch import Unknown
from moesim.simulator.trainers.reading import shell_patterns as patterns
from moesim.simulator.trainers.reading.shell_arithmetic import UnknownNumber
from moesim.simulator.trainers.reading.shell_words import ShellTextError, skip_piece
from moesim.simulator.trainers.reading.unknowns import is_known

if TYPE_CHECKING:
    from moesim.simulator.trainers.reading.shell_word_parts import WordExpander


def sliced(
    expander: WordExpander, name: str, values: tuple[str, ...], rest: str, raw: str, many: bool
) -> tuple[str, ...]:
    """`${X:offset:length}` of a text, an array or the parameters."""
    parts = rest.split(":", 1)
    try:
        texts = [expander.within(part) for part in parts]
        if not is_known(*texts):
            raise UnknownNumber("offset")
        numbers = [expander.integer(text) for text in texts]
    except UnknownNumber:
        return (expander.unknowns.mark(Unknown(raw, "the offset is not known")),)
    whole = (expander.scope.name, *values) if name in "@*" else values
    size = len(whole) if many else len(values[0])
    start = numbers[0] if numbers[0] >= 0 else size + numbers[0]
    if start < 0 or abs(start) > 10**6:
        return () if many else ("",)
    end = size
    if len(numbers) > 1:
        end = start + numbers[1] if numbers[1] >= 0 else size + numbers[1]
    return whole[start : max(start, end)] if many else (values[0][start : max(start, end)],)


def transformed(expander: WordExpander, value: str, rest: str, raw: str) -> str:
    """`#`, `##`, `%`, `%%`, `/`, `//`, `^`, `^^`, `,` and `,,` on one text."""
    operator = re.match(r"##|#|%%|%|//|/#|/%|/|\^\^|\^|,,|,", rest)
    if operator is None:
        raise ShellTextError(f"{raw[:60]!r} is no parameter of the shell")
    word = rest[operator.end() :]
    kind = operator[0]
    if kind in ("^^", "^", ",,", ","):
        if word:
            return expander.unknowns.mark(Unknown(raw, "this form of a parameter is not computed"))
        change = str.upper if kind[0] == "^" else str.lower
        return change(value) if len(kind) == 2 else change(value[:1]) + value[1:]
    by = ""
    if kind[0] == "/":
        word, by_raw = _split_slash(word)
        by = expander.text(by_raw)
    pieces = expander.pattern(word)
    if not is_known(by, *(text for text, _ in pieces)):
        return expander.unknowns.mark(Unknown(raw, "the pattern is not known"))
    pattern = patterns.pattern_of(pieces)
    if kind[0] in "#%":
        cut = patterns.without_prefix if kind[0] == "#" else patterns.without_suffix
        return cut(pattern, value, expander.count, longest=len(kind) == 2)
    if len(value) > patterns.MOST_MATCHED:
        return expander.unknowns.mark(
            Unknown(raw, f"the text has more than {patterns.MOST_MATCHED} characters")
        )
    if kind in ("/#", "/%"):
        at_start = kind == "/#"
        lengths = (
            patterns.ends(pattern, value, expander.count)
            if at_start
            else patterns.ends(pattern[::-1], value[::-1], expander.count)
        )
        if not lengths:
            return value
        return by + value[lengths[-1] :] if at_start else value[: len(value) - lengths[-1]] + by
    return patterns.replaced(pattern, value, by, expander.count, every=kind == "//")


def _split_slash(word: str) -> tuple[str, str]:
    at = 0
    while at < len(word):
        if word[at] == "/":
            return word[:at], word[at + 1 :]
        at = skip_piece(word, at)
    return word, ""
