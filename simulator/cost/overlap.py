"""What stays exposed of a collective that a framework runs beside compute (docs/model.md, eq. O1-O4)."""

from __future__ import annotations

from typing import Literal, NamedTuple

TensorOverlap = Literal["none", "weight-gradient", "full"]


class Products(NamedTuple):
    """Seconds of the matrix products of one half of a layer: forward, input gradient, weight gradient."""

    forward_s: float
    input_s: float
    weight_s: float


def pipelined(collective_s: float, product_s: float, pieces: int) -> float:
    """Eq. O1: a collective in `pieces` beside the product that makes or needs it.

    The first piece has nothing to hide behind; the others hide behind the product's other pieces.
    """
    beside = product_s * (pieces - 1) / pieces
    return max(collective_s / pieces, collective_s - beside)


def exposed_forward(gather_s: float, products: Products, tp: int, overlap: TensorOverlap) -> float:
    """Eq. O2: the all-gather and reduce-scatter of half a layer, forward (`gather_s` each)."""
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
        return max(0.0, 2.0 * gather_s - products.weight_s)
    again = max(0.0, gather_s - products.input_s)
    return gather_s + again + max(0.0, gather_s - products.weight_s)


def behind_window(collective_s: float, window_s: float, parts: int) -> float:
    """Eq. O4: gradients reduced (or parameters gathered) part by part behind `window_s` of compute.

    The last part to be ready has nothing behind which to hide.
    """
    return max(collective_s / max(1, parts), collective_s - window_s)
