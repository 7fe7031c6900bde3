"""The vertices and cables of a topology as arrays, their counts and what they cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property

import numpy as np
from msgspec import Struct, field

from moesim.hwmodels.arrays import BoolArray, FloatArray, IntArray
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.price import FabricPrices
from moesim.hwmodels.validation import nearest


class Vertices(Struct, frozen=True):
    """A run of equal vertices; each stands for `chips` physical switch chips with evenly striped traffic."""

    first: int
    count: int
    kind: str
    name: Callable[[int], str]
    chips: int
    planes: IntArray | None
    """[count] scale-out plane of each vertex; None without planes."""
    scale_up: bool
    """Whether they belong to the inside of a node or scale-up domain."""


class Cables(Struct, frozen=True):
    """A run of cables of one kind, with the end vertices of each and the bandwidth of one direction.

    Each stands for `strands` physical cables; `optical` says whether they need transceivers.
    """

    first: int
    kind: str
    tails: IntArray
    heads: IntArray
    copies: IntArray | None
    payload_bytes_per_s: FloatArray
    nominal_bytes_per_s: FloatArray
    latency_s: FloatArray
    strands: int
    optical: bool
    scale_up: bool
    """Whether they belong to the inside of a node or scale-up domain."""


class Wiring:
    """Vertices (GPUs first) and cables; cable c is link 2c from its tail to its head and 2c + 1 back."""

    def __init__(self, n_gpus: int) -> None:
        """Starts with the GPUs, named gpu:0, gpu:1, ..., and no cables."""
        self.n_gpus = n_gpus
        self.vertices: list[Vertices] = []
        self.cables: list[Cables] = []
        self._scale_up = False
        self._prefix, self._first_gpu, self._own_gpus = "", 0, 0
        self.add_vertices("gpu", n_gpus, gpu_name)

    @contextmanager
    def scale_up(self) -> Iterator[None]:
        """Marks everything added inside this context as the inside of nodes or scale-up domains."""
        self._scale_up = True
        try:
            yield
        finally:
            self._scale_up = False

    @contextmanager
    def building(self, prefix: str, first_gpu: int, gpus: int) -> Iterator[None]:
        """Inside it a part counts its GPUs from 0, which are `first_gpu` on, and names get a prefix."""
        self._prefix, self._first_gpu, self._own_gpus = prefix, first_gpu, gpus
        try:
            yield
        finally:
            self._prefix, self._first_gpu, self._own_gpus = "", 0, 0

    def add_vertices(
        self,
        kind: str,
        count: int,
        name: Callable[[int], str],
        chips: int = 1,
        planes: IntArray | None = None,
    ) -> int:
        """Add `count` vertices and return the number of the first."""
        first, prefix = self.n_vertices, self._prefix
        named = (lambda index: f"{prefix}{name(index)}") if prefix else name
        self.vertices.append(Vertices(first, count, kind, named, chips, planes, self._scale_up))
        return first

    def add_cables(
        self,
        kind: str,
        tails: IntArray,
        heads: IntArray,
        rates: tuple[float | FloatArray, float | FloatArray],
        latency_s: float | FloatArray,
        *,
        copies: IntArray | None = None,
        strands: int = 1,
        optical: bool = False,
    ) -> int:
        """Add cables [n] with `rates` (payload, nominal) in bytes/s per direction; returns the first number.

        `copies` [n] numbers parallel cables between the same two vertices.
        """
        first, n = self.n_cables, len(tails)
        if self._own_gpus:  # switches have higher numbers than all GPUs
            tails = np.where(tails < self._own_gpus, tails + self._first_gpu, tails)
        payload, nominal, latency = (
            np.broadcast_to(np.asarray(x, dtype=np.float64), (n,)) for x in (*rates, latency_s)
        )
        self.cables.append(
            Cables(
                first, kind, tails, heads, copies, payload, nominal, latency, strands, optical, self._scale_up
            )
        )
        return first

    @property
    def n_vertices(self) -> int:
        """Number of vertices so far."""
        return self.vertices[-1].first + self.vertices[-1].count if self.vertices else 0

    @property
    def n_cables(self) -> int:
        """Number of cables so far."""
        return self.cables[-1].first + len(self.cables[-1].tails) if self.cables else 0

    @cached_property
    def tails(self) -> IntArray:
        """[cables] the tail vertex of each; cached, so read it only after the last cable was added."""
        return self._numbers(lambda block: block.tails)

    @cached_property
    def heads(self) -> IntArray:
        """[cables] the head vertex of each."""
        return self._numbers(lambda block: block.heads)

    @cached_property
    def copies(self) -> IntArray:
        """[cables] number among parallel cables; -1 where cables are not numbered."""
        return self._numbers(lambda b: np.full(len(b.tails), -1) if b.copies is None else b.copies)

    def _numbers(self, what: Callable[[Cables], IntArray]) -> IntArray:
        return np.concatenate([what(block) for block in self.cables] or [np.zeros(0, np.int64)])

    def per_cable(self, what: Callable[[Cables], FloatArray]) -> FloatArray:
        """[cables] a figure of each cable."""
        return np.concatenate([what(block) for block in self.cables] or [np.zeros(0)])

    @cached_property
    def scale_up_links(self) -> BoolArray:
        """[links] whether each belongs to the inside of a node or scale-up domain."""
        blocks = [np.full(2 * len(block.tails), block.scale_up) for block in self.cables]
        return np.concatenate(blocks or [np.zeros(0, bool)])

    @cached_property
    def latency_s(self) -> FloatArray:
        """[links] part of the end-to-end latency that each link adds."""
        return np.repeat(self.per_cable(lambda block: block.latency_s), 2)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """[vertices] the name of each."""
        return tuple(block.name(index) for block in self.vertices for index in range(block.count))

    @cached_property
    def vertex_by_name(self) -> dict[str, int]:
        """The vertex of each name."""
        return {name: index for index, name in enumerate(self.names)}

    def vertex(self, name: str) -> int:
        """The vertex called `name`; raises InputError, with the nearest name, for an unknown one."""
        vertex = self.vertex_by_name.get(name)
        if vertex is None:
            hint = nearest(name, list(self.names[:2000]) + list(self.names[-2000:]))
            raise InputError(f"the topology has no vertex {name!r}{hint}")
        return vertex

    def block_of(self, vertex: int) -> Vertices:
        """The run that a vertex belongs to."""
        return next(block for block in self.vertices if vertex < block.first + block.count)

    def block_of_cable(self, cable: int) -> Cables:
        """The run that a cable belongs to."""
        return next(block for block in self.cables if cable < block.first + len(block.tails))

    def link_id(self, link: int) -> str:
        """The name of a link: tail->head, with #n where parallel cables are numbered."""
        cable, back = divmod(link, 2)
        ends = (self.names[int(self.tails[cable])], self.names[int(self.heads[cable])])
        tail, head = reversed(ends) if back else ends
        copy = int(self.copies[cable])
        return f"{tail}->{head}" if copy < 0 else f"{tail}->{head}#{copy}"


