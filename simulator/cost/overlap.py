"""Exposed part of the collectives that a framework overlaps with compute (docs/model.md, eq. O1 to O11)."""

from __future__ import annotations

from functools import lru_cache
from importlib import resources
from math import log
from typing import Literal, NamedTuple

from msgspec import Struct
from pydantic import Field, NonNegativeInt, PositiveInt

from moesim.hwmodels.frozen import Frozen
from moesim.hwmodels.provenance import DateText, Source, SourcedSeconds
from moesim.hwmodels.validation import validate_model
from moesim.hwmodels.yaml_io import parse_mapping
from moesim.simulator.frameworks.software import TensorOverlap

MEASURED_CHANNELS, MEASURED_SMS = 24, 132
"""SMs that held the collectives beside which `lost_beside_nccl` was measured, of all SMs of an H200."""


class OverlapSlowDown(NamedTuple):
    """Slow-downs that an overlapped collective and its compute cause each other (eqs. O5 and O8)."""

    compute_lost: float
    """Seconds that compute loses for every second that the collective takes alone."""
    collective_factor: float = 1.0
    """Time of the collective over its time alone."""


class HalfLayerGemms(NamedTuple):
    """Seconds of the GEMMs of one half of a layer: forward, input gradient, weight gradient."""

    forward_s: float
    input_s: float
    weight_s: float


class HalfCollectives(NamedTuple):
    """Seconds of the collectives of half a layer alone, and of one ring piece of each.

    `gather_s`: the forward's input. `gradient_s`: its gradient. `stored_s`: the stored input once more.
    `scatter_s`: a result. `columns_s`: the gradient once more, where the weight gradient needs its own
    quantisation of it. `gather_piece_s`, `scatter_piece_s`: one rank's piece to its neighbour. `reduce_s`:
    the sum of the pieces that a ring scatter received. `copy_s`: one shard into a registered buffer.
    `back_scatter_s`: the scattered gradient of the input, where it is not as wide as the result.
    Without sequence parallelism gather and scatter are the halves of an all-reduce.
    """

    gather_s: float
    gradient_s: float
    stored_s: float
    scatter_s: float
    columns_s: float = 0.0
    gather_piece_s: float = 0.0
    scatter_piece_s: float = 0.0
    reduce_s: float = 0.0
    copy_s: float = 0.0
    back_scatter_s: float | None = None


def lost_beside(measured: float, sms: int, n_sms: int) -> float:
    """Seconds that compute loses for each second of a collective on `sms` of `n_sms` SMs.

    `measured` is that beside collectives on `MEASURED_CHANNELS` of `MEASURED_SMS` SMs (eq. O5). What exceeds
    their share of the SMs is lost to memory and power, also where copy engines move the bytes.
    """
    return max(0.0, measured - MEASURED_CHANNELS / MEASURED_SMS) + sms / n_sms


def exposed_overlapped(collective_s: float, compute_s: float, slow_down: OverlapSlowDown) -> float:
    """Eq. O1: seconds that a collective adds to the compute it overlaps with.

    `collective_s` is its time alone. The part that the compute does not hide is exposed and runs at full
    speed; the hidden part slows the compute.
    """
    hidden = min(collective_s, compute_s / slow_down.collective_factor)
    return collective_s - hidden + slow_down.compute_lost * hidden


def exposed_pipelined(
    collective_s: float, compute_s: float, pieces: int, slow_down: OverlapSlowDown
) -> float:
    """Eq. O2: exposed seconds of a collective split into `pieces` beside the GEMM that feeds or needs it.

    The first piece is exposed; the others overlap with the remaining pieces of the GEMM (or attention).
    """
    rest = (pieces - 1) / pieces
    return collective_s / pieces + exposed_overlapped(collective_s * rest, compute_s * rest, slow_down)


def exposed_forward(
    moved: HalfCollectives, gemms: HalfLayerGemms, tp: int, overlap: TensorOverlap, slow_down: OverlapSlowDown
) -> float:
    """Eq. O3: exposed all-gather and reduce-scatter of half a layer in the forward."""
    both = moved.gather_s + moved.scatter_s
    return exposed_pipelined(both, gemms.forward_s, tp, slow_down) if overlap == "full" else both


