"""What stays exposed of a collective that a framework runs beside compute (docs/model.md, eq. O1-O5)."""

from __future__ import annotations

from typing import Literal, NamedTuple

from moesim.hwmodels.provenance import SourcedFraction

TensorOverlap = Literal["none", "weight-gradient", "full"]

LOST_BESIDE_NCCL = SourcedFraction(
    value=0.213,
    kind="measured",
    source="benchmarks/gpu/results/2026-11-20-h200-x4-beside-nccl.json: median of 14 products (BF16, FP8) "
    "beside an all-gather or reduce-scatter, 4x H200, torch 2.11.0, NCCL 2.28.9, 24 channels",
    date="2026-11-20",
    note="eq. O5; 0.18 to 0.30, attention 0.15 to 0.20, pointwise 0.29 to 0.49; 24 of 132 SMs are 0.182",
)
"""Seconds by which compute falls behind for every second that the collective beside it takes alone."""


class Products(NamedTuple):
    """Seconds of the matrix products of one half of a layer: forward, input gradient, weight gradient."""

    forward_s: float
    input_s: float
    weight_s: float


def beside(collective_s: float, compute_s: float) -> float:
    """Eq. O1: seconds that a collective adds to the compute it runs beside.

    `collective_s` is its time alone. What is longer than the compute stays exposed; beside the rest the
    compute falls behind (eq. O5).
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
