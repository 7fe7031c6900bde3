"""Hyper-connections: parallel residual streams that every half of a layer reads, writes and mixes.

Manifold-constrained hyper-connections (arXiv 2512.24880; DeepSeek-V4 report, arXiv 2606.19348):
from all `n` streams of a token, one small GEMM computes `n` weights that read the half's input, `n` that
write its output, and an n x n mixing of the streams, which Sinkhorn iterations make doubly stochastic.
"""

from __future__ import annotations

from moesim.simulator.model.operator import Operator
from moesim.simulator.model.primitives import BF16, move


def site_weights(streams: int) -> int:
    """Weights that one half of a layer computes for every token: reading, writing and mixing."""
    return streams * (2 + streams)


def site_parameters(hidden: int, streams: int) -> int:
    """Parameters of one half of a layer: the GEMM, its bias and three scales; 0 with one stream."""
    if streams == 1:
        return 0
    return site_weights(streams) * (streams * hidden + 1) + 3


def head_parameters(hidden: int, streams: int) -> int:
    """Parameters that join the streams before the head: a GEMM to one weight a stream, bias, one scale."""
    if streams == 1:
        return 0
    return streams * (streams * hidden + 1) + 1


def site_forward(tokens: float, hidden: int, streams: int, site: str) -> tuple[Operator, Operator]:
    """Kernels before and behind one half of a layer, for the token rows of one rank (eq. A7).

    The first reads all streams for the GEMM and once more to mix them into the half's input; the second reads
    the streams and the half's output and writes the new streams.
    """
    row = tokens * hidden * BF16
    return (
        move(f"{site}.hyper_pre", "elementwise", "F", 2 * streams * row, row, variant="hyper_pre"),
        move(
            f"{site}.hyper_post", "elementwise", "F", (streams + 1) * row, streams * row, variant="hyper_post"
        ),
    )


def site_backward(tokens: float, hidden: int, streams: int, site: str) -> tuple[Operator, Operator]:
    """Backward of both kernels, in the order in which they run.

    The gradient of the second kernel reads the gradients of the streams, the streams and the half's output,
    and writes the gradients of the latter two; that of the first reads the gradient of the half's input and
    the streams, and adds to the gradients of the streams.
    """
    row = tokens * hidden * BF16
    return (
        move(
            f"{site}.hyper_post.backward", "elementwise", "I", (2 * streams + 1) * row, (streams + 1) * row,
            variant="hyper_post_backward",
        ),
        move(
            f"{site}.hyper_pre.backward", "elementwise", "I", (2 * streams + 1) * row, streams * row,
            variant="hyper_pre_backward", launches=2,
        ),
    )  # fmt: skip
