"""The topology of a cluster: a scale-up network in every node and, optionally, a scale-out network."""

from __future__ import annotations

import numpy as np

from moesim.hwmodels.arrays import IntArray
from moesim.hwmodels.topologies.base import Topology
from moesim.hwmodels.topologies.description import NetworkTier, NodeFigures
from moesim.hwmodels.topologies.part import ScaleOutPart, ScaleUpPart
from moesim.hwmodels.topologies.tables import pair_hash, placed, widened
from moesim.hwmodels.topologies.wiring import Wiring


class ClusterTopology(Topology):
    """Joins any scale-up part with any scale-out part.

    Traffic between nodes uses NICs. Where the scale-out part forwards (planes, rails), traffic first moves
    inside the sender's node. A transport that forwards at the receiver instead (DeepEP) asks for the two
    routes one after the other. Where all equally good paths are down, detours are tried in this order: first
    those of the part; then the rail of the sender, that of the receiver and the other rails, with forwarding
    inside the node at one or both ends. Inside a node the last resort is its NICs.
    """

    def __init__(self, node: NodeFigures, nodes: int, parts: tuple[ScaleUpPart, ScaleOutPart | None]) -> None:
        """Takes parts that were made for the same node and number of nodes."""
        super().__init__(node, nodes)
        self.scale_up, self.scale_out = parts

    def wire(self, wiring: Wiring) -> None:
        """Add the vertices and cables of both parts."""
        with wiring.scale_up():
            self.scale_up.wire(wiring)
        if self.scale_out is not None:
            self.scale_out.wire(wiring)

    def size(self) -> tuple[int, int]:
        """(switches, cables) of both parts together."""
        parts = [part.size() for part in (self.scale_up, self.scale_out) if part is not None]
        return sum(switches for switches, _ in parts), sum(cables for _, cables in parts)

    def tiers(self) -> tuple[NetworkTier, ...]:
        """Those of the scale-out part."""
        return () if self.scale_out is None else self.scale_out.tiers()

    def _split(self, src: IntArray, dst: IntArray) -> tuple[IntArray, IntArray]:
        """Indices of the pairs inside a node, and of those between nodes."""
        same = src // self.gpus_per_node == dst // self.gpus_per_node
        return np.flatnonzero(same), np.flatnonzero(~same)

    def fanout(self, src: IntArray, dst: IntArray) -> IntArray:
        """Number of equally good paths of each pair."""
        inside, across = self._split(src, dst)
        fanout = np.ones(len(src), np.int64)
        fanout[inside] = self.scale_up.fanout(src[inside], dst[inside])
        if self.scale_out is not None and len(across):
            sender = self.scale_out.sender(src[across], dst[across])
            forward = self.scale_up.fanout(src[across], sender)
            fanout[across] = self.scale_out.fanout(sender, dst[across]) * forward
        return fanout

    def preferred(self, src: IntArray, dst: IntArray) -> IntArray:
        """The path that destination-modulo routing takes."""
        inside, across = self._split(src, dst)
        choice = np.zeros(len(src), np.int64)
        choice[inside] = self.scale_up.preferred(src[inside], dst[inside])
        if self.scale_out is not None and len(across):
            sender = self.scale_out.sender(src[across], dst[across])
            forward = self.scale_up.preferred(src[across], sender)
            out = self.scale_out.preferred(sender, dst[across])
            choice[across] = out + forward * self.scale_out.fanout(sender, dst[across])
        return choice

    def paths(self, src: IntArray, dst: IntArray, choice: IntArray) -> IntArray:
        """Links of the chosen path of each pair, padded with -1."""
        inside, across = self._split(src, dst)
        pieces = [(inside, self.scale_up.paths(src[inside], dst[inside], choice[inside]))]
        if self.scale_out is not None:
            s, d, c = src[across], dst[across], choice[across]
            sender = self.scale_out.sender(s, d)
            n_out = self.scale_out.fanout(sender, d)
            out = self.scale_out.paths(sender, d, c % n_out)
            if self.scale_out.forwards:
                out = np.hstack([self.scale_up.paths(s, sender, c // n_out), out])
            pieces.append((across, out))
        paths = np.full((len(src), 1), -1, np.int64)
        for rows, piece in pieces:
            paths = placed(paths, rows, piece)
        return paths

    # -- detours -------------------------------------------------------------------------------------

    def _rail_choices(self) -> int:
        """Paths of the scale-out part that are tried on every rail."""
        assert self.scale_out is not None
        some = np.arange(min(self.n_gpus, 4096))
        last = np.full(len(some), self.n_gpus - 1)
        return int(self.scale_out.fanout(some, last).max(initial=1)) + self.scale_out.detours()

    def unavoidable(self, src: IntArray, dst: IntArray) -> IntArray:
        """[n, 2] the links of the two NICs for pairs in different nodes, -1 inside a node."""
        if self.scale_out is None:
            return super().unavoidable(src, dst)
        inside = src // self.gpus_per_node == dst // self.gpus_per_node
        nics = self.scale_out.nic_links(self.scale_out.sender(src, dst), dst)
        return np.where(inside[:, None], -1, nics)

    def detours(self) -> tuple[int, int]:
        """(number of ways, paths per way)."""
        own = self.scale_up.detours()
        if self.scale_out is None:
            return own, 1
        return max(own, self.scale_out.detours()) + self.gpus_per_node + 2, self._rail_choices()

    def detour_paths(self, src: IntArray, dst: IntArray, way: int, turn: int) -> tuple[IntArray, IntArray]:
        """The pairs that have path number `turn` of detour `way`, and these paths."""
        nothing = np.zeros(0, np.int64), np.zeros((0, 1), np.int64)
        inside, across = self._split(src, dst)
        out = self.scale_out
        first = max(self.scale_up.detours(), 0 if out is None else out.detours())
        if out is not None and way >= first:
            return self._by_rail(src, dst, way - first, turn)
        if turn:
            return nothing
        rows, pieces = [], []
        if way < self.scale_up.detours() and len(inside):
            rows.append(inside)
            pieces.append(self.scale_up.detour_paths(src[inside], dst[inside], way))
        if out is not None and way < out.detours() and len(across):
            s, d = src[across], dst[across]
            sender = out.sender(s, d)
            rows.append(across)
            pieces.append(np.hstack([self._inside(s, sender), out.detour_paths(sender, d, way)]))
        if not rows:
            return nothing
        width = max(paths.shape[1] for paths in pieces)
        return np.concatenate(rows), np.vstack([widened(paths, width) for paths in pieces])

    def _by_rail(self, src: IntArray, dst: IntArray, order: int, turn: int) -> tuple[IntArray, IntArray]:
        """Paths that forward to a rail, take its path number `turn` across, and forward to dst."""
        assert self.scale_out is not None
        here, there = src // self.gpus_per_node, dst // self.gpus_per_node
        mixed = pair_hash(src, dst, 0)
        local = {0: src % self.gpus_per_node, 1: dst % self.gpus_per_node}.get(
            order, (mixed + order) % self.gpus_per_node
        )
        sender, receiver = here * self.gpus_per_node + local, there * self.gpus_per_node + local
        # Inside one node no rail helps, so the two GPUs' own NICs are the last resort.
        inside = here == there
        sender, receiver = np.where(inside, src, sender), np.where(inside, dst, receiver)
        fanout = self.scale_out.fanout(sender, receiver)
        have = np.flatnonzero((turn < fanout + self.scale_out.detours()) & (src != dst))
        have = have[self.scale_out.joined(sender[have], receiver[have]) > 0]
        have = have[self.live(self.scale_out.nic_links(sender[have], receiver[have])) > 0]
        s, d, a, b, n = (x[have] for x in (src, dst, sender, receiver, fanout))
        out = self.scale_out.paths(a, b, (mixed[have] + turn) % n)
        beyond = np.flatnonzero(turn >= n)
        if len(beyond):
            for offset in np.unique(turn - n[beyond]):
                rows = beyond[turn - n[beyond] == offset]
                out = placed(out, rows, self.scale_out.detour_paths(a[rows], b[rows], int(offset)))
        return have, np.hstack([self._inside(s, a), out, self._inside(b, d)])

    def _inside(self, src: IntArray, dst: IntArray) -> IntArray:
        return self.scale_up.paths(src, dst, self.scale_up.preferred(src, dst))
