"""Errors a user can act on: each carries the value, the limit, the place and the remedy."""

from __future__ import annotations

import re
from collections.abc import Sequence

MAX_MESSAGE_CHARACTERS = 2_000
"""Of a message: it is one paragraph for people."""
_LONG_WORD = re.compile(r"\S{400,}")


class MoesimError(Exception):
    """Base of every error that the command line shows as one paragraph instead of a traceback."""

    exit_code = 2

    def __init__(self, message: str) -> None:
        """The message, for people: words of many hundred characters and what is beyond a page are cut."""
        text = _LONG_WORD.sub(lambda word: f"{word[0][:120]}...{word[0][-40:]}", message)
        super().__init__(text if len(text) <= MAX_MESSAGE_CHARACTERS else text[: MAX_MESSAGE_CHARACTERS - 3] + "...")


class InputError(MoesimError):
    """Malformed or illegal input: unknown key, wrong unit, a plan that does not divide (exit code 2).

    Where the message names legal values of one scenario key, `key` and `nearest` hold them as data.
    """

    exit_code = 2

    def __init__(self, message: str, *, key: str | None = None, nearest: Sequence[object] = ()) -> None:
        """The message, one sentence for people."""
        super().__init__(message)
        self.key = key
        self.nearest = tuple(nearest)


class InfeasibleError(MoesimError):
    """Legal input that cannot work: does not fit in memory, an empty search (exit code 3)."""

    exit_code = 3


class LegalValuesError(ValueError):
    """What a validator raises inside a description where it knows the nearest legal values of one key.

    `validate_model` makes an InputError of it, with the key's whole path.
    """

    def __init__(self, message: str, key: str, nearest: Sequence[object]) -> None:
        """The message, the key inside the description, and its nearest legal values."""
        super().__init__(message)
        self.key = key
        self.nearest = tuple(nearest)
