"""Decides the conditions of a shell script, `[ ]` and `[[ ]]`, as far as known values decide them."""

from __future__ import annotations

import re

from moesim.simulator.trainers.launch import Unknown
from moesim.simulator.trainers.reading import shell_patterns as patterns
from moesim.simulator.trainers.reading.shell_arithmetic import UnknownNumber
from moesim.simulator.trainers.reading.shell_expansion import Expander
from moesim.simulator.trainers.reading.shell_words import ShellTextError, skip_piece
from moesim.simulator.trainers.reading.unknowns import MARK, is_known

_COMPARED = ("-eq", "-ne", "-lt", "-le", "-gt", "-ge")
_BINARY = (*_COMPARED, "==", "=", "!=", "=~", "<", ">", "-nt", "-ot", "-ef")
_FILE_TESTS = frozenset(
    [
        "-a",
        "-b",
        "-c",
        "-d",
        "-e",
        "-f",
        "-g",
        "-h",
        "-k",
        "-p",
        "-r",
        "-s",
        "-t",
        "-u",
        "-w",
        "-x",
        "-G",
        "-L",
        "-N",
        "-O",
        "-S",
    ]
)
_SAFE_PART = re.compile(r"[\w-]\+|[\w ,:/@%=-]|\\\.|(?:\[\^?[\w. :/-]+\]|\.)[+*?]?")
"""A part of a regular expression whose search takes little time."""
_MOST_REGEX = 200
_MOST_NESTED = 20


class ShellConditions:
    """Evaluates conditions with three results: True, False, and None for one that known values do not decide.

    `assumed` collects sentences on variables that are not set and were taken as empty.
    """

    def __init__(self, expander: Expander) -> None:
        """Takes what expands the words of the conditions."""
        self.expander = expander
        self.assumed: list[str] = []
        self._nested = self._at = 0
        self._words: list[str] = []
        self._raw = False

    def test(self, words: list[str]) -> bool | None:
        """The result of `[ words ]`, whose words are expanded."""
        self._words, self._raw, self._at = words, False, 0
        result = self._or() if words else False
        if self._at != len(words):
            raise ShellTextError(f"the condition [ {' '.join(words)[:60]} ] cannot be read")
        return result

    def bracket(self, text: str) -> bool | None:
        """The result of `[[ text ]]`, whose words are not expanded yet."""
        self._words, self._raw, self._at = _tokens(text), True, 0
        result = self._or()
        if self._at != len(self._words):
            raise ShellTextError(f"the condition [[ {text[:60]} ]] cannot be read")
        return result

    def arithmetic(self, text: str) -> bool | None:
        """The result of `(( text ))`."""
        expanded = self.expander.within(text)
        try:
            if not is_known(expanded):
                raise UnknownNumber(expanded)
            return self.expander.integer(expanded) != 0
        except (UnknownNumber, ShellTextError):
            self.expander.spoil(expanded)
            return None

    # -- grammar -------------------------------------------------------------------------------------

    def _peek(self, ahead: int = 0) -> str | None:
        at = self._at + ahead
        return self._words[at] if at < len(self._words) else None

    def _or(self) -> bool | None:
        self._nested += 1
        if self._nested > _MOST_NESTED:
            raise ShellTextError(f"a condition is nested more than {_MOST_NESTED} levels deep")
        result = self._and()
        while self._peek() == ("||" if self._raw else "-o"):
            self._at += 1
            result = either(result, self._and())
        self._nested -= 1
        return result

    def _and(self) -> bool | None:
        result = self._not()
        while self._peek() == ("&&" if self._raw else "-a"):
            self._at += 1
            result = both(result, self._not())
        return result

    def _not(self) -> bool | None:
        if self._peek() == "!" and self._peek(1) not in (None, "=", "==", "!="):
            self._at += 1
            result = self._not()
            return None if result is None else not result
        if self._peek() == "(" and (self._raw or self._peek(2) not in ("=", "==", "!=")):
            self._at += 1
            result = self._or()
            if self._peek() != ")":
                raise ShellTextError("a parenthesis of a condition is not closed")
            self._at += 1
            return result
        return self._primary()

    def _primary(self) -> bool | None:
        first, second, third = self._peek(), self._peek(1), self._peek(2)
        if first is None:
            raise ShellTextError("a condition ends too early")
        if second in _BINARY and third is not None:
            self._at += 3
            return self._binary(first, second, third)
        if re.fullmatch(r"-[A-Za-z]", first) and second is not None and second not in ("&&", "||", ")"):
            self._at += 2
            return self._unary(first, second)
        self._at += 1
        if first == "-z" and not self._raw:
            return True  # an unquoted empty value leaves `[ -z ]`
        return self._filled(self._text(first))

    # -- tests ---------------------------------------------------------------------------------------

    def _text(self, word: str) -> str:
        return self.expander.text(word) if self._raw else word

    def _unary(self, operator: str, word: str) -> bool | None:
        if operator == "-v":
            name = self._text(word)
            variable = self.expander.scope.variables.get(name)
            if variable is None:
                self.assumed.append(f"{name} is not set")
            return variable is not None and variable.value is not None
        text = self._text(word)
        if operator in ("-z", "-n"):
            filled = self._filled(text)
            return None if filled is None else filled == (operator == "-n")
        if operator in _FILE_TESTS:
            return (
                True if operator in ("-e", "-f", "-s", "-r") and self.expander.scope.written(text) else None
            )
        raise ShellTextError(f"the test {operator!r} of a condition is not known")

    def _filled(self, text: str) -> bool | None:
        """Whether a text is not empty; a variable that is not set is taken as empty, which is noted."""
        if is_known(text):
            return bool(text)
        rest = MARK.sub("", text)
        if rest:
            return True if rest.strip() else None
        entries = [self.expander.unknowns.entry(mark[0]) for mark in MARK.finditer(text)]
        if all(is_unset(entry) for entry in entries):
            self.assumed += [f"{entry.reason}" for entry in entries if isinstance(entry, Unknown)]
            return False
        return None

    def _binary(self, left: str, operator: str, right: str) -> bool | None:
        if operator in _COMPARED:
            return self._compared(self._text(left), operator, self._text(right))
        ours = self._text(left)
        if operator in ("-nt", "-ot", "-ef"):
            return None
        if operator == "=~":
            return self._regex(ours, self._text(right))
        pieces = self.expander.pattern(right) if self._raw else [(right, True)]
        theirs = "".join(text for text, _ in pieces)
        if not theirs and operator in ("=", "==", "!="):
            filled = self._filled(ours)
            return None if filled is None else filled == (operator == "!=")
        if not is_known(ours, theirs):
            return None
        if operator in ("<", ">"):
            return ours < theirs if operator == "<" else ours > theirs
        equal = patterns.matches(patterns.pattern_of(pieces), ours, self.expander.count)
        return equal == (operator != "!=")

    def _compared(self, left: str, operator: str, right: str) -> bool | None:
        if not is_known(left, right):
            return None
        if not self._raw and not all(re.fullmatch(r"\s*[-+]?\d+\s*", text) for text in (left, right)):
            return False  # the shell reports an error, which counts as false
        try:
            a, b = (self.expander.integer(text) for text in (left, right))
        except (UnknownNumber, ShellTextError):
            return None
        return {"-eq": a == b, "-ne": a != b, "-lt": a < b, "-le": a <= b, "-gt": a > b, "-ge": a >= b}[
            operator
        ]

    def _regex(self, text: str, rule: str) -> bool | None:
        """The result of `=~` for rules that are short and without groups; others are not decided."""
        quantifiers = sum(rule.count(char) for char in "+*?")
        if not is_known(text, rule) or len(text) > _MOST_REGEX or quantifiers > 2:
            return None
        if len(rule) > _MOST_REGEX or not _is_safe(rule):
            return None
        return re.search(rule, text) is not None


