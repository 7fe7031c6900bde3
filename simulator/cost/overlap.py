"""What stays exposed of a collective that a framework runs beside compute (docs/model.md, eq. O1-O5)."""

from __future__ import annotations

from typing import Literal, NamedTuple

from moesim.hwmodels.provenance import SourcedFraction

TensorOverlap = Literal["none", "weight-gradient", "full"]

LOST_BESIDE_NCCL = SourcedFraction(
    value=1.0 - 1345.5 / 1645.8,
    kind="measured",
    source="PyTorch trace of a Llama 3 8B FSDP step on 8x H200 (torch 2.11.0, NCCL 2.28.9, 24 CTAs): one "
    "cuBLAS product takes 1345.5 us alone (43 launches) and 1645.8 us beside a ring collective (34)",
    date="2026-11-20",
    note="eq. O5; pointwise kernels lose 8 to 14 %, attention 10 %",
)
"""Share of the time beside a collective by which compute falls behind."""


class Products(NamedTuple):
    """Seconds of the matrix products of one half of a layer: forward, input gradient, weight gradient."""

    forward_s: float
    input_s: float
    weight_s: float


def beside(collective_s: float, compute_s: float) -> float:
    """Eq. O1: seconds that a collective adds to the compute it runs beside.

    What is longer than the compute stays exposed; beside the rest the compute falls behind (eq. O5).
    """
    hidden = min(collective_s, compute_s)
    return collective_s - hidden + LOST_BESIDE_NCCL.value * hidden


def pipelined(collective_s: float, product_s: float, pieces: int) -> float:
    """Eq. O2: a collective in `pieces` beside the product that makes or needs it.

    The first piece has nothing to hide behind; the others hide behind the product's other pieces.
    """
    rest = (pieces - 1) / pieces
    return collective_s / pieces + beside(collective_s * rest, product_s * rest)


def exposed_forward(gather_s: float, products: Products, tp: int, overlap: TensorOverlap) -> float:
    """Eq. O3: the all-gather and reduce-scatter of half a layer, forward (`gather_s` each)."""
    both = 2.0 * gather_s
    return pipelined(both, products.forward_s, tp) if overlap == "full" else both


def exposed_backward(
    gather_s: float, products: Products, tp: int, overlap: TensorOverlap, *, sequence_parallel: bool
) -> float:
    """Eq. O3: the collectives of half a layer, backward.

    With sequence parallelism the gradient is gathered, the kept input is gathered again for the weight
    gradient (beside the input gradient's product) and the new gradient is scattered; without, the new
    gradient is all-reduced. The last of them may hide behind the weight gradient.
    """
    if overlap == "none":
        return 2.0 * gather_s
    if overlap == "full":
        moved = (3.0 if sequence_parallel else 2.0) * gather_s
        return pipelined(moved, products.input_s + products.weight_s, tp)
    if not sequence_parallel:
        return beside(2.0 * gather_s, products.weight_s)
    return gather_s + beside(gather_s, products.input_s) + beside(gather_s, products.weight_s)


def behind_window(collective_s: float, window_s: float, parts: int) -> float:
    """Eq. O4: gradients reduced (or parameters gathered) part by part behind `window_s` of compute.

    The last part to be ready has nothing behind which to hide.
    """
    last = collective_s / max(1, parts)
    return last + beside(collective_s - last, window_s)
