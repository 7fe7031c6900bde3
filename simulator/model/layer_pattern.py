"""Patterns of layers as model files write them: names with counts, which repeat over the layers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import groupby

MAX_LAYERS = 1000
"""Most layers of a model, far above any real one; lists of layers are built, so a mistyped number must not
exhaust the memory."""

_MOST_IN_GROUP = 32
"""Most names in a group that is written once for all its repeats."""

NONE = "none"
"""Name of a half that a layer does not have, in `attention_layers` and `ffn_layers`."""


def check_pattern(key: str, entries: tuple[str, ...], n_layers: int, known: Collection[str]) -> None:
    """Check a list of names with counts; raises ValueError where it does not name `n_layers` layers.

    Every entry is one of `known` or `none`, the numbers of layers repeat to `n_layers` a whole number of
    times, and every known name has a layer. The layers are added up before any list is built, because a file
    may ask for many.
    """
    counts = [_counted(key, entry) for entry in entries]
    total = sum(times for _, times in counts)
    if total and n_layers % total:
        raise ValueError(f"{key} has {total} entries, which do not repeat to {n_layers} layers")
    listed = dict.fromkeys(name for name, _ in counts)
    unknown = [name for name in listed if name not in known and name != NONE]
    if unknown:
        raise ValueError(f"{key} names {unknown[0]!r}; the model has {', '.join(known)}")
    unused = [name for name in known if name not in listed]
    if unused:
        raise ValueError(f"no layer of {key} has {unused[0]!r}")
    if not total:
        raise ValueError(f"{key} is empty: name the half of every layer")


def expanded(key: str, entries: tuple[str, ...], n_layers: int) -> tuple[str, ...]:
    """Name of every layer; `entries` have passed `check_pattern`."""
    names = tuple(_repeated(key, entries))
    return names * (n_layers // len(names))


def _repeated(key: str, entries: tuple[str, ...]) -> Iterator[str]:
    for entry in entries:
        name, times = _counted(key, entry)
        yield from [name] * times


def _counted(key: str, entry: str) -> tuple[str, int]:
    """Name and count of an entry such as "linear*3"; raises ValueError for an illegal count."""
    name, star, times = entry.partition("*")
    if not star:
        return entry, 1
    if not (times.isascii() and times.isdigit() and len(times) <= 4 and 0 < int(times) <= MAX_LAYERS):
        raise ValueError(f"{key}: {entry!r} is no name with a count such as linear*3")
    return name, int(times)


def in_groups(names: Sequence[str], joint: str = ", ") -> str:
    """Names in order as runs, such as "3 dense, 58 moe"; groups that repeat are written once, with a count.

    From the front, the group is taken whose repeats reach farthest, as in "1 dense, 2 x (3 a, 1 b), 1 c".
    """
    parts, start = [], 0
    while start < len(names):
        size, times = _farthest(names[start:])
        group = names[start : start + size]
        parts.append(f"{times} {group[0]}" if size == 1 else f"{times} x ({in_groups(group, joint)})")
        start += size * times
    return joint.join(parts)


def _farthest(names: Sequence[str]) -> tuple[int, int]:
    """(size, times) of the group at the front whose repeats reach farthest; the smallest of equals."""
    best = (1, len(list(next(groupby(names))[1])))
    for size in range(2, min(len(names) // 2, _MOST_IN_GROUP) + 1):
        group, times = tuple(names[:size]), 1
        while tuple(names[times * size : (times + 1) * size]) == group:
            times += 1
        if times > 1 and size * times > best[0] * best[1]:
            best = (size, times)
    return best
