"""Progress of a search: each part reports its own share, which is scaled to a share of the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

OnProgress = Callable[[float, str], None]
"""Called with the share of the work that is done (0 to 1) and a text on the current work."""


def no_progress(share: float, text: str) -> None:
    """Discard the report."""


def scaled(say: OnProgress, first: float, last: float) -> OnProgress:
    """A callback for one part of the work, which lasts from share `first` to share `last` of the whole."""
    return lambda share, text: say(first + share * (last - first), text)


def equal_part(number: int, count: int, first: float, last: float) -> tuple[float, float]:
    """Start and end of the `number`-th (from 0) of `count` equal parts between `first` and `last`."""
    step = (last - first) / count
    return first + number * step, first + (number + 1) * step


def with_progress(items: Iterable[T], count: int, say: OnProgress) -> Iterator[T]:
    """Yield the items, and report after each one how many of the `count` plans are simulated."""
    say(0.0, f"simulating {count} plans")
    for number, item in enumerate(items, 1):
        say(number / count, f"{number} of {count} plans simulated")
        yield item
