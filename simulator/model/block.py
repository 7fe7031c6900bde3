"""Kinds of block that a model is cut into, and what a block of a kind is made of."""

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
"""A multi-token-prediction module: one more layer with its projection and norms; its head pass is a block."""
DENSE: Final = "dense"
ROUTED: Final = "moe"

PLAIN_KINDS: tuple[BlockKind, ...] = (EMBEDDING, DENSE, ROUTED, MTP, HEAD)
"""The kinds of a model whose layers all have the same attention."""


def layer_kind(routed: bool, attention: str | None) -> BlockKind:
    """The kind of a layer: `dense` or `moe`, and `/name` of its attention where a model has several."""
    feed_forward = ROUTED if routed else DENSE
    return feed_forward if attention is None else f"{feed_forward}/{attention}"


def is_layer(kind: BlockKind) -> bool:
    """Whether it is a layer of the main model: no embedding, no head, no MTP module."""
    return kind not in (EMBEDDING, HEAD, MTP)


def is_routed_layer(kind: BlockKind) -> bool:
    """Whether it is a layer of the main model with routed experts."""
    return kind.partition("/")[0] == ROUTED


def may_route(kind: BlockKind) -> bool:
    """Whether blocks of this kind have routed experts wherever the model has any."""
    return kind == MTP or is_routed_layer(kind)


class Layer(NamedTuple):
    """One transformer layer."""

    attention: Attention
    feed_forward: FeedForward


@dataclass(frozen=True, slots=True)
class BlockShape:
    """A kind of block with the layer inside it; embedding and head have none."""

    kind: BlockKind
    layer: Layer | None = None

    @property
    def routed(self) -> bool:
        """Whether tokens choose experts in it."""
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
