"""The bytes that a transfer puts on each link."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from moesim.hwmodels.arrays import FloatArray, IntArray
from moesim.simulator.common.bounded_cache import read_only

Pairs = tuple[tuple[int, float], ...]
"""(link, bytes) of every link of a transfer."""


@dataclass(frozen=True, slots=True, eq=False)
class Demand:
    """The bytes that one transfer puts on the links it crosses: `bytes[i]` on link `links[i]`.

    Links without bytes are dropped and the bytes of a repeated link are added. Raises ValueError for lengths
    that differ and for bytes that are negative or not finite.
    """

    links: IntArray
    bytes: FloatArray
    _pairs: Pairs | None = field(init=False, default=None, repr=False)

    def __post_init__(self) -> None:
        """Check both vectors, drop links without bytes and merge repeated links."""
        links, amounts = np.asarray(self.links, np.int64), np.asarray(self.bytes, np.float64)
        if links.shape != amounts.shape or links.ndim != 1:
            raise ValueError(f"{links.shape} links for {amounts.shape} byte counts")
        if not np.isfinite(amounts).all() or (amounts < 0.0).any():
            raise ValueError("bytes of a transfer must be finite and not negative")
        if not amounts.all():
            links, amounts = links[amounts > 0.0], amounts[amounts > 0.0]
        if not bool((links[1:] > links[:-1]).all()):  # links in order do not repeat
            unique, place = np.unique(links, return_inverse=True)
            if len(unique) < len(links):
                links, amounts = unique, np.bincount(place, amounts).astype(np.float64)
        object.__setattr__(self, "links", links)
        object.__setattr__(self, "bytes", amounts)

    @classmethod
    def of(cls, pairs: Iterable[tuple[int, float]]) -> Demand:
        """The demand of (link, bytes) pairs."""
        rows = list(pairs)
        return cls(np.array([link for link, _ in rows], np.int64), np.array([b for _, b in rows]))

    @classmethod
    def on_distinct(cls, links: tuple[int, ...], amounts: tuple[float, ...]) -> Demand:
        """The demand of positive, finite bytes on links that differ, without checking them again."""
        demand = object.__new__(cls)
        object.__setattr__(demand, "links", read_only(np.array(links, np.int64)))
        object.__setattr__(demand, "bytes", read_only(np.array(amounts, np.float64)))
        object.__setattr__(demand, "_pairs", tuple(zip(links, amounts, strict=True)))
        return demand

    @property
    def pairs(self) -> Pairs:
        """(link, bytes) pairs as plain Python numbers."""
        if self._pairs is None:
            pairs = tuple(zip(self.links.tolist(), self.bytes.tolist(), strict=True))
            object.__setattr__(self, "_pairs", pairs)
            return pairs
        return self._pairs
