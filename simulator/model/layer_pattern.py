"""Patterns of layers as model files write them: names with counts, which repeat over the layers."""

from __future__ import annotations

from collections.abc import Collection, Iterator

MAX_LAYERS = 1000
"""Most layers of a model, far above any real one; lists of layers are built, so a mistyped number must not
exhaust the memory."""

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
