"""Computes the integer arithmetic of the shell: `$((a * 2))`, `((a += 1))` and `let`."""

from __future__ import annotations

import re
from collections.abc import Callable

from moesim.simulator.trainers.reading.shell_words import ShellTextError

_TOKEN = re.compile(
    r"\s*(?:(\d+#[0-9a-zA-Z]+|0[xX][0-9a-fA-F]+|\d+)|([A-Za-z_]\w*)"
    r"|(<<=|>>=|\*\*|\+\+|--|[-+*/%&|^]=|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%<>!~&|^?:=(),]))",
    re.ASCII,
)
_LEVELS = (
    ("||",), ("&&",), ("|",), ("^",), ("&",), ("==", "!="), ("<", ">", "<=", ">="), ("<<", ">>"),
    ("+", "-"), ("*", "/", "%"),
)  # fmt: skip
_MOST_TOKENS = 500
_MOST_NESTED = 30


class UnknownNumber(Exception):  # noqa: N818 - it reports a value, not a mistake
    """Raised where a number depends on a variable without a value; its text names the variable."""


def arithmetic(text: str, look_up: Callable[[str], str | None], assign: Callable[[str, int], None]) -> int:
    """The value of an expression, whose variables `look_up` gives and whose assignments `assign` takes.

    Raises UnknownNumber where a variable has no value, ShellTextError for text that is no expression.
    """
    return _Expression(text, look_up, assign, 0).whole()


class _Expression:
    def __init__(
        self, text: str, look_up: Callable[[str], str | None], assign: Callable[[str, int], None], depth: int
    ) -> None:
        if depth > _MOST_NESTED:
            raise ShellTextError(f"an arithmetic variable refers to itself: {text[:60]!r}")
        self._text, self._look_up, self._assign, self._depth = text, look_up, assign, depth
        self._tokens: list[str] = []
        self._at = self._nested = 0
        self._live = True
        end = 0
        stripped = text.rstrip()
        while end < len(stripped):
            match = _TOKEN.match(stripped, end)
            if match is None:
                raise self._wrong()
            self._tokens.append(match[0].strip())
            end = match.end()
        if len(self._tokens) > _MOST_TOKENS:
            raise ShellTextError(f"an arithmetic expression has more than {_MOST_TOKENS} parts")

    def whole(self) -> int:
        if not self._tokens:
            return 0
        value = self._comma()
        if self._at != len(self._tokens):
            raise self._wrong()
        return value

    def _wrong(self) -> ShellTextError:
        return ShellTextError(f"{self._text.strip()[:60]!r} is no whole-number expression")

    def _peek(self, ahead: int = 0) -> str:
        at = self._at + ahead
        return self._tokens[at] if at < len(self._tokens) else ""

    def _take(self) -> str:
        token = self._peek()
        self._at += 1
        return token

    def _comma(self) -> int:
        value = self._assignment()
        while self._peek() == ",":
            self._take()
            value = self._assignment()
        return value

    def _assignment(self) -> int:
        name, operator = self._peek(), self._peek(1)
        if re.fullmatch(r"[A-Za-z_]\w*", name) and re.fullmatch(r"=|<<=|>>=|[-+*/%&|^]=", operator):
            self._at += 2
            value = self._assignment()
            if operator != "=":
                value = _binary(operator[:-1], self._value(name), value, self._live)
            return self._set(name, value)
        return self._conditional()

    def _conditional(self) -> int:
        self._nested += 1
        if self._nested > _MOST_NESTED:
            raise ShellTextError(f"an arithmetic expression is nested more than {_MOST_NESTED} levels deep")
        value = self._binary(0)
        if self._peek() == "?":
            self._take()
            first = self._evaluated(self._comma, bool(value))
            if self._take() != ":":
                raise self._wrong()
            second = self._evaluated(self._assignment, not value)
            value = first if value else second
        self._nested -= 1
        return value

    def _evaluated(self, part: Callable[[], int], live: bool) -> int:
        """The value of a part; where it is not `live`, it is only read and has no effect."""
        before, self._live = self._live, self._live and live
        value = part()
        self._live = before
        return value

    def _binary(self, level: int) -> int:
        if level == len(_LEVELS):
            return self._power()
        value = self._binary(level + 1)
        while self._peek() in _LEVELS[level]:
            operator = self._take()
            if operator in ("&&", "||"):
                live = bool(value) == (operator == "&&")
                right = self._evaluated(lambda: self._binary(level + 1), live)
                value = int(bool(right)) if live else int(operator == "||")
            else:
                value = _binary(operator, value, self._binary(level + 1), self._live)
        return value

    def _power(self) -> int:
        base = self._unary()
        if self._peek() == "**":
            self._take()
            self._nested += 1
            if self._nested > _MOST_NESTED:
                raise self._wrong()
            exponent = self._power()
            if exponent < 0:
                raise self._wrong()
            return _wrapped(pow(base, exponent, 2**64))
        return base

    def _unary(self) -> int:
        token = self._take()
        self._nested += 1
        if self._nested > 4 * _MOST_NESTED:
            raise self._wrong()
        if token in ("++", "--"):
            name = self._take()
            return self._set(name, self._value(name) + (1 if token == "++" else -1))
        if token in ("-", "+", "!", "~"):
            value = self._unary()
            value = {"-": -value, "+": value, "!": int(not value), "~": ~value}[token]
        elif token == "(":
            value = self._comma()
            if self._take() != ")":
                raise self._wrong()
        elif token[:1].isdigit():
            value = number(token)
        elif re.fullmatch(r"[A-Za-z_]\w*", token):
            value = self._value(token)
            if self._peek() in ("++", "--"):
                self._set(token, value + (1 if self._take() == "++" else -1))
        else:
            raise self._wrong()
        self._nested -= 1
        return _wrapped(value)

    def _value(self, name: str) -> int:
        if not self._live:
            return 1
        text = self._look_up(name)
        if text is None:
            raise UnknownNumber(name)
        if re.fullmatch(r"\s*[-+]?\d{1,18}\s*", text, re.ASCII):
            return number(text.strip())
        return _Expression(text, self._look_up, self._assign, self._depth + 1).whole()

    def _set(self, name: str, value: int) -> int:
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise self._wrong()
        if self._live:
            self._assign(name, value)
        return value