def exposed_backward(
    moved: HalfCollectives,
    gemms: HalfLayerGemms,
    tp: int,
    overlap: TensorOverlap,
    slow_down: OverlapSlowDown,
    *,
    sequence_parallel: bool,
) -> float:
    """Eq. O3: exposed seconds of the collectives of half a layer in the backward.

    With sequence parallelism the gradient is gathered, the stored input is gathered again for the weight
    gradient (beside the input gradient's GEMM) and the new gradient is scattered. Without it the new gradient
    is all-reduced. The last of these collectives may overlap with the weight gradient.
    """
    gradient_s = moved.gradient_s + moved.columns_s
    scatter_s = moved.scatter_s if moved.back_scatter_s is None else moved.back_scatter_s
    if overlap == "none":
        return gradient_s + scatter_s
    if overlap == "full":
        whole = gradient_s + scatter_s + (moved.stored_s if sequence_parallel else 0.0)
        return exposed_pipelined(whole, gemms.input_s + gemms.weight_s, tp, slow_down)
    if not sequence_parallel:
        return exposed_overlapped(gradient_s + scatter_s, gemms.weight_s, slow_down)
    hidden = ((moved.stored_s, gemms.input_s), (scatter_s, gemms.weight_s))
    return gradient_s + sum(exposed_overlapped(*pair, slow_down) for pair in hidden)


def exposed_behind_window(
    collective_s: float, window_s: float, parts: int, slow_down: OverlapSlowDown, free_s: float = 0.0
) -> float:
    """Eq. O4: exposed seconds of a gradient reduction or parameter gather in parts behind `window_s`.

    `window_s`: seconds of compute that hide it. `free_s`: seconds of other transfers that leave its port
    free, and hide it at no cost to compute. The part that becomes ready last is exposed.
    """
    last = collective_s / max(1, parts)
    beside_transfers = min(collective_s - last, free_s)
    return last + exposed_overlapped(collective_s - last - beside_transfers, window_s, slow_down)


# -- tensor overlap ----------------------------------------------------------------------------------
# Exposed tensor-parallel collectives of frameworks that cut GEMMs into pieces (eq. O9 to O11).

CUTS_GEMMS = ("userbuffers", "async")
"""Values of `software.overlap_tensor_parallel` whose methods are data of this module."""

FILE = "data/tensor_overlap.yaml"


class Method(Frozen):
    """How one collective runs beside its GEMM; `pieces` are those of `pipeline`, a ring has one a rank."""

    method: Literal["ring", "pipeline", "bulk"]
    pieces: PositiveInt = 4
    sms: int = Field(0, ge=0, le=1000)
    """SMs that the collective holds; 0 where copy engines move it."""
    barriers: int = Field(0, ge=0, le=100)
    """Barriers of all ranks before, between and after the pieces that nothing hides."""
    barriers_beside: int = Field(0, ge=0, le=100)
    """Barriers around the transfer of each piece, which run beside the GEMM of the next."""


class HalfMethods(Frozen):
    """Methods of one half of a layer, whose first GEMM is column-parallel and whose last is row-parallel."""

    gather: Method
    """All-gather before the first GEMM, and of the gradient before the input gradient of the last."""
    scatter: Method
    """Reduce-scatter after the last GEMM."""
    stored_input: Method | None = None
    """All-gather of the stored input beside the first GEMM's input gradient; None where it was kept."""
    input_gradient: Method
    """Reduce-scatter of the input gradient: `bulk` beside the weight gradient, else cut with its own GEMM."""


class TensorOverlapMethods(Frozen):
    """Methods of one framework, from its published configuration."""

    source: Source
    date: DateText
    copies: tuple[NonNegativeInt, NonNegativeInt]
    """Shards copied into a registered buffer in the forward and the backward of half a layer."""
    attention: HalfMethods
    feed_forward: HalfMethods
    barrier: SourcedSeconds | None = None
    """A barrier of all ranks on the device; None where its time is not known and none is counted."""

    @property
    def barrier_s(self) -> float:
        """Seconds of a barrier, or 0."""
        return 0.0 if self.barrier is None else self.barrier.value


