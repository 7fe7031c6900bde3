"""Chooses among the equally good paths of a pair, and detours where faults broke them all."""

from __future__ import annotations

import itertools
import math
from typing import Protocol

import numpy as np

from moesim.hwmodels.arrays import FloatArray, IntArray
from moesim.hwmodels.errors import InfeasibleError
from moesim.hwmodels.topologies.tables import (
    IDEAL_CHUNK,
    RouteSet,
    Spreading,
    in_order,
    joined,
    pair_hash,
    single_paths,
    spread_paths,
)
from moesim.hwmodels.topologies.wiring import Wiring, gpu_name


class WiredCluster(Protocol):
    """The part of a topology's interface that spreading uses."""

    left: FloatArray | None
    """[links] part of each link's bandwidth that faults leave; None without faults."""

    @property
    def wiring(self) -> Wiring:
        """Vertices and cables."""

    def fanout(self, src: IntArray, dst: IntArray) -> IntArray:
        """Number of equally good paths of each pair."""

    def preferred(self, src: IntArray, dst: IntArray) -> IntArray:
        """The path that destination-modulo tables choose."""

    def paths(self, src: IntArray, dst: IntArray, choice: IntArray) -> IntArray:
        """Links of the chosen paths."""

    def unavoidable(self, src: IntArray, dst: IntArray) -> IntArray:
        """Links that every path of a pair uses."""

    def live(self, paths: IntArray) -> FloatArray:
        """[n] smallest part of its bandwidth that faults leave any link of a path."""

    def detours(self) -> tuple[int, int]:
        """(number of ways, paths per way) that `detour_paths` offers for a pair; better ways come first."""

    def detour_paths(self, src: IntArray, dst: IntArray, way: int, turn: int) -> tuple[IntArray, IntArray]:
        """The pairs (indices into n) that have path number `turn` of detour `way`, and these paths."""


def single_routes(
    topo: WiredCluster, src: IntArray, dst: IntArray, spreading: Spreading, seed: int
) -> RouteSet:
    """Routes of one path each, chosen by destination modulo or by a hash of pair and seed (`ecmp`)."""
    fanout = topo.fanout(src, dst)
    by_hash = pair_hash(src, dst, seed)
    choice = by_hash % fanout if spreading == "ecmp" else topo.preferred(src, dst)
    paths = topo.paths(src, dst, choice)
    if topo.left is not None:
        # Destination-modulo tables know the destination only, and so does their way around a fault.
        mixed = by_hash if spreading == "ecmp" else pair_hash(dst, dst, seed)
        paths = _around_faults(topo, src, dst, paths, (choice, fanout), mixed)
    return single_paths(paths, topo.wiring.latency_s)


def _around_faults(
    topo: WiredCluster,
    src: IntArray,
    dst: IntArray,
    paths: IntArray,
    choices: tuple[IntArray, IntArray],
    mixed: IntArray,
) -> IntArray:
    """The paths, with those over dead links replaced by the next live one in an order mixed by hash."""
    broken = np.flatnonzero(topo.live(paths) <= 0)
    choice, fanout = choices
    hopeless = topo.live(topo.unavoidable(src[broken], dst[broken])) <= 0
    detour_only, broken = broken[hopeless], broken[~hopeless]
    stride = _coprime(fanout[broken], mixed[broken])
    for step in range(1, int(fanout[broken].max(initial=1))):
        if not len(broken):
            break
        ask = (choice[broken] + step * stride) % fanout[broken]
        tried = topo.paths(src[broken], dst[broken], ask)
        good = topo.live(tried) > 0
        paths[broken[good]] = tried[good]
        broken, stride = broken[~good], stride[~good]
    broken = np.sort(np.concatenate([detour_only, broken]))
    ways, turns = topo.detours()
    for turn, way in itertools.product(range(turns), range(ways)):
        if not len(broken):
            return paths
        have, tried = topo.detour_paths(src[broken], dst[broken], way, turn)
        good = topo.live(tried) > 0
        paths = _put(paths, broken[have[good]], tried[good])
        broken = np.delete(broken, have[good])
    require_no_unrouted_pair(src[broken], dst[broken])
    return paths


