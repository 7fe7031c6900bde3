"""How far a search is: shares of its whole, told by each of its parts in their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

Say = Callable[[float, str], None]
"""Takes the share that is done, from 0 to 1, and what is being done."""


def silent(share: float, text: str) -> None:
    """Tells nobody."""


def part(say: Say, first: float, last: float) -> Say:
    """What a part from `first` to `last` of the whole tells, in shares of its own."""
    return lambda share, text: say(first + share * (last - first), text)


def share_of(number: int, count: int, first: float, last: float) -> tuple[float, float]:
    """The ends of the `number`-th of `count` equal parts between `first` and `last`."""
    step = (last - first) / count
    return first + number * step, first + (number + 1) * step


def told(items: Iterable[T], count: int, say: Say) -> Iterator[T]:
    """The same items, telling after each how many of `count` plans are simulated."""
    say(0.0, f"simulating {count} plans")
    for number, item in enumerate(items, 1):
        say(number / count, f"{number} of {count} plans simulated")
        yield item