def gpu_name(gpu: int) -> str:
    """Name of a GPU in graphs and links, by its global number (node-major)."""
    return f"gpu:{gpu}"


# -- counts and cost -------------------------------------------------------------------------------

NIC_KIND = "nic"


class Inventory(Struct, frozen=True):
    """Counts of a topology, and the cost of its scale-out network.

    `endpoints` are NIC ports. `switches` and `cables` count physical ones by kind; `scale_out_switches` are
    those of the scale-out network. `switch_ports` are those in use. `inter_switch_links` are scale-out cables
    between switches ("links" of arXiv 2505.09343, Table 3). Each optical cable has two `transceivers`.
    `cost_usd` is by part, and empty where no prices are known.
    """

    endpoints: int
    switches: dict[str, int]
    scale_out_switches: int
    switch_ports: int
    cables: dict[str, int]
    inter_switch_links: int
    transceivers: int
    cost_usd: dict[str, float] = field(default_factory=dict)

    @property
    def total_usd(self) -> float | None:
        """Cost of the scale-out network; None where no prices are known."""
        return sum(self.cost_usd.values()) if self.cost_usd else None

    @property
    def usd_per_endpoint(self) -> float | None:
        """Cost per NIC port; None without prices or endpoints."""
        total = self.total_usd
        return None if total is None or not self.endpoints else total / self.endpoints


def count_inventory(wiring: Wiring, prices: FabricPrices | None) -> Inventory:
    """Count a wiring; every chip of a striped switch and every strand of a cable counts.

    Cost: docs/model.md, eq. N1.
    """
    switches, cables = Counter[str](), Counter[str]()
    outer = endpoints = inter_switch = transceivers = ports = 0
    for block in wiring.vertices:
        if block.kind != "gpu" and block.count * block.chips:
            switches[block.kind] += block.count * block.chips
            outer += 0 if block.scale_up else block.count * block.chips
    for run in wiring.cables:
        if not (n := len(run.tails) * run.strands):
            continue
        cables[run.kind] += n
        transceivers += 2 * n if run.optical else 0
        if not run.scale_up:
            tails, heads = run.tails >= wiring.n_gpus, run.heads >= wiring.n_gpus
            ports += (int(np.sum(tails)) + int(np.sum(heads))) * run.strands
            endpoints += n if run.kind == NIC_KIND else 0
            inter_switch += 0 if run.kind == NIC_KIND else int(np.sum(tails & heads)) * run.strands
    cost: dict[str, float] = {}
    if prices is not None:
        cost = {
            "switches": outer * prices.switch.value,
            "inter-switch links": inter_switch * prices.link.value,
            "endpoint links": endpoints * prices.link.value,
        }
    counted = (endpoints, dict(switches), outer, ports, dict(cables), inter_switch, transceivers)
    return Inventory(*counted, cost)
