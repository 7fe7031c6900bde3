"""Exposed part of the collectives that a framework overlaps with compute (docs/model.md, eq. O1-O5, O8)."""

from __future__ import annotations

from typing import NamedTuple

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
