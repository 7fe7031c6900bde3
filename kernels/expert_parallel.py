"""Buffers and launchers for dispatch and combine of expert-parallel tokens inside a node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from moesim.hwmodels.errors import InputError
from moesim.kernels.catalog import (
    HEADER_BYTES,
    KERNELS,
    SHARED_MEMORY_LIMIT_BYTES,
    dispatch_stage_bytes,
    hop_stage_bytes,
)
from moesim.kernels.launch import GpuGroup, address, check_multiple

COMBINE_PART_LIMIT_BYTES = 14336  # four 16-byte vectors for each of a team's 224 reducing threads
COMBINE_TEAM_THREADS = 256
DISPATCH_RING_BYTES = 120 * 1024


class DispatchTuning(Struct, frozen=True):
    """How the dispatch kernel uses an SM: sending warps, ring stages, stages left unread, tokens a stage."""

    warps: int
    stages: int
    depth: int
    group: int = 1

    def __post_init__(self) -> None:
        """Check the values against the kernel's header."""
        if not 1 <= self.warps <= 7:
            raise InputError(f"dispatch: warps={self.warps} must be 1 to 7")
        if not 1 <= self.group <= 4:
            raise InputError(f"dispatch: group={self.group} tokens a stage must be 1 to 4")
        if self.depth not in (1, 2, 4, 8) or self.stages < self.depth + 2:
            raise InputError(
                f"dispatch: depth={self.depth} must be 1, 2, 4 or 8 and stages={self.stages} at least "
                f"{self.depth + 2}"
            )


