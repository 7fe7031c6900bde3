"""What stays exposed of a collective that a framework runs beside compute (docs/model.md, eq. O1-O5, O8)."""

from __future__ import annotations

from typing import Literal, NamedTuple

TensorOverlap = Literal["none", "weight-gradient", "full"]


class OverlapSlowDown(NamedTuple):
    """How much an overlapped collective and its compute slow each other down (eqs. O5 and O8)."""

    compute_lost: float
    """Seconds by which compute falls behind for every second that the collective takes alone."""
    collective_factor: float = 1.0
    """How many times as long as alone the collective takes."""


class HalfLayerGemms(NamedTuple):
    """Seconds of the GEMMs of one half of a layer: forward, input gradient, weight gradient."""

    forward_s: float
    input_s: float
    weight_s: float


def exposed_overlapped(collective_s: float, compute_s: float, slow_down: OverlapSlowDown) -> float:
    """Eq. O1: seconds that a collective adds to the compute it overlaps with.

    `collective_s` is its time alone. What does not finish during the compute stays exposed, at its own
    speed again; during the rest the compute falls behind.
    """
    hidden = min(collective_s, compute_s / slow_down.collective_factor)
    return collective_s - hidden + slow_down.compute_lost * hidden


def pipelined(collective_s: float, compute_s: float, pieces: int, slow_down: OverlapSlowDown) -> float:
    """Eq. O2: a collective in `pieces` overlapped with the GEMM or attention that makes or needs it.

    The first piece has nothing to hide behind; the others hide behind the other pieces of the compute.
    """
    rest = (pieces - 1) / pieces
    return collective_s / pieces + exposed_overlapped(collective_s * rest, compute_s * rest, slow_down)


def exposed_forward(
    gather_s: float, gemms: HalfLayerGemms, tp: int, overlap: TensorOverlap, slow_down: OverlapSlowDown
) -> float:
    """Eq. O3: the all-gather and reduce-scatter of half a layer, forward (`gather_s` each)."""
    both = 2.0 * gather_s
    return pipelined(both, gemms.forward_s, tp, slow_down) if overlap == "full" else both


def exposed_backward(
    gather_s: float,
    gemms: HalfLayerGemms,
    tp: int,
    overlap: TensorOverlap,
    slow_down: OverlapSlowDown,
    *,
    sequence_parallel: bool,
) -> float:
    """Eq. O3: the collectives of half a layer, backward.

    With sequence parallelism the gradient is gathered, the kept input is gathered again for the weight
    gradient (beside the input gradient's GEMM) and the new gradient is scattered; without, the new
    gradient is all-reduced. The last of them may hide behind the weight gradient.
    """
    if overlap == "none":
        return 2.0 * gather_s
    if overlap == "full":
        moved = (3.0 if sequence_parallel else 2.0) * gather_s
        return pipelined(moved, gemms.input_s + gemms.weight_s, tp, slow_down)
    if not sequence_parallel:
        return exposed_overlapped(2.0 * gather_s, gemms.weight_s, slow_down)
    hidden = [exposed_overlapped(gather_s, s, slow_down) for s in (gemms.input_s, gemms.weight_s)]
    return gather_s + hidden[0] + hidden[1]


def behind_window(collective_s: float, window_s: float, parts: int, slow_down: OverlapSlowDown) -> float:
    """Eq. O4: gradients reduced (or parameters gathered) part by part behind `window_s` of compute.

    The last part to be ready has nothing behind which to hide.
    """
    last = collective_s / max(1, parts)
    return last + exposed_overlapped(collective_s - last, window_s, slow_down)
