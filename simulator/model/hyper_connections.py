"""Hyper-connections: parallel residual streams that every half of a layer reads, writes and mixes.

Manifold-constrained hyper-connections (arXiv 2512.24880; DeepSeek-V4 report, arXiv 2606.19348):
from all `n` streams of a token, one small GEMM computes `n` weights that read the half's input, `n` that
write its output, and an n x n mixing of the streams, which Sinkhorn iterations make doubly stochastic.
"""

from __future__ import annotations


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
