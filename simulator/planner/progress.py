"""Progress of a search: each part reports its own share, which is scaled to a share of the whole."""

from __future__ import annotations

from collections.abc import Callable

OnProgress = Callable[[float, str], None]
"""Called with the share of the work that is done (0 to 1) and a text on the current work."""


def no_progress(share: float, text: str) -> None:
    """Discard the report."""


def rising(say: OnProgress) -> OnProgress:
    """A callback whose share never falls: a part that turns out to be longer than expected stands still."""
    highest = 0.0

    def told(share: float, text: str) -> None:
        nonlocal highest
        highest = max(highest, min(1.0, share))
        say(highest, text)

    return told


def scaled(say: OnProgress, first: float, last: float) -> OnProgress:
    """A callback for one part of the work, which lasts from share `first` to share `last` of the whole."""
    return lambda share, text: say(first + share * (last - first), text)


def equal_part(number: int, count: int, first: float, last: float) -> tuple[float, float]:
    """Start and end of the `number`-th (from 0) of `count` equal parts between `first` and `last`."""
    step = (last - first) / count
    return first + number * step, first + (number + 1) * step
