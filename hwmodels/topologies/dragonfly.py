"""The dragonfly topology: groups of fully joined switches, with global cables between all groups."""

from __future__ import annotations

from typing import Literal, Self

import numpy as np
from pydantic import model_validator

from moesim.hwmodels.arrays import IntArray
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.provenance import SourcedCount
from moesim.hwmodels.topologies.description import NetworkTier, NodeFigures, ScaleOutFabric
from moesim.hwmodels.topologies.part import ScaleOutPart, ScaleOutSpec, absent_where, columns, link
from moesim.hwmodels.topologies.wiring import Wiring

MOST_DETOURS = 128
"""Most detours around a broken global or local cable that are tried."""


class DragonflyFabric(ScaleOutFabric):
    """Groups of fully joined switches; every pair of groups has at least one global link."""

    kind: Literal["dragonfly"]
    switch_ports: SourcedCount
    endpoints_per_switch: SourcedCount
    switches_per_group: SourcedCount
    global_links_per_switch: SourcedCount

    @model_validator(mode="after")
    def _ports_suffice(self) -> Self:
        p, a, h = (
            x.n for x in (self.endpoints_per_switch, self.switches_per_group, self.global_links_per_switch)
        )
        if min(p, a, h) < 1:
            raise ValueError("endpoints_per_switch, switches_per_group, global_links_per_switch: at least 1")
        if p + a - 1 + h > self.switch_ports.n:
            raise ValueError(
                f"{p} endpoints, {a - 1} local and {h} global links need {p + a - 1 + h} ports a switch, "
                f"but switch_ports={self.switch_ports.n}"
            )
        return self


