"""Buffers and launchers for dispatch and combine of expert-parallel tokens inside a node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moesim.hwmodels.errors import InputError
from moesim.kernels.catalog import KERNELS, SHARED_MEMORY_LIMIT_BYTES, dispatch_stage_bytes
from moesim.kernels.launch import GpuGroup, address, check_multiple

COMBINE_PART_LIMIT_BYTES = 14336  # four 16-byte vectors for each of a team's 224 reducing threads
COMBINE_TEAM_THREADS = 256
DISPATCH_RING_BYTES = 120 * 1024


@dataclass(frozen=True, slots=True)
class DispatchTuning:
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


@dataclass(frozen=True, slots=True)
class CombineRing:
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


@dataclass(frozen=True, slots=True)
class Shape:
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