class CombineRing(Struct, frozen=True):
    """How the combine kernel uses an SM: teams of 8 warps, the pieces of a row, and the ring of each team."""

    teams: int
    parts: int
    part_bytes: int
    stages: int

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA."""
        sizes = {"teams": self.teams, "stages": self.stages, "part_bytes": self.part_bytes}
        return KERNELS["combine"].shared_bytes(sizes)


class Shape(Struct, frozen=True):
    """Sizes of one expert-parallel group; with `fp8` rows travel as E4M3 with FP32 scales per 1x128 tile."""

    tokens: int
    hidden: int
    k: int
    experts: int
    fp8: bool

    def check(self, ranks: int) -> None:
        """Raise InputError where the kernels cannot serve these sizes."""
        check_multiple("dispatch", "hidden", self.hidden, 512 if self.fp8 else 128)
        if self.experts < ranks or self.experts % ranks:
            raise InputError(f"dispatch: experts={self.experts} must be a positive multiple of {ranks} ranks")
        if not 1 <= self.k <= min(32, self.experts):
            raise InputError(f"dispatch: k={self.k} must be 1 to {min(32, self.experts)}")
        if self.tokens < 1:
            raise InputError(f"dispatch: tokens={self.tokens} must be at least 1")

    @property
    def row_bytes(self) -> int:
        """Bytes of a token's row on the link."""
        return self.hidden * (1 if self.fp8 else 2)

    @property
    def scale_bytes(self) -> int:
        """Bytes of a token's scales, the first part of its side record."""
        return self.hidden // 128 * 4 if self.fp8 else 0

    @property
    def side_bytes(self) -> int:
        """Bytes of a side record: scales, k ids, k weights, token index, padded to 128.

        128-byte lines that are aligned alike in shared memory and at the receiver cross the link as whole
        packets.
        """
        return (self.scale_bytes + 8 * self.k + 4 + 127) // 128 * 128

    def dispatch_tuning(self, ranks: int) -> DispatchTuning:
        """Two sending warps, stages of up to 16 KB or one row, and a ring of about 120 KB.

        A longer ring gains nothing with few SMs, and with many a slow one would hold more rows at the end.
        Raises InputError where an SM has no room for three stages.
        """
        most = min(max(1, 16384 // self.row_bytes), 32 // ((ranks + 1) // 2))
        group = next(n for n in (4, 2, 1) if n <= most)  # divides the kernel's batches of tokens
        stage = dispatch_stage_bytes(self.row_bytes, self.side_bytes, ranks, group)
        stages = min(64, SHARED_MEMORY_LIMIT_BYTES // stage, max(DISPATCH_RING_BYTES // stage, 5))
        for depth in (4, 2, 1):
            if stages >= 2 * depth + 1:
                return DispatchTuning(2, stages, depth, group)
        raise InputError(
            f"dispatch: hidden={self.hidden} leaves room for {stages} rows in shared memory; 3 are needed"
        )

    def dispatch_sizes(self, tuning: DispatchTuning, ranks: int) -> dict[str, int]:
        """Sizes that tell a dispatch its shared memory; raises InputError where a warp has too few lanes."""
        per_warp = -(-ranks // tuning.warps)
        if tuning.group * per_warp > 32:
            raise InputError(
                f"dispatch: group={tuning.group} tokens to {per_warp} ranks each need more than 32 lanes; at "
                f"most {32 // per_warp} with {tuning.warps} sending warps"
            )
        sizes = {"stages": tuning.stages, "group": tuning.group, "ranks": ranks}
        return sizes | {"row_bytes": self.row_bytes, "side_bytes": self.side_bytes}

    def combine_ring(self, ranks: int, teams: int = 2, parts: int = 1) -> CombineRing:
        """The fewest pieces of a row, at least `parts`, of which each team's ring holds at least `ranks`."""
        row, room = 2 * self.hidden, SHARED_MEMORY_LIMIT_BYTES // teams
        while row % parts or row // parts % 16 or row // parts > COMBINE_PART_LIMIT_BYTES:
            parts += 1
        while room // (row // parts + 16) < ranks:
            parts *= 2
        return CombineRing(teams, parts, row // parts, min(64, room // (row // parts + 16)))


class ExpertParallel:
    """Symmetric buffers of one group and shape, and the four steps layout, notify, dispatch, combine.

    Per rank: `x` rows [tokens, row_bytes] u8, `topk_idx`, `topk_w`, `side`; after notify `bases`, `received`,
    `experts_received`; after dispatch `recv_x`, `recv_side`; combine reads `results` bf16 bits [capacity,
    hidden] and `weights` f32 [tokens, ranks] and writes `out` bf16 bits [tokens, hidden]. Steps are queued on
    the ranks' streams; GpuGroup.synchronize reports errors. `capacity` is the number of rows of a receive
    buffer; the default, ranks x tokens, is enough for any routing.
    """

    def __init__(self, group: GpuGroup, shape: Shape, capacity: int | None = None) -> None:
        """Allocate all buffers; raises InputError where the kernels cannot serve the sizes."""
        shape.check(group.ranks)
        self.group, self.shape = group, shape
        self.capacity = capacity if capacity is not None else group.ranks * shape.tokens
        if not 1 <= self.capacity < 2**31 // max(group.ranks, 1):
            raise InputError(f"dispatch: capacity={self.capacity} rows is out of range")
        r, s = group.ranks, shape
        self.per_rank = s.experts // r
        make = group.symmetric
        self.x = make((s.tokens, s.row_bytes), "u1")
        self.topk_idx, self.topk_w = make((s.tokens, s.k), "i4", 255), make((s.tokens, s.k), "f4")
        self.side = make((s.tokens, s.side_bytes), "u1")
        room = make((s.tokens * r + 8,), "i4")  # dispatch reads up to 31 bytes behind the slots
        self.slots = [array[: s.tokens * r].reshape(s.tokens, r) for array in room]
        self.lists, self.bases = make((r, s.tokens), "i4"), make((r,), "i4")
        self.rank_counts, self.expert_counts = make((r,), "i4"), make((s.experts,), "i4")
        self.received, self.experts_received = make((r + 1,), "i4"), make((self.per_rank,), "i4")
        self.recv_x = make((self.capacity, s.row_bytes), "u1")
        self.recv_side = make((self.capacity, s.side_bytes), "u1")
        self.results = make((self.capacity, s.hidden), "u2")
        self.weights, self.out = make((s.tokens, r), "f4"), make((s.tokens, s.hidden), "u2")
        exchange = make((2, r * r + r * self.per_rank), "i4")
        flags, arrivals, ready = (make((r,), "u4") for _ in range(3))
        self._keep = (exchange, flags, arrivals, ready)
        self.claims = make((1,), "u4")
        self._notify_table = group.table([exchange, flags])
        self.dispatch_table = group.table([self.recv_x, self.recv_side, arrivals])
        self.combine_table = group.table([self.results, ready])
        self._notified = self._arrivals = self._combined = 0

    def _ranks(self, only: Sequence[int] | None) -> Sequence[int]:
        """The ranks to launch; tests launch fewer than all, so that the other ranks' waits time out."""
        return range(self.group.ranks) if only is None else only

    def next_arrivals(self, sms: int) -> int:
        """Count a dispatch on `sms` CTAs and return the value of every arrival counter after it."""
        self._arrivals += sms
        return self._arrivals

    def next_combine(self) -> int:
        """Count a combine and return its epoch."""
        self._combined += 1
        return self._combined

    def layout(self) -> None:
        """Queue the layout on every rank: slots, lists, counts and side records from topk_idx and topk_w."""
        outputs = (self.slots, self.lists, self.rank_counts, self.expert_counts)
        self.layout_over(self.group.ranks, outputs, self.side)

    def layout_over(self, targets: int, outputs: Sequence[Sequence[Any]], side: Sequence[Any] | None) -> None:
        """Queue a layout over `targets` equal groups of experts, which are ranks or virtual nodes.

        `outputs` are slots [tokens, targets], lists [targets, tokens], counts [targets] and counts by expert,
        each by rank; `side` holds the side records to write, or None.
        """
        s = self.shape
        for rank in range(self.group.ranks):
            arguments = (
                address(self.topk_idx[rank], 4), address(self.topk_w[rank], 4),
                *(address(p[rank], 4) for p in outputs),
                0 if side is None else address(side[rank]),
                s.tokens, s.k, targets, s.experts // targets, s.side_bytes, s.scale_bytes,
            )  # fmt: skip
            self.group.launch(rank, "layout", targets, 1024, arguments)

    def notify(self, only: Sequence[int] | None = None) -> None:
        """Queue the exchange of counts on every rank."""
        self._notified += 1
        for rank in self._ranks(only):
            pointers = (
                self._notify_table, self.rank_counts, self.expert_counts, self.bases, self.received,
                self.experts_received,
            )  # fmt: skip
            sizes = (rank, self.group.ranks, self.per_rank, self._notified, self.capacity)
            tail = (self.group.timeout_ns, address(self.group.status[rank]))
            self.group.launch(
                rank, "notify", 1, 256, (*(address(p[rank], 4) for p in pointers), *sizes, *tail)
            )

    def dispatch(
        self,
        sms: int,
        only: Sequence[int] | None = None,
        tuning: DispatchTuning | None = None,
        own: bool = True,
    ) -> None:
        """Queue the dispatch on every rank, on `sms` SMs each.

        Without `own` the rows that a rank would send to itself stay in its `x` and `side` (its tokens
        `lists[rank, : rank_counts[rank]]`), and their places in its receive buffers are not written. With few
        SMs this saves the time of storing them, for receivers that can read rows through an index.
        """
        s, r = self.shape, self.group.ranks
        use = tuning or s.dispatch_tuning(r)
        expected = self.next_arrivals(sms)
        shared = KERNELS["dispatch"].shared_bytes(s.dispatch_sizes(use, r))
        for rank in self._ranks(only):
            pointers = (self.x, self.side, self.slots, self.bases, self.dispatch_table, self.claims)
            sizes = (
                s.tokens, r, rank, s.row_bytes, s.side_bytes, int(own), use.group, use.stages, use.depth,
                expected,
            )  # fmt: skip
            tail = (self.group.timeout_ns, address(self.group.status[rank]))
            arguments = (*(address(p[rank]) for p in pointers), *sizes, *tail)
            self.group.launch(rank, "dispatch", sms, 32 * (1 + use.warps), arguments, shared)

    def combine(
        self,
        sms: int,
        weighted: bool = True,
        only: Sequence[int] | None = None,
        ring: CombineRing | None = None,
    ) -> None:
        """Queue the combine on every rank, on `sms` SMs each."""
        r = self.group.ranks
        use = ring or self.shape.combine_ring(r)
        epoch = self.next_combine()
        for rank in self._ranks(only):
            weights = address(self.weights[rank]) if weighted else 0
            pointers = (self.combine_table, self.slots, self.bases)
            sizes = (self.shape.tokens, r, rank, use.part_bytes, use.parts, use.stages, epoch)
            arguments = (
                *(address(p[rank]) for p in pointers), weights, address(self.out[rank]),
                *sizes, self.group.timeout_ns, address(self.group.status[rank]),
            )  # fmt: skip
            self.group.launch(
                rank, "combine", sms, COMBINE_TEAM_THREADS * use.teams, arguments, use.shared_bytes
            )

    def copies(self) -> list[list[int]]:
        """Rows sent as [source][rank], read back from the GPUs after layout has run."""
        self.group.synchronize()
        return [[int(n) for n in counts.get()] for counts in self.rank_counts]


MOST_TOKENS, MOST_HIDDEN = 2048, 8192


class LowLatency:
    """Buffers of one group and shape (fp8), and the two steps dispatch and combine.

    Per rank: `x` bf16 bits [tokens, hidden], `topk_idx`, `topk_w`; dispatch writes `recv_x` e4m3 [2, ranks x
    tokens, hidden], `recv_side`, `recv_counts` i32 [2, ranks] (half `half`, block of source s from row s x
    tokens) and `slots`; combine reads `results` bf16 bits [ranks x tokens, hidden] in the same rows and
    `weights` f32 [tokens, ranks], and writes `out`.
    """

    def __init__(self, group: GpuGroup, shape: Shape) -> None:
        """Allocate all buffers; raises InputError where the kernel cannot serve the shape."""
        shape.check(group.ranks)
        if not shape.fp8 or shape.tokens > MOST_TOKENS or shape.hidden > MOST_HIDDEN:
            raise InputError(
                f"low-latency dispatch: fp8={shape.fp8}, tokens={shape.tokens}, hidden={shape.hidden}; it "
                f"sends fp8, at most {MOST_TOKENS} tokens of at most {MOST_HIDDEN} values: use ExpertParallel"
            )
        self.group, self.shape = group, shape
        s, r, make = shape, group.ranks, group.symmetric
        self.x, self.out = make((s.tokens, s.hidden), "u2"), make((s.tokens, s.hidden), "u2")
        self.topk_idx, self.topk_w = make((s.tokens, s.k), "i4", 255), make((s.tokens, s.k), "f4")
        self.recv_x = make((2, r * s.tokens, s.hidden), "u1")
        self.recv_side = make((2, r * s.tokens, s.side_bytes), "u1")
        self.recv_counts = make((2, r), "i4")
        self.results, self.slots = make((r * s.tokens, s.hidden), "u2"), make((s.tokens, r), "i4")
        self.weights = make((s.tokens, r), "f4")
        arrivals, ready = make((r,), "u4"), make((r,), "u4")
        self._keep = (arrivals, ready)
        self._dispatch_table = group.table([self.recv_x, self.recv_side, arrivals, self.recv_counts])
        self._combine_table = group.table([self.results, ready])
        self._epoch = self._arrivals = self._combined = 0

    @property
    def half(self) -> int:
        """Which half of the receive buffers the last dispatch filled."""
        return self._epoch % 2

    def dispatch(self, sms: int, only: Sequence[int] | None = None) -> None:
        """Queue the dispatch on every rank, on `sms` SMs each (best is one per token)."""
        s, r = self.shape, self.group.ranks
        self._epoch += 1
        self._arrivals += sms
        sizes = {"hidden": s.hidden, "side_bytes": s.side_bytes, "tokens": s.tokens}
        shared = KERNELS["dispatch_ll"].shared_bytes(sizes)
        for rank in range(r) if only is None else only:
            pointers = (self.x, self.topk_idx, self.topk_w, self.slots, self._dispatch_table)
            arguments = (
                *(address(p[rank], 4) for p in pointers), s.tokens, s.k, r, rank, s.experts // r, s.hidden,
                s.side_bytes, s.tokens, self._epoch, self._arrivals, self.group.timeout_ns,
                address(self.group.status[rank]),
            )  # fmt: skip
            self.group.launch(rank, "dispatch_ll", sms, 512, arguments, shared)

    def combine(self, sms: int, weighted: bool = True, only: Sequence[int] | None = None) -> None:
        """Queue the combine on every rank, on `sms` SMs each (best is 32 or more)."""
        s, r = self.shape, self.group.ranks
        self._combined += 1
        for rank in range(r) if only is None else only:
            arguments = (
                address(self.slots[rank], 4), address(self.weights[rank], 4) if weighted else 0,
                address(self.out[rank]), address(self._combine_table[rank]), s.tokens, r, rank, s.hidden,
                s.tokens, self._combined, self.group.timeout_ns, address(self.group.status[rank]),
            )  # fmt: skip
            self.group.launch(rank, "combine_ll", sms, 512, arguments)


MOST_NODE_SIZE = 16
RELAY_LIMIT_BYTES, OWNER_LIMIT_BYTES = 14336, 7168  # two 16-byte vectors for each of 448 and 224 threads
_MOST_CHUNK, _MOST_STAGES, _MOST_RELAY_STAGES = 16, 64, 8


class HopTuning(Struct, frozen=True):
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


class CombineTuning(Struct, frozen=True):
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