class Dragonfly(ScaleOutPart):
    """Groups of `a` switches with p endpoints and h global links each (Kim et al., ISCA 2008; eq. N4).

    g groups have a h global ports each. Every pair of groups gets m = a h // (g - 1) cables; of the s ports
    that are left over, pairs join each group with the next s // 2 groups on either side, so that at most
    one port per group (none with two groups) stays free. A cable uses port (offset - 1) + copy (g - 1) of its
    group, where offset is how many groups further on the other end lies; port i belongs to switch i mod a.
    The equally good paths are the cables between the two groups, each with at most one local hop at either
    end. Detours use any third group or, inside a group, any third switch.
    """

    def __init__(self, node: NodeFigures, nodes: int, fabric: DragonflyFabric) -> None:
        """Raises InputError where there are more groups than global links can join."""
        super().__init__(node, nodes, fabric)
        self.p, self.a = fabric.endpoints_per_switch.n, fabric.switches_per_group.n
        self.nics_per_gpu = node.n_nics_per_gpu
        if self.p % self.nics_per_gpu:
            raise InputError(
                f"nics_per_gpu={self.nics_per_gpu} does not divide endpoints_per_switch={self.p}"
            )
        self.gpus_per_switch = self.p // self.nics_per_gpu
        self.groups = -(-self.n_gpus // (self.gpus_per_switch * self.a))
        self.ports = self.a * fabric.global_links_per_switch.n
        if self.groups > self.ports + 1:
            raise InputError(
                f"a dragonfly with {self.ports} global links a group has at most {self.ports + 1} groups "
                f"({(self.ports + 1) * self.a * self.p} endpoints), but {self.groups} are needed: use fewer "
                f"nodes, or more global links"
            )
        others = max(1, self.groups - 1)
        self.copies = self.ports // others if self.groups > 1 else 0
        spare = self.ports - self.copies * others if self.groups > 1 else 0
        # A ring of offset d uses two ports per group; at offset g/2 it would join each pair of groups twice.
        self.rings = min(spare // 2, (self.groups - 1) // 2)

    def switch(self, gpu: IntArray) -> IntArray:
        """The switch of a GPU, numbered over all groups."""
        return gpu // self.gpus_per_switch

    def wire(self, wiring: Wiring) -> None:
        """Add local cables by group, global ones by copy, the rings of spare ports, and then NICs."""
        a, g = self.a, self.groups
        self.vertex = wiring.add_vertices("router", a * g, lambda i: f"router:{i // a}.{i % a}")
        rate = self.fabric.link_bandwidth.value
        i, j = np.triu_indices(a, 1)
        group = np.repeat(np.arange(g), len(i)) * a
        self.local = wiring.add_cables(
            "local",
            self.vertex + group + np.tile(i, g),
            self.vertex + group + np.tile(j, g),
            (rate, rate),
            self.fabric.hop_latency_s,
        )
        low, high = np.triu_indices(g, 1)
        tails = [(low, high, np.full(len(low), copy)) for copy in range(self.copies)]
        ring = np.arange(g)
        tails += [(ring, (ring + 1 + d) % g, np.full(g, self.copies)) for d in range(self.rings)]
        empty = np.zeros(0, np.int64)
        one, other, copy = (np.concatenate([part[k] for part in tails] or [empty]) for k in range(3))
        self.globals = wiring.add_cables(
            "global",
            self.vertex + one * a + self._port(one, other, copy) % a,
            self.vertex + other * a + self._port(other, one, copy) % a,
            (rate, rate),
            self.fabric.hop_latency_s,
            copies=self._number_among_equal(one, other, copy),
            optical=True,
        )
        self.nics = self.wire_nics(wiring, self.vertex + self.switch(np.arange(self.n_gpus)))

    def climbs(self) -> int:
        """One: a GPU's own router has a link to the other buildings."""
        return 1

    def climb(self, gpu: IntArray, choice: IntArray) -> tuple[IntArray, IntArray]:
        """The NIC up to the GPU's router."""
        return columns(link(self.nics + gpu)), self.vertex + self.switch(gpu)

    def top_switches(self) -> IntArray:
        """All routers."""
        return self.vertex + np.arange(self.a * self.groups)

    def n_top_switches(self) -> int:
        """Their number."""
        return self.a * self.groups

    def tiers(self) -> tuple[NetworkTier, ...]:
        """The global cables of a group, if its NICs send more; loads are taken as spread over all of them."""
        gpus, cables = self.gpus_per_switch * self.a, self.ports * self.fabric.link_bandwidth.value
        if self.groups == 1 or cables >= gpus * self.nic_rates()[1]:
            return ()
        return (NetworkTier("global links of a group", gpus, cables),)

    def size(self) -> tuple[int, int]:
        """(routers, cables); the cables are local ones, global ones, rings of spare ports, and NICs."""
        a, g = self.a, self.groups
        between = self.copies * (g * (g - 1) // 2) + self.rings * g
        return a * g, g * (a * (a - 1) // 2) + between + self.n_gpus

    def _number_among_equal(self, one: IntArray, other: IntArray, copy: IntArray) -> IntArray:
        """Number of each cable among those between the same two switches, from 0."""
        a = self.a
        here = one * a + self._port(one, other, copy) % a
        there = other * a + self._port(other, one, copy) % a
        key = np.minimum(here, there) * (a * self.groups) + np.maximum(here, there)
        order = np.argsort(key, kind="stable")
        ordered = key[order]
        starts = np.concatenate([[True], ordered[1:] != ordered[:-1]]) if len(key) else np.zeros(0, bool)
        index = np.arange(len(key))
        number = np.zeros(len(key), np.int64)
        number[order] = index - np.maximum.accumulate(np.where(starts, index, 0))
        return number

    def _port(self, here: IntArray, there: IntArray, copy: IntArray) -> IntArray:
        """The global port of group `here` for a cable to group `there`."""
        offset = (there - here) % self.groups
        plain = offset - 1 + copy * (self.groups - 1)
        ahead = offset <= self.groups // 2
        spare = self.copies * (self.groups - 1) + np.where(
            ahead, 2 * (offset - 1), 2 * (self.groups - offset - 1) + 1
        )
        port: IntArray = np.where(copy == self.copies, spare, plain)
        return port

    def _cable(self, here: IntArray, there: IntArray, copy: IntArray) -> tuple[IntArray, IntArray]:
        """(cable, 1 where it is traversed backwards) of a copy between two groups."""
        g = self.groups
        low, high = np.minimum(here, there), np.maximum(here, there)
        pair = low * (2 * g - low - 1) // 2 + high - low - 1
        plain = copy * (g * (g - 1) // 2) + pair
        offset = (there - here) % g
        ahead = offset <= g // 2
        from_ = np.where(ahead, here, there)
        spare = self.copies * (g * (g - 1) // 2) + (np.where(ahead, offset, g - offset) - 1) * g + from_
        extra = copy == self.copies
        return self.globals + np.where(extra, spare, plain), np.where(extra, ~ahead, here > there).astype(
            np.int64
        )

    def fanout(self, src: IntArray, dst: IntArray) -> IntArray:
        """One path inside a group; between groups, one for every cable that joins them."""
        here, there = self.switch(src) // self.a, self.switch(dst) // self.a
        return np.where(here == there, 1, self._cables_between(here, there))

    def _cables_between(self, here: IntArray, there: IntArray) -> IntArray:
        offset = (there - here) % self.groups
        near = np.minimum(offset, self.groups - offset) <= self.rings
        count: IntArray = np.where(near, self.copies + 1, self.copies)
        return count

    def preferred(self, src: IntArray, dst: IntArray) -> IntArray:
        """The destination's number modulo the number of paths."""
        return dst % self.fanout(src, dst)

    def _local(self, one: IntArray, other: IntArray) -> IntArray:
        """Link between two switches of a group, given by their global numbers; -1 where they are the same."""
        a = self.a
        group, x, y = one // a, one % a, other % a
        i, j = np.minimum(x, y), np.maximum(x, y)
        cable = self.local + group * (a * (a - 1) // 2) + i * (2 * a - i - 1) // 2 + j - i - 1
        return absent_where(x == y, np.where(x > y, link(cable, back=True), link(cable)))

    def _between(self, here: IntArray, there: IntArray, choice: IntArray) -> tuple[IntArray, ...]:
        """Local, global and local link between two switches; inside a group only the first."""
        a = self.a
        one, other = here // a, there // a
        out = one * a + self._port(one, other, choice) % a
        into = other * a + self._port(other, one, choice) % a
        cable, back = self._cable(one, other, choice)
        inside = one == other
        middle = absent_where(inside, 2 * cable + back)
        first = np.where(inside, self._local(here, there), self._local(here, out))
        last = absent_where(inside, self._local(into, there))
        return first, middle, last

    def paths(self, src: IntArray, dst: IntArray, choice: IntArray) -> IntArray:
        """Links of each path: NIC, (local,) (global,) (local,) NIC."""
        return self.between_nics(src, dst, *self._between(self.switch(src), self.switch(dst), choice))

    def detours(self) -> int:
        """Number of detours over a third switch, at most MOST_DETOURS; one per group comes first."""
        return min(self.a * self.groups, MOST_DETOURS)

    def detour_paths(self, src: IntArray, dst: IntArray, number: int) -> IntArray:
        """Paths over a third switch, in a third group or, for pairs inside a group, in their own."""
        here, there = self.switch(src), self.switch(dst)
        a, g = self.a, self.groups
        inside = here // a == there // a
        group = (here // a + there // a + number) % g
        via = np.where(inside, here // a * a + (here + there + number) % a, group * a + number // g % a)
        zero = np.zeros(len(src), np.int64)
        return self.between_nics(src, dst, *self._between(here, via, zero), *self._between(via, there, zero))


DRAGONFLY = ScaleOutSpec("dragonfly", DragonflyFabric, Dragonfly, "dragonfly-ib-400g")
