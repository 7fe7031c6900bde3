"""Kinds of block that a model is divided into, and the layer inside a block of each kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from moesim.simulator.model.attention.protocol import Attention
from moesim.simulator.model.feed_forward.protocol import FeedForward
from moesim.simulator.model.operator import BlockKind

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


@dataclass(frozen=True, slots=True)
class BlockShape:
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
