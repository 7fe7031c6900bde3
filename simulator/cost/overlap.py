"""What stays exposed of a collective that a framework runs beside compute (docs/model.md, eq. O1-O5, O8)."""

from __future__ import annotations

from typing import Literal, NamedTuple

TensorOverlap = Literal["none", "weight-gradient", "full"]


class Beside(NamedTuple):
    """What a collective and the compute beside it do to each other (eqs. O5 and O8)."""

    lost: float
    """Seconds by which compute falls behind for every second that the collective takes alone."""
    slower: float = 1.0
    """How many times as long as alone the collective takes."""


class Products(NamedTuple):
    """Seconds of the matrix products of one half of a layer: forward, input gradient, weight gradient."""

    forward_s: float
    input_s: float
    weight_s: float


def beside(collective_s: float, compute_s: float, effect: Beside) -> float:
    """Eq. O1: seconds that a collective adds to the compute it runs beside.

    `collective_s` is its time alone. What does not get through beside the compute stays exposed, at its own
    speed again; beside the rest the compute falls behind.
    """
    hidden = min(collective_s, compute_s / effect.slower)
    return collective_s - hidden + effect.lost * hidden


def pipelined(collective_s: float, product_s: float, pieces: int, effect: Beside) -> float:
    """Eq. O2: a collective in `pieces` beside the product that makes or needs it.

    The first piece has nothing to hide behind; the others hide behind the product's other pieces.
    """
    rest = (pieces - 1) / pieces
    return collective_s / pieces + beside(collective_s * rest, product_s * rest, effect)


def exposed_forward(
    gather_s: float, products: Products, tp: int, overlap: TensorOverlap, effect: Beside
) -> float:
    """Eq. O3: the all-gather and reduce-scatter of half a layer, forward (`gather_s` each)."""
    both = 2.0 * gather_s
    return pipelined(both, products.forward_s, tp, effect) if overlap == "full" else both


def exposed_backward(
    gather_s: float,
    products: Products,
    tp: int,
    overlap: TensorOverlap,
    effect: Beside,
    *,
    sequence_parallel: bool,
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
        return pipelined(moved, products.input_s + products.weight_s, tp, effect)
    if not sequence_parallel:
        return beside(2.0 * gather_s, products.weight_s, effect)
    hidden = [beside(gather_s, window_s, effect) for window_s in (products.input_s, products.weight_s)]
    return gather_s + hidden[0] + hidden[1]


def behind_window(collective_s: float, window_s: float, parts: int, effect: Beside) -> float:
    """Eq. O4: gradients reduced (or parameters gathered) part by part behind `window_s` of compute.

    The last part to be ready has nothing behind which to hide.
    """
    last = collective_s / max(1, parts)
    return last + beside(collective_s - last, window_s, effect)
