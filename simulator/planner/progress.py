"""Progress of a search: its parts report shares of their own, which add up to shares of the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

OnProgress = Callable[[float, str], None]
"""Takes the share that is done, from 0 to 1, and what is being done."""


def no_progress(share: float, text: str) -> None:
    """Reports to nobody."""


def scaled(say: OnProgress, first: float, last: float) -> OnProgress:
    """Takes the shares of a part that lasts from `first` to `last` of the whole."""
    return lambda share, text: say(first + share * (last - first), text)


def equal_part(number: int, count: int, first: float, last: float) -> tuple[float, float]:
    """The ends of the `number`-th of `count` equal parts between `first` and `last`."""
    step = (last - first) / count
    return first + number * step, first + (number + 1) * step


def with_progress(items: Iterable[T], count: int, say: OnProgress) -> Iterator[T]:
    """The same items, reporting after each how many of `count` plans are simulated."""
    say(0.0, f"simulating {count} plans")
    for number, item in enumerate(items, 1):
        say(number / count, f"{number} of {count} plans simulated")
        yield item