class SplitGemm(NamedTuple):
    """Seconds of a GEMM as a whole, of one of `tp` pieces and of one of a pipeline's pieces of its rows."""

    whole_s: float = 0.0
    ring_s: float = 0.0
    pipeline_s: float = 0.0


class EdgeGemms(NamedTuple):
    """First and last GEMM of a phase that tensor parallelism splits, in the order of the phase."""

    first: SplitGemm = SplitGemm()
    last: SplitGemm = SplitGemm()


class UserBuffers(Frozen):
    """Transformer Engine's methods in the configurations that recipes publish, one a row."""

    source: Source
    date: DateText
    copies: tuple[NonNegativeInt, NonNegativeInt]
    columns: tuple[str, ...]
    rows: tuple[tuple[str | int, ...], ...]

    def methods(self, linear: str, architecture: str, hidden: int) -> tuple[TensorOverlapMethods, int]:
        """Methods of the row of a format and card whose width is nearest, and that width."""
        card = "Blackwell" if architecture.startswith("Blackwell") else "Hopper"
        named = [dict(zip(self.columns, row, strict=True)) for row in self.rows]
        found = [row for row in named if (row["format"], row["architecture"]) == (linear, card)]
        row = min(found, key=lambda row: abs(log(int(row["hidden"]) / hidden)))

        def half(scatter: str, first: str) -> HalfMethods:
            sms = int(str(row[scatter])[1:])
            ring = str(row[scatter]).startswith("r")
            return HalfMethods(
                gather=Method(method="ring"),
                scatter=Method(method="ring" if ring else "pipeline", sms=sms),
                stored_input=Method(method="bulk", sms=int(row[f"{first}_input"])),
                input_gradient=Method(method="bulk", sms=int(row[f"{first}_weight"])),
            )

        made = TensorOverlapMethods(
            source=self.source,
            date=self.date,
            copies=self.copies,
            attention=half("projection", "qkv"),
            feed_forward=half("feed_forward", "fc1"),
        )
        return made, int(row["hidden"])


@lru_cache(maxsize=1)
def load_methods() -> tuple[UserBuffers, TensorOverlapMethods]:
    """The shipped methods of Transformer Engine and of PyTorch; raises InputError for a malformed file."""
    text = resources.files("moesim.simulator").joinpath(*FILE.split("/")).read_text("utf-8")
    entries = parse_mapping(text, FILE)
    buffers = validate_model(UserBuffers, entries["userbuffers"], f"{FILE}: userbuffers")
    return buffers, validate_model(TensorOverlapMethods, entries["async"], f"{FILE}: async")


AS_FORMAT = {"fp4": "fp8"}
"""Formats of GEMMs for which no configuration of user buffers is published, and whose methods they take."""


@lru_cache(maxsize=64)
def methods_of(overlap: str, linear: str, architecture: str, hidden: int) -> TensorOverlapMethods:
    """Methods of `software.overlap_tensor_parallel`; user buffers differ by format, card and width."""
    buffers, pieces = load_methods()
    if overlap != "userbuffers":
        return pieces
    return buffers.methods(AS_FORMAT.get(linear, linear), architecture, hidden)[0]


def methods_note(overlap: str, linear: str, architecture: str, hidden: int) -> str:
    """Assumption behind `methods_of`; empty where the methods of format and width are published."""
    if overlap != "userbuffers":
        return ""
    taken = AS_FORMAT.get(linear, linear)
    width = load_methods()[0].methods(taken, architecture, hidden)[1]
    if (taken, width) == (linear, hidden):
        return ""
    return (
        f"user buffers of Transformer Engine with {linear} GEMMs and rows of {hidden:,}: no configuration is "
        f"published; methods, pieces and SMs are those of {taken} and {width:,}"
    )


