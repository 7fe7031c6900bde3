"""Low-latency dispatch and combine of decode-sized batches, without layout or exchange of counts."""

from __future__ import annotations

from collections.abc import Sequence

from moesim.hwmodels.errors import InputError
from moesim.kernels.catalog import KERNELS
from moesim.kernels.expert_parallel import Shape
from moesim.kernels.launch import GpuGroup, address

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