def spread_routes(topo: WiredCluster, src: IntArray, dst: IntArray) -> RouteSet:
    """Routes over all equally good live paths, in proportion to the bandwidth that faults leave."""
    fanout = topo.fanout(src, dst)
    hops = topo.paths(src[:1], dst[:1], np.zeros(min(1, len(src)), np.int64)).shape[1]
    parts: list[RouteSet] = []
    start = 0
    most = int(fanout.max(initial=1))
    step = max(1, IDEAL_CHUNK // max(1, most * hops))
    while start < len(src) or not parts:
        rows = slice(start, start + step)
        parts.append(_chunk(topo, src[rows], dst[rows], fanout[rows]))
        start += step
    return joined(parts)


def _chunk(topo: WiredCluster, src: IntArray, dst: IntArray, fanout: IntArray) -> RouteSet:
    most = int(fanout.max(initial=1))
    choices = [topo.paths(src, dst, np.minimum(c, fanout - 1)) for c in range(most)]
    paths = np.stack(choices, axis=1)
    weight = np.stack([topo.live(path) * (c < fanout) for c, path in enumerate(choices)], axis=1)
    broken = np.flatnonzero(weight.sum(axis=1) <= 0)
    if len(broken):
        healthy = np.delete(np.arange(len(src)), broken)
        detours = _spread_detours(topo, src[broken], dst[broken])
        direct = spread_paths(paths[healthy], weight[healthy], topo.wiring.latency_s)
        return in_order([direct, detours], [healthy, broken])
    return spread_paths(paths, weight, topo.wiring.latency_s)


def _spread_detours(topo: WiredCluster, src: IntArray, dst: IntArray) -> RouteSet:
    """Routes over all live paths of the first way that has one, in proportion to their bandwidth."""
    rows: list[IntArray] = []
    parts: list[RouteSet] = []
    left = np.arange(len(src))
    ways, turns = topo.detours()
    for way in range(ways):
        if not len(left):
            break
        stacked, weight = _all_turns(topo, src[left], dst[left], way, turns)
        good = weight.sum(axis=1) > 0
        if good.any():
            rows.append(left[good])
            parts.append(spread_paths(stacked[good], weight[good], topo.wiring.latency_s))
            left = left[~good]
    require_no_unrouted_pair(src[left], dst[left])
    return in_order(parts, rows)


def _all_turns(
    topo: WiredCluster, src: IntArray, dst: IntArray, way: int, turns: int
) -> tuple[IntArray, FloatArray]:
    """Every path of a way [n, turns, hops], and the part of its bandwidth that is left [n, turns]."""
    weight = np.zeros((len(src), turns))
    by_turn: list[IntArray] = []
    for turn in range(turns):
        have, tried = topo.detour_paths(src, dst, way, turn)
        path = np.full((len(src), tried.shape[1]), -1, np.int64)
        path[have] = tried
        weight[have, turn] = topo.live(tried)
        by_turn.append(path)
        if not len(have):  # in that case no pair has a further path either
            by_turn += [path] * (turns - 1 - turn)
            break
    width = max(path.shape[1] for path in by_turn)
    return np.stack([_widened(path, width) for path in by_turn], axis=1), weight


def require_no_unrouted_pair(src: IntArray, dst: IntArray) -> None:
    """Raise InfeasibleError, which names the first pair, where any pair is given: none has a route."""
    if len(src):
        raise InfeasibleError(
            f"no route is left from rank {gpu_name(int(src[0]))} to rank {gpu_name(int(dst[0]))}"
            + (f" (and for {len(src) - 1} more pairs)" if len(src) > 1 else "")
            + ": every path and detour crosses a link that is down; take the rank out or repair a link"
        )


def _coprime(n: IntArray, mixed: IntArray) -> IntArray:
    """A step coprime to each n, so that it visits all of 0 to n - 1; the hash spreads the load."""
    step = np.ones(len(n), np.int64)
    for value in np.unique(n):
        steps = np.array([s for s in range(1, int(value)) if math.gcd(s, int(value)) == 1] or [1])
        rows = n == value
        step[rows] = steps[mixed[rows] % len(steps)]
    return step


def _widened(paths: IntArray, width: int) -> IntArray:
    return np.pad(paths, ((0, 0), (0, width - paths.shape[1])), constant_values=-1)


def _put(paths: IntArray, rows: IntArray, new: IntArray) -> IntArray:
    """`paths` with some rows replaced, and widened where the new ones are longer."""
    width = max(paths.shape[1], new.shape[1])
    paths = _widened(paths, width)
    paths[rows] = _widened(new, width)
    return paths
