"""Dispatch and combine over virtual nodes, along rails to the same-index GPU and then inside the node.

This is the inter-node path of expert parallelism on one host. A token goes once to each target node, to the
GPU with the sender's local index (the relay), which forwards it to each target GPU there; combine runs
backwards and reduces at the relay. One kernel runs both hops of a direction at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moesim.hwmodels.errors import InputError
from moesim.kernels.catalog import HEADER_BYTES, KERNELS, SHARED_MEMORY_LIMIT_BYTES, hop_stage_bytes
from moesim.kernels.expert_parallel import ExpertParallel, Shape
from moesim.kernels.launch import GpuGroup, address

MOST_NODE_SIZE = 16
RELAY_LIMIT_BYTES, OWNER_LIMIT_BYTES = 14336, 7168  # two 16-byte vectors for each of 448 and 224 threads
_MOST_CHUNK, _MOST_STAGES, _MOST_RELAY_STAGES = 16, 64, 8


@dataclass(frozen=True, slots=True)
class HopTuning:
    """How a dispatch CTA uses its SM: rows per chunk, forwarding warps, entries of the forwarders' ring."""

    chunk: int
    forwarders: int
    stages: int

    def __post_init__(self) -> None:
        """Check the values against the kernel's header."""
        least = 2 * self.forwarders + max(self.chunk, self.forwarders)
        if not 1 <= self.chunk <= 8 or not 1 <= self.forwarders <= 4 or self.stages < least:
            raise InputError(
                f"two hops: chunk={self.chunk} must be 1 to 8, forwarders={self.forwarders} 1 to 4, and "
                f"stages={self.stages} at least {least}"
            )