def exposed_ring(
    gemm: SplitGemm,
    piece_s: float,
    tp: int,
    lost: float,
    sms_lost: float = 1.0,
    barriers_s: tuple[float, float] = (0.0, 0.0),
) -> float:
    """Eq. O9: seconds that a gather or scatter in pieces beside its GEMM adds to the whole GEMM.

    The own rank's piece needs no transfer. Each other piece of the GEMM runs beside the transfer of one, and
    the slower of both decides. `lost`: compute lost for each second of a hidden transfer. `sms_lost`: time
    factor of the GEMM on the SMs that the transfers leave it. `barriers_s`: barriers that nothing hides, and
    those around the transfer of each piece.
    """
    one, (exposed_s, around_s) = gemm.ring_s * sms_lost, barriers_s
    beside = max(one + lost * min(one, piece_s), piece_s + around_s)
    return exposed_s + one + (tp - 1) * beside - gemm.whole_s


def exposed_pipelined_scatter(gemm: SplitGemm, scatter_s: float, pieces: int, sms_lost: float) -> float:
    """Eq. O10: seconds that a scatter adds that follows the pieces of its GEMM; its last piece is exposed."""
    one, each = gemm.pipeline_s * sms_lost, scatter_s / pieces
    return one + (pieces - 1) * max(one, each) + each - gemm.whole_s


class HalfOverlap(Struct, frozen=True):
    """What one half of a layer exposes under a framework's methods, on an accelerator with `n_sms` SMs."""

    methods: HalfMethods
    copies: tuple[int, int]
    collectives: HalfCollectives
    tp: int
    n_sms: int
    lost_measured: float
    """Compute lost for each second of a collective on `MEASURED_CHANNELS` SMs (eq. O5)."""
    barrier_s: float = 0.0

    def forward_s(self, gemms: EdgeGemms) -> float:
        """Gather before the first GEMM and scatter after the last."""
        copied = self.copies[0] * self.collectives.copy_s
        return copied + self._gather(gemms.first) + self._scatter(self.methods.scatter, gemms.last)

    def backward_s(self, input_: EdgeGemms, weight: EdgeGemms) -> float:
        """Eq. O11: collectives of the backward, whose phases begin with the gradient of the last GEMM.

        `input_` and `weight`: GEMMs of the input and of the weight gradient. The gradient's copy for the
        weight gradient, where formats need one of their own, is moved beside the input gradient's GEMM.
        """
        moved, methods = self.collectives, self.methods
        exposed = self.copies[1] * moved.copy_s + self._gather(input_.first)
        exposed += self._beside(moved.columns_s, input_.first.whole_s, 0)
        if methods.stored_input is not None:
            exposed += self._beside(moved.stored_s, input_.last.whole_s, methods.stored_input.sms)
        if methods.input_gradient.method == "bulk":
            return exposed + self._beside(moved.scatter_s, weight.last.whole_s, methods.input_gradient.sms)
        return exposed + self._scatter(methods.input_gradient, input_.last)

    def _gather(self, gemm: SplitGemm) -> float:
        method, piece_s = self.methods.gather, self.collectives.gather_piece_s
        barriers = self._barriers(method)
        return exposed_ring(gemm, piece_s, self.tp, self._lost(method.sms), barriers_s=barriers)

    def _scatter(self, method: Method, gemm: SplitGemm) -> float:
        moved, left = self.collectives, self.n_sms / max(1, self.n_sms - method.sms)
        if method.method == "pipeline":
            return exposed_pipelined_scatter(gemm, moved.scatter_s, method.pieces, left)
        lost = self._lost(0)  # the SMs of the transfers are left free
        barriers = self._barriers(method)
        return exposed_ring(gemm, moved.scatter_piece_s, self.tp, lost, left, barriers) + moved.reduce_s

    def _barriers(self, method: Method) -> tuple[float, float]:
        """Seconds of the barriers that nothing hides, and of those around each piece's transfer."""
        return method.barriers * self.barrier_s, method.barriers_beside * self.barrier_s

    def _beside(self, collective_s: float, gemm_s: float, sms: int) -> float:
        return exposed_overlapped(collective_s, gemm_s, OverlapSlowDown(self._lost(sms)))

    def _lost(self, sms: int) -> float:
        return lost_beside(self.lost_measured, sms, self.n_sms)