def number(token: str) -> int:
    """A number as the shell writes it: decimal, 0x hexadecimal, 0 octal, or base#digits."""
    sign = -1 if token.startswith("-") else 1
    token = token.lstrip("+-")
    if len(token) > 70:
        raise ShellTextError(f"{token[:60]!r} is no whole number of the shell")
    try:
        if "#" in token:
            base, digits = token.split("#", 1)
            return sign * _wrapped(int(digits, int(base)))
        if token.lower().startswith("0x"):
            return sign * _wrapped(int(token, 16))
        return sign * _wrapped(int(token, 8 if len(token) > 1 and token.startswith("0") else 10))
    except ValueError:
        raise ShellTextError(f"{token[:60]!r} is no whole number of the shell") from None


def _binary(operator: str, left: int, right: int, live: bool) -> int:
    if operator in ("/", "%"):
        if right == 0:
            if not live:
                return 0
            raise ShellTextError("an arithmetic expression divides by zero")
        quotient = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)
        return _wrapped(quotient if operator == "/" else left - quotient * right)
    if operator in ("<<", ">>"):
        return _wrapped(left << (right % 64) if operator == "<<" else left >> (right % 64))
    value: int = _OPERATORS[operator](left, right)
    return _wrapped(int(value))


_OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "&": lambda a, b: a & b,
    "|": lambda a, b: a | b,
    "^": lambda a, b: a ^ b,
    "<": lambda a, b: a < b,
    ">": lambda a, b: a > b,
    "<=": lambda a, b: a <= b,
    ">=": lambda a, b: a >= b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
}


def _wrapped(value: int) -> int:
    """A value in the 64 bits of the shell."""
    return (value + 2**63) % 2**64 - 2**63