def dispatch_tuning(shape: Shape, node_size: int) -> HopTuning:
    """The largest chunk of at most six rows whose rings fit an SM, with one forwarding warp.

    Raises InputError where none fits.
    """
    row = hop_stage_bytes(shape.row_bytes, shape.side_bytes)
    for chunk in range(min(6, 32 // node_size), 0, -1):
        stages = (SHARED_MEMORY_LIMIT_BYTES - 24 - 3 * chunk * row) // (row + 20)
        if stages >= 2 + chunk:
            return HopTuning(chunk, 1, min(stages, _MOST_STAGES))
    raise InputError(f"two hops: rows of {shape.row_bytes} bytes (hidden={shape.hidden}) do not fit an SM")


@dataclass(frozen=True, slots=True)
class CombineTuning:
    """Bytes per piece and pieces in the ring, for the relay and for the owner, and entries per chunk."""

    relay_part: int
    owner_part: int
    relay_stages: int
    owner_stages: int
    chunk: int


def combine_tuning(shape: Shape, node_size: int, nodes: int) -> CombineTuning:
    """The rings of the combine; the owner gets a quarter of the shared memory, as it reads less.

    More than eight pieces in flight at a relay slow the partial rows that leave it over the same links.
    Raises InputError where the rings do not fit.
    """
    row, room, parts = 2 * shape.hidden, SHARED_MEMORY_LIMIT_BYTES - 32, 1
    while row % (16 * parts) == 0:
        relay, owner = (_piece(row, limit, parts) for limit in (RELAY_LIMIT_BYTES, OWNER_LIMIT_BYTES))
        owner_stages = min(_MOST_STAGES, max(nodes, room // 4 // (owner + 32)))
        left = room - owner_stages * (owner + 32) - 2 * relay
        relay_stages = min(max(_MOST_RELAY_STAGES, node_size), left // (relay + 32))
        if relay_stages >= node_size:
            chunk = min(_MOST_CHUNK, 32 // max(node_size, nodes))
            return CombineTuning(relay, owner, relay_stages, owner_stages, chunk)
        parts *= 2
    raise InputError(
        f"two hops: pieces of {row} bytes for {nodes} nodes of {node_size} GPUs do not fit an SM"
    )


def _piece(row: int, limit: int, parts: int) -> int:
    """Bytes of one of at least `parts` equal pieces of a row, a multiple of 16 within `limit`."""
    while row % (16 * parts) or row // parts > limit:
        parts += 1
    return row // parts


class TwoHop:
    """Virtual nodes of `node_size` consecutive ranks: rank r is GPU r % node_size of node r // node_size.

    `ep` holds what both paths share, with the same meaning: write its `x`, `topk_idx`, `topk_w`, `side` and
    `weights` (f32 [tokens, ranks], read by the dispatch for the combine after it), then layout, notify,
    dispatch; rows end in its `recv_x`, `recv_side` as after a one-hop dispatch. combine reads `results` and
    writes `out`; partial sums travel as BF16, so a token is rounded once a node and once at its owner.
    """

    def __init__(self, group: GpuGroup, shape: Shape, node_size: int) -> None:
        """Allocate all buffers; raises InputError where nodes do not divide ranks or a row does not fit."""
        if not 1 <= node_size <= MOST_NODE_SIZE or group.ranks % node_size:
            raise InputError(
                f"two hops: {group.ranks} ranks are no multiple of node_size={node_size}, or it is not 1 to "
                f"{MOST_NODE_SIZE}"
            )
        self.ep, self.group, self.shape = ExpertParallel(group, shape), group, shape
        self.node_size, self.node_count = node_size, group.ranks // node_size
        n, s, make, ep = self.node_count, shape, group.symmetric, self.ep
        self.tuning = dispatch_tuning(shape, node_size)
        self.combining = combine_tuning(shape, node_size, n)
        self.node_slots, self.node_lists = make((s.tokens, n), "i4"), make((n, s.tokens), "i4")
        self.node_counts, self._node_experts = make((n,), "i4"), make((s.experts,), "i4")
        self.queue_rows = make((n, s.tokens, s.row_bytes), "u1")
        self.queue_entries = make((n, s.tokens, s.side_bytes + HEADER_BYTES), "u1")
        self._returned = make((n, s.tokens, s.hidden), "u2")
        self.counts = make((n,), "u8")
        flags, returned_flags = make((n, s.tokens), "u4"), make((n, s.tokens), "u4")
        arrivals, self.ready = make((node_size,), "u4"), make((group.ranks,), "u4")
        self._keep = (flags, returned_flags, arrivals)
        self._dispatch_table = group.table(
            [ep.recv_x, ep.recv_side, arrivals, self.queue_rows, self.queue_entries, flags, self.counts]
        )
        self._combine_table = group.table([ep.results, self.ready, self._returned, returned_flags])
        self._epoch = self._arrivals = self._combined = 0

    def layout(self) -> None:
        """Queue the layouts over ranks and over nodes on every rank."""
        self.ep.layout()
        outputs = (self.node_slots, self.node_lists, self.node_counts, self._node_experts)
        self.ep.layout_over(self.node_count, outputs, None)

    def notify(self) -> None:
        """Queue the exchange of counts on every rank; every dispatch needs one before it."""
        self.ep.notify()

    def dispatch(
        self,
        sms: int,
        weighted: bool = True,
        only: Sequence[int] | None = None,
        tuning: HopTuning | None = None,
    ) -> None:
        """Queue the dispatch on every rank, on `sms` SMs each."""
        s, ep, use = self.shape, self.ep, tuning or self.tuning
        self._epoch += 1
        self._arrivals += sms
        sizes = {"chunk": use.chunk, "stages": use.stages}
        sizes |= {"row_bytes": s.row_bytes, "side_bytes": s.side_bytes}
        shared = KERNELS["dispatch_2hop"].shared_bytes(sizes)
        for rank in range(self.group.ranks) if only is None else only:
            weights = address(ep.weights[rank], 4) if weighted else 0
            arguments = (
                address(ep.x[rank]), address(ep.side[rank]), weights, address(ep.slots[rank], 4),
                address(ep.bases[rank], 4), address(self.node_lists[rank], 4),
                address(self.node_counts[rank], 4), address(self._dispatch_table[rank]),
                s.tokens, self.group.ranks, self.node_size, rank, s.row_bytes, s.side_bytes, use.chunk,
                use.stages, self._epoch, self._arrivals, self.group.timeout_ns,
                address(self.group.status[rank]),
            )  # fmt: skip
            self.group.launch(rank, "dispatch_2hop", sms, 32 * (2 + use.forwarders), arguments, shared)

    def combine(
        self, sms: int, only: Sequence[int] | None = None, tuning: CombineTuning | None = None
    ) -> None:
        """Queue the combine on every rank, on `sms` SMs each, with the weights given to the dispatch."""
        s, ep, use = self.shape, self.ep, tuning or self.combining
        self._combined += 1
        rings = (use.relay_part, use.owner_part, use.relay_stages, use.owner_stages)
        names = ("relay_part", "owner_part", "relay_stages", "owner_stages")
        shared = KERNELS["combine_2hop"].shared_bytes(dict(zip(names, rings, strict=True)))
        for rank in range(self.group.ranks) if only is None else only:
            arguments = (
                address(self._combine_table[rank]), address(self.queue_entries[rank]),
                address(self.counts[rank], 8), address(self.node_slots[rank], 4), address(ep.out[rank]),
                s.tokens, self.group.ranks, self.node_size, rank, s.side_bytes + HEADER_BYTES, *rings,
                2 * s.hidden, use.chunk, self._combined, self.group.timeout_ns,
                address(self.group.status[rank]),
            )  # fmt: skip
            self.group.launch(rank, "combine_2hop", sms, 768, arguments, shared)

    def forwarded(self) -> list[list[int]]:
        """By relay, [rows sent on to GPUs of its node, rows received over the rail], after a layout."""
        self.group.synchronize()
        copies = self.ep.copies()
        rails = [[int(n) for n in counts.get()] for counts in self.node_counts]
        found = []
        for relay in range(self.group.ranks):
            node, local = divmod(relay, self.node_size)
            sources = range(local, self.group.ranks, self.node_size)
            own = range(node * self.node_size, (node + 1) * self.node_size)
            sent_on = sum(copies[s][gpu] for s in sources for gpu in own)
            found.append([sent_on, sum(rails[s][node] for s in sources if s != relay)])
        return found
