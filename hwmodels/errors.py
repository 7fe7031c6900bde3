"""Errors that a user can act on; each message has the value, the limit, the place and the remedy."""

from __future__ import annotations

import re
from collections.abc import Sequence

MAX_MESSAGE_LENGTH = 2_000
"""Limit of a message, which is one paragraph for people."""
_LONG_WORD = re.compile(r"\S{400,}")


class MoesimError(Exception):
    """Base of every error that the command line shows as one paragraph instead of a traceback."""

    exit_code = 2

    def __init__(self, message: str) -> None:
        """Takes the message for people and cuts very long words and everything beyond the limit."""
        text = _LONG_WORD.sub(lambda word: f"{word[0][:120]}...{word[0][-40:]}", message)
        super().__init__(text if len(text) <= MAX_MESSAGE_LENGTH else text[: MAX_MESSAGE_LENGTH - 3] + "...")


class InputError(MoesimError):
    """Malformed or illegal input, such as an unknown key, a wrong unit or an uneven split (exit code 2).

    Where the message names legal values of one scenario key, `key` and `nearest` hold them as data.
    """

    exit_code = 2

    def __init__(self, message: str, *, key: str | None = None, nearest: Sequence[object] = ()) -> None:
        """Takes the message, one sentence for people, and the legal values of one key where known."""
        super().__init__(message)
        self.key = key
        self.nearest = tuple(nearest)


class UnknownKeyError(InputError):
    """A key that no description has; the message names the nearest one (exit code 2)."""


class InfeasibleError(MoesimError):
    """Legal input that cannot work, such as a plan beyond memory or an empty search (exit code 3)."""

    exit_code = 3


class LegalValuesError(ValueError):
    """Raised by a validator of a description that knows the nearest legal values of one key.

    `validate_model` turns it into an InputError with the key's whole path.
    """

    def __init__(self, message: str, key: str, nearest: Sequence[object]) -> None:
        """Takes the message, the key inside the description, and its nearest legal values."""
        super().__init__(message)
        self.key = key
        self.nearest = tuple(nearest)
