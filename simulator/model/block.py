"""Kinds of block that a model is divided into, and the layer inside a block of each kind."""

from __future__ import annotations

from typing import Final, NamedTuple

from msgspec import Struct

from moesim.simulator.model.attention.protocol import Attention
from moesim.simulator.model.feed_forward.protocol import FeedForward
from moesim.simulator.model.operator import BlockKind, Operator, Work
from moesim.simulator.model.primitives import BF16, add, move, norm, norm_backward, scale

EMBEDDING: Final = "embedding"
HEAD: Final = "head"
"""Final norm, output projection and loss over the local tokens."""
MTP: Final = "mtp"
"""Multi-token-prediction module: a further layer with its projection and norms; its head is another block."""
DENSE: Final = "dense"
ROUTED: Final = "moe"

PLAIN_KINDS: tuple[BlockKind, ...] = (EMBEDDING, DENSE, ROUTED, MTP, HEAD)
"""The kinds of a model whose layers all have the same attention."""


def layer_kind(feed_forward: str, attention: str | None) -> BlockKind:
    """Kind of a layer: the name of its feed-forward half (`dense`, `moe`, `none` or a name of the model's).

    `/name` of its attention follows if the model has several.
    """
    return feed_forward if attention is None else f"{feed_forward}/{attention}"


def is_layer(kind: BlockKind) -> bool:
    """Whether the kind is a layer of the main model, not an embedding, head or MTP module."""
    return kind not in (EMBEDDING, HEAD, MTP)


def is_routed_layer(kind: BlockKind) -> bool:
    """Whether the kind is a layer of the main model with routed experts."""
    return kind.partition("/")[0] == ROUTED


def may_route(kind: BlockKind) -> bool:
    """Whether blocks of this kind have routed experts if the model has experts."""
    return kind == MTP or is_routed_layer(kind)


class Layer(NamedTuple):
    """The two halves of one transformer layer, either of which may be empty, and its norms."""

    attention: Attention
    feed_forward: FeedForward
    sandwich_norms: bool = False
    """Whether each half has a norm behind it as well as before it."""
    streams: int = 1
    """Parallel residual streams that hyper-connections read, write and mix around each half."""

    @property
    def halves(self) -> int:
        """Number of halves that are not empty."""
        return (not self.attention.empty) + (not self.feed_forward.empty)

    @property
    def norms(self) -> int:
        """Norms of the layer's halves, without those inside the attention."""
        return self.halves * (2 if self.sandwich_norms else 1)


class BlockShape(Struct, frozen=True):
    """A kind of block with the layer inside it, which is None for embedding and head."""

    kind: BlockKind
    layer: Layer | None = None

    @property
    def routed(self) -> bool:
        """Whether the block has routed experts."""
        return self.layer is not None and self.layer.feed_forward.routed

    @property
    def is_embedding(self) -> bool:
        """Whether it is the embedding table."""
        return self.kind == EMBEDDING

    @property
    def is_head(self) -> bool:
        """Whether it is the output head with its loss."""
        return self.kind == HEAD

    @property
    def is_mtp(self) -> bool:
        """Whether it is a multi-token-prediction module."""
        return self.kind == MTP


# -- attention half of a layer: norms and the residual stream around any attention ---------------------
# The order is that of the kernels in DeepSeek's published H800 training profile
# (deepseek-ai/profile-data@449602428a1b, train.json).


def attention_forward(w: Work, layer: Layer) -> list[Operator]:
    """Operators from the attention norm to the FFN norm, without the gate; a missing half has no norm.

    The norm behind the FFN of a layer with sandwich norms is listed here too.
    """
    h, m = w.hidden, w.norm_tokens
    out: list[Operator] = []
    if not layer.attention.empty:
        out = [norm("attn_norm", "F", m, h, residual=True), *layer.attention.forward(w)]
        if layer.sandwich_norms:
            out.append(norm("attn_post_norm", "F", m, h))
        out.append(scale("residual_scale", "F", m, h))
    if not layer.feed_forward.empty:
        out.append(norm("ffn_norm", "F", m, h, residual=True))
        if layer.sandwich_norms:
            out.append(norm("ffn_post_norm", "F", m, h))
    return out


def attention_input_gradient(w: Work, layer: Layer) -> list[Operator]:
    """Operators from the gradient at the FFN norm's output to the gradient of the block's input."""
    h, m = w.hidden, w.norm_tokens
    out: list[Operator] = []
    if not layer.feed_forward.empty:
        if layer.sandwich_norms:
            out.append(norm_backward("ffn_post_norm.backward", m, h))
        out += [add("ffn_norm.add_gradient", "I", m, h), norm_backward("ffn_norm.backward", m, h)]
    if layer.attention.empty:
        return out
    out.append(scale("residual_scale.backward", "I", m, h))
    if layer.sandwich_norms:
        out.append(norm_backward("attn_post_norm.backward", m, h))
    return [
        *out,
        *layer.attention.input_gradient(w),
        add("attn_norm.add_gradient", "I", m, h),
        norm_backward("attn_norm.backward", m, h),
    ]


# -- hyper-connections: parallel residual streams that every half of a layer reads, writes and mixes ---
# Manifold-constrained hyper-connections (arXiv 2512.24880; DeepSeek-V4 report, arXiv 2606.19348): from
# all `n` streams of a token, one small GEMM computes `n` weights that read the half's input, `n` that
# write its output, and an n x n mixing of the streams, which Sinkhorn iterations make doubly stochastic.


def site_parameters(hidden: int, streams: int) -> int:
    """Parameters of one half of a layer: the GEMM, its bias and three scales; 0 with one stream."""
    weights = streams * (2 + streams)  # of reading, writing and mixing, for every token
    return 0 if streams == 1 else weights * (streams * hidden + 1) + 3


def head_parameters(hidden: int, streams: int) -> int:
    """Parameters that join the streams before the head: a GEMM to one weight a stream, bias, one scale."""
    return 0 if streams == 1 else streams * (streams * hidden + 1) + 1


def site_forward(tokens: float, hidden: int, streams: int, site: str) -> tuple[Operator, Operator]:
    """Kernels before and behind one half of a layer, for the token rows of one rank (eq. A7).

    The first reads all streams for the GEMM and once more to mix them into the half's input; the second reads
    the streams and the half's output and writes the new streams.
    """
    row = tokens * hidden * BF16
    pre, post = f"{site}.hyper_pre", f"{site}.hyper_post"
    return (
        move(pre, "elementwise", "F", 2 * streams * row, row, variant="hyper_pre"),
        move(post, "elementwise", "F", (streams + 1) * row, streams * row, variant="hyper_post"),
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
