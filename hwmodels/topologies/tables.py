"""Links and routes as arrays, for code that handles all pairs at once, and single links for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from msgspec import Struct

from moesim.hwmodels.arrays import BoolArray, FloatArray, IntArray

Spreading = Literal["modulo", "ecmp", "ideal"]

IDEAL_CHUNK = 1 << 22
"""Most entries of the (pair, choice, hop) table that ideal spreading holds at a time."""


class Link(Struct, frozen=True):
    """One direction of one full-duplex cable; the other direction is another Link.

    `bytes_per_s` is the payload bandwidth, `nominal_bytes_per_s` that of the datasheet.
    `latency_s` is this link's share of the end-to-end latency of a route.
    """

    id: str
    kind: str
    tail: str
    head: str
    bytes_per_s: float
    nominal_bytes_per_s: float
    latency_s: float


Route = tuple[Link, ...]


def route_latency_s(route: Sequence[Link]) -> float:
    """End-to-end latency of a route, the sum over its links; 0 for the empty route of a GPU to itself."""
    return sum(link.latency_s for link in route)


def route_bytes_per_s(route: Sequence[Link]) -> float:
    """Payload bandwidth of an idle route, that of its slowest link; infinite for the empty route."""
    return min((link.bytes_per_s for link in route), default=float("inf"))


class LinkTable(Struct, frozen=True):
    """Every directed link of a topology, [links]; the index is the link's number in a RouteSet.

    `bytes_per_s` is the payload capacity of one direction (0 where a fault took the link),
    `nominal_bytes_per_s` that of the datasheet.
    """

    ids: tuple[str, ...]
    kinds: tuple[str, ...]
    bytes_per_s: FloatArray
    nominal_bytes_per_s: FloatArray
    latency_s: FloatArray
    scale_up: BoolArray
    """[links] whether each lies inside a node or scale-up domain."""


class RouteSet(Struct, frozen=True):
    """Routes of n pairs: pair i takes `links[indptr[i]:indptr[i + 1]]`, empty for a GPU to itself.

    `share` is the part of the pair's bytes that a link carries, 1 on a single path and less where bytes
    spread over parallel paths. `latency_s` [n] is that of the path with the highest latency. A single path
    lists its links in order; spread paths list them by link number.
    """

    indptr: IntArray
    links: IntArray
    share: FloatArray
    latency_s: FloatArray


def single_paths(paths: IntArray, latency_s: FloatArray) -> RouteSet:
    """Routes of one path each, from link numbers [n, hops] padded with -1, and the links' latencies."""
    used = paths >= 0
    indptr = np.concatenate([[0], np.cumsum(used.sum(axis=1))]).astype(np.int64)
    links = paths[used]
    return RouteSet(indptr, links, np.ones(len(links)), path_latency_s(paths, latency_s))


def path_latency_s(paths: IntArray, latency_s: FloatArray) -> FloatArray:
    """[n] sum of the links' latencies along each path [n, hops] padded with -1."""
    total = np.zeros(len(paths))
    for column in paths.T:  # a fixed order of additions gives the same bits everywhere
        total += np.where(column >= 0, latency_s[column], 0.0)
    return total


def spread_paths(paths: IntArray, weight: FloatArray, latency_s: FloatArray) -> RouteSet:
    """Routes over several paths each, from paths [n, choices, hops] and their weights [n, choices].

    A link that several paths of a pair share is listed once, with the sum of their shares.
    """
    n, choices, hops = paths.shape
    flat = np.where((weight > 0)[:, :, None], paths, -1).reshape(n, choices * hops)
    order = np.argsort(flat, axis=1, kind="stable")
    links = np.take_along_axis(flat, order, axis=1)
    weights = np.take_along_axis(np.repeat(weight, hops, axis=1), order, axis=1)
    first = np.ones_like(links, dtype=bool)
    first[:, 1:] = links[:, 1:] != links[:, :-1]
    starts = np.flatnonzero(first)
    summed = np.add.reduceat(weights.ravel(), starts) if len(starts) else np.zeros(0)
    row, link = starts // max(1, choices * hops), links.ravel()[starts]
    keep = link >= 0
    row, link, summed = row[keep], link[keep], summed[keep]
    indptr = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=n))]).astype(np.int64)
    total = np.zeros(n)
    longest = np.zeros(n)
    for choice in range(choices):
        total += weight[:, choice]
        one = path_latency_s(paths[:, choice], latency_s)
        longest = np.maximum(longest, np.where(weight[:, choice] > 0, one, 0.0))
    return RouteSet(indptr, link, summed / total[row], longest)


def joined(parts: Sequence[RouteSet]) -> RouteSet:
    """Concatenates route sets."""
    offsets = np.cumsum([0, *(len(part.links) for part in parts)])
    return RouteSet(
        np.concatenate(
            [[0], *(part.indptr[1:] + offset for part, offset in zip(parts, offsets, strict=False))]
        ).astype(np.int64),
        np.concatenate([part.links for part in parts]),
        np.concatenate([part.share for part in parts]),
        np.concatenate([part.latency_s for part in parts]),
    )


def in_order(parts: Sequence[RouteSet], rows: Sequence[IntArray]) -> RouteSet:
    """Merges route sets of scattered pairs; pair i of a part becomes row `rows[part][i]` of the whole."""
    both = joined(parts)
    order = np.argsort(np.concatenate(rows), kind="stable")
    counts = np.diff(both.indptr)[order]
    indptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    take = np.repeat(both.indptr[:-1][order] - indptr[:-1], counts) + np.arange(indptr[-1])
    return RouteSet(indptr, both.links[take], both.share[take], both.latency_s[order])


def pair_hash(src: IntArray, dst: IntArray, seed: int) -> IntArray:
    """[n] a well-mixed non-negative number of each pair (the finaliser of splitmix64), as an ECMP hash."""
    with np.errstate(over="ignore"):
        x = src.astype(np.uint64) << np.uint64(32) | dst.astype(np.uint64)
        x ^= np.uint64(seed % 2**63) * np.uint64(0xD1342543DE82EF95)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
        return ((x ^ (x >> np.uint64(31))) >> np.uint64(1)).astype(np.int64)


def widened(paths: IntArray, width: int) -> IntArray:
    """Paths [n, hops] padded with -1 to `width` hops."""
    result = np.full((len(paths), width), -1, dtype=np.int64)
    result[:, : paths.shape[1]] = paths
    return result


def placed(paths: IntArray, rows: IntArray, new: IntArray) -> IntArray:
    """`paths` with some rows replaced, and widened where the new ones are longer."""
    result = widened(paths, max(paths.shape[1], new.shape[1]))
    result[rows] = widened(new, result.shape[1])
    return result
