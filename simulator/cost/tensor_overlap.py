"""Exposed tensor-parallel collectives of frameworks that cut GEMMs into pieces (eq. O9 to O11)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Literal, NamedTuple

from pydantic import Field, NonNegativeInt, PositiveInt

from moesim.hwmodels.frozen import Frozen
from moesim.hwmodels.provenance import DateText, Source, SourcedSeconds
from moesim.hwmodels.validation import validate_model
from moesim.hwmodels.yaml_io import parse_mapping
from moesim.simulator.cost.overlap import HalfCollectives, OverlapSlowDown, exposed_overlapped, lost_beside

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


@lru_cache(maxsize=1)
def load_methods() -> dict[str, TensorOverlapMethods]:
    """The shipped methods by name; raises InputError for a malformed file."""
    text = resources.files("moesim.simulator").joinpath(*FILE.split("/")).read_text("utf-8")
    return {
        name: validate_model(TensorOverlapMethods, entry, f"{FILE}: {name}")
        for name, entry in parse_mapping(text, FILE).items()
    }


AS_FORMAT = {"fp4": "fp8"}
"""Formats of GEMMs for which no configuration of user buffers is published, and whose methods they take."""


def methods_of(overlap: str, linear: str) -> TensorOverlapMethods:
    """Methods of `software.overlap_tensor_parallel` for GEMMs of a format; user buffers differ by format."""
    return load_methods()[
        f"userbuffers-{AS_FORMAT.get(linear, linear)}" if overlap == "userbuffers" else overlap
    ]


def methods_note(overlap: str, linear: str) -> str:
    """Assumption behind `methods_of`; empty where the methods of the format are published."""
    if overlap != "userbuffers" or linear not in AS_FORMAT:
        return ""
    return (
        f"user buffers of Transformer Engine with {linear} GEMMs: no configuration is published; methods, "
        f"pieces and SMs are those of {AS_FORMAT[linear]}"
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


@dataclass(frozen=True, slots=True)
class HalfOverlap:
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