def _is_safe(rule: str) -> bool:
    """Whether a regular expression consists of simple parts between `^` and `$`."""
    at, end = int(rule.startswith("^")), len(rule) - int(rule.endswith("$"))
    while at < end:
        part = _SAFE_PART.match(rule, at, end)
        if part is None:
            return False
        at = part.end()
    return True


def is_unset(entry: object) -> bool:
    """Whether an unknown value is a variable or parameter that nothing sets."""
    return isinstance(entry, Unknown) and entry.reason.endswith(("is not set", "is not given"))


def both(a: bool | None, b: bool | None) -> bool | None:
    """And, of results that may be undecided."""
    if a is False or b is False:
        return False
    return None if a is None or b is None else True


def either(a: bool | None, b: bool | None) -> bool | None:
    """Or, of results that may be undecided."""
    if a is True or b is True:
        return True
    return None if a is None or b is None else False


def _tokens(text: str) -> list[str]:
    """The raw words and operators between `[[` and `]]`."""
    tokens: list[str] = []
    word, at = "", 0
    while at < len(text):
        char = text[at]
        regex = bool(tokens) and tokens[-1] == "=~"
        if char in " \t\n" or text.startswith("\\\n", at):
            tokens += [word] if word else []
            word, at = "", at + (2 if char == "\\" else 1)
        elif text.startswith(("&&", "||"), at) and not regex:
            tokens += [word] if word else []
            tokens.append(text[at : at + 2])
            word, at = "", at + 2
        elif char in "()<>" and not regex:
            tokens += [word] if word else []
            tokens.append(char)
            word, at = "", at + 1
        else:
            end = skip_piece(text, at)
            word, at = word + text[at:end], end
    return [*tokens, word] if word else tokens
