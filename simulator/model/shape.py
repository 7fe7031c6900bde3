"""The shape of a transformer: the sizes that determine its parameters, GEMMs and traffic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    RootModel,
    SerializerFunctionWrapHandler,
    StringConstraints,
    model_serializer,
    model_validator,
)

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.provenance import UNDATED, DateText, Kind
from moesim.simulator.common.bounded_cache import BoundedCache, Same
from moesim.simulator.model.attention import AnyAttention, Attention
from moesim.simulator.model.attention.none import NoAttention
from moesim.simulator.model.block import (
    DENSE,
    EMBEDDING,
    HEAD,
    MTP,
    ROUTED,
    BlockShape,
    Layer,
    is_routed_layer,
    layer_kind,
)
from moesim.simulator.model.feed_forward.dense import DenseFFN
from moesim.simulator.model.feed_forward.moe import MoE
from moesim.simulator.model.feed_forward.none import NoFeedForward
from moesim.simulator.model.feed_forward.protocol import FeedForward
from moesim.simulator.model.layer_pattern import MAX_LAYERS, NONE, check_pattern, expanded
from moesim.simulator.model.numerics import Numerics
from moesim.simulator.model.operator import BlockKind
from moesim.simulator.model.part import ModelPart

_LEFT_OUT = (
    "attention",
    "attentions",
    "attention_layers",
    "dense_ffns",
    "ffn_layers",
    "mtp_layer",
    "numerics",
)
"""Keys that are not written where a model does not have them."""
_RESERVED = (DENSE, ROUTED, NONE, EMBEDDING, HEAD, MTP)
"""Names that mean something else in `ffn_layers` or as kinds of block."""


class ShapeSource(ModelPart):
    """Source of the numbers of a shape."""

    kind: Kind
    reference: str
    date: Annotated[DateText, Field(strict=False)] = UNDATED


_Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]+$")]


class Attentions(RootModel[dict[_Name, AnyAttention]]):
    """Kinds of attention of one model, by names that the model file chooses."""

    model_config = ConfigDict(frozen=True, strict=True)

    def __hash__(self) -> int:
        """Hash without regard to order, as equality ignores it."""
        return hash(frozenset(self.root.items()))


class DenseFFNs(RootModel[dict[_Name, PositiveInt]]):
    """Widths of dense FFNs of one model, by names that the model file chooses."""

    model_config = ConfigDict(frozen=True, strict=True)

    def __hash__(self) -> int:
        """Hash without regard to order, as equality ignores it."""
        return hash(frozenset(self.root.items()))


_Pattern = Annotated[tuple[str, ...], Field(strict=False)]


class ModelShape(ModelPart):
    """A decoder-only transformer; the keys of a model file are these field names.

    Widths are in elements. Layer indices count from 0. A layer has an attention half and a feed-forward half;
    either may be missing (`none`), as in hybrid models whose layers are a mixer, an attention or experts.
    Multi-token-prediction modules come after the last layer. By default they are MoE where `moe` is given
    (DeepSeek-V3 report, section 2.2), with the attention of the last layer.
    """

    name: str
    source: ShapeSource
    n_layers: Annotated[PositiveInt, Field(le=MAX_LAYERS)]
    hidden: PositiveInt
    vocab: PositiveInt
    attention: AnyAttention | None = None
    """Attention of every layer; a model with several kinds has `attentions` instead."""
    attentions: Attentions | None = None
    """Attention by name, for a model whose layers differ in it."""
    attention_layers: _Pattern | None = None
    """Names of `attentions`, or `none`, in the order of the layers, with counts such as `linear*3`; a shorter
    list repeats, a whole number of times."""
    dense_ffn: PositiveInt | None = None
    """Width of the dense FFN; None where no layer has one, or where `dense_ffns` names several."""
    dense_ffns: DenseFFNs | None = None
    """Widths of dense FFNs by name, for a model whose layers differ in it."""
    ffn_layers: _Pattern | None = None
    """`moe`, `dense`, `none` or names of `dense_ffns` in the order of the layers, with counts as in
    `attention_layers`; without it all layers are MoE but `moe.dense_layers`, or all are dense."""
    ffn_gated: bool = True
    """Dense FFN of gate, up and down projection (SwiGLU); false: up and down only (GELU, squared ReLU)."""
    ffn_bias: bool = False
    """Biases of the dense FFN's projections."""
    moe: MoE | None = None
    mtp_layers: NonNegativeInt = 0
    mtp_layer: str | None = None
    """Kind of the layer inside an MTP module where the default does not hold, such as `dense/sliding`."""
    tied_embeddings: bool
    learned_positions: NonNegativeInt = 0
    """Rows of a table of learned positions; 0 without one."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """`layernorm` has a bias beside its weight."""
    norm_position: Literal["pre", "post", "sandwich"] = "pre"
    """Norms before each half of a layer, behind it, or both."""
    residual_streams: PositiveInt = 1
    """Parallel residual streams that hyper-connections mix (arXiv 2409.19606, 2512.24880); 1 is the plain
    residual stream."""
    numerics: Numerics | None = None
    """Numbers that a trainer needs and that change no prediction; absent: not known."""
    not_modelled: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """What the original model has and the simulator leaves out, in words for the result."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        self._check_attention()
        self._check_feed_forward()
        if self.mtp_layer is not None and not self.mtp_layers:
            raise ValueError("mtp_layer is given but mtp_layers is 0")
        if self.mtp_layers:
            try:
                self._layer(MTP)
            except InputError as error:
                raise ValueError(str(error)) from None
        return self

    def _check_attention(self) -> None:
        if self.attention is not None:
            if self.attentions is not None or self.attention_layers is not None:
                raise ValueError("attention is for all layers: leave out attentions and attention_layers")
            return
        if self.attentions is None or not self.attentions.root:
            raise ValueError("attention is missing: give one for all layers, or attentions by name")
        known = list(self.attentions.root)
        if NONE in known:
            raise ValueError("attentions: the name none says that a layer has no attention; choose another")
        if self.attention_layers is None:
            raise ValueError(f"attention_layers is missing: say which layers have {' and '.join(known)}")
        check_pattern("attention_layers", self.attention_layers, self.n_layers, known)

    def _check_feed_forward(self) -> None:
        named = {} if self.dense_ffns is None else self.dense_ffns.root
        for name in named:
            if name in _RESERVED:
                raise ValueError(f"dense_ffns: {name!r} means something else; choose another name")
        if self.ffn_layers is not None:
            if self.moe is not None and self.moe.dense_layers:
                raise ValueError("ffn_layers says which layers are dense: leave out moe.dense_layers")
            have = {ROUTED: self.moe, DENSE: self.dense_ffn}
            known = [name for name, part in have.items() if part is not None] + list(named)
            check_pattern("ffn_layers", self.ffn_layers, self.n_layers, known)
            return
        if named:
            raise ValueError(f"ffn_layers is missing: say which layers have {' and '.join(named)}")
        dense = self.moe.dense_layers if self.moe else tuple(range(self.n_layers))
        if dense and dense[-1] >= self.n_layers:
            raise ValueError(f"moe.dense_layers names layer {dense[-1]}; the last is {self.n_layers - 1}")
        if dense and self.dense_ffn is None:
            raise ValueError(f"dense_ffn is missing: {len(dense)} layers have a dense FFN")

    @model_serializer(mode="wrap")
    def _used_keys(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        data: dict[str, Any] = handler(self)
        return {key: value for key, value in data.items() if key not in _LEFT_OUT or value is not None}

    # -- layers --------------------------------------------------------------------------------------

    def is_moe_layer(self, index: int) -> bool:
        """Whether layer `index` has experts; indices from `n_layers` on are MTP modules."""
        if not 0 <= index < self.n_layers + self.mtp_layers:
            last = self.n_layers + self.mtp_layers - 1
            raise InputError(f"model {self.name}: no layer {index}; layers run from 0 to {last}.")
        if index >= self.n_layers:
            return self._layer(MTP).feed_forward.routed
        return self._feed_forward_names[index] == ROUTED

    @property
    def features(self) -> frozenset[str]:
        """Names of what the model has beyond plain layers of one attention, which a trainer must know of."""
        attentions = tuple(self.attention_by_name.values())
        empty = NONE in self._attention_names or NONE in self._feed_forward_names
        own = {
            "several-attentions": len(attentions) > 1,
            "layernorm": self.norm == "layernorm",
            "post-norm": self.norm_position == "post",
            "sandwich-norms": self.norm_position == "sandwich",
            "ffn-bias": self.ffn_bias,
            "several-ffn-widths": self.dense_ffns is not None,
            "missing-halves": empty,
            "mtp-layer": self.mtp_layer is not None,
            "learned-positions": self.learned_positions > 0,
            "residual-streams": self.residual_streams > 1,
        }
        experts = frozenset[str]() if self.moe is None else self.moe.features
        named = {name for name, is_so in own.items() if is_so}
        return experts.union(named, *(attention.features for attention in attentions))

    @property
    def routed_width(self) -> int:
        """Elements of a row that is sent to an expert: the hidden size, or the width of latent rows."""
        return self.hidden if self.moe is None else self.moe.row_width(self.hidden)

    @property
    def attention_by_name(self) -> Mapping[str | None, Attention]:
        """Attention by name; a model with one kind of attention has it under None."""
        if self.attention is not None:
            return {None: self.attention}
        assert self.attentions is not None
        return dict(self.attentions.root.items())

    @property
    def feed_forward_by_name(self) -> Mapping[str, FeedForward]:
        """Feed-forward half by the name that `ffn_layers` gives it."""
        widths = {} if self.dense_ffns is None else dict(self.dense_ffns.root)
        if self.dense_ffn is not None:
            widths[DENSE] = self.dense_ffn
        halves: dict[str, FeedForward] = {
            name: DenseFFN(width, self.ffn_gated, self.ffn_bias) for name, width in widths.items()
        }
        return halves if self.moe is None else halves | {ROUTED: self.moe}

    @property
    def _attention_names(self) -> tuple[str | None, ...]:
        if self.attention_layers is None:
            return (None,) * self.n_layers
        return expanded("attention_layers", self.attention_layers, self.n_layers)

    @property
    def _feed_forward_names(self) -> tuple[str, ...]:
        if self.ffn_layers is not None:
            return expanded("ffn_layers", self.ffn_layers, self.n_layers)
        dense = range(self.n_layers) if self.moe is None else self.moe.dense_layers
        return tuple(DENSE if i in dense else ROUTED for i in range(self.n_layers))

    @property
    def layer_kinds(self) -> tuple[BlockKind, ...]:
        """Kinds of the layers in forward order, MTP modules left out."""
        rows = zip(self._feed_forward_names, self._attention_names, strict=True)
        return tuple(layer_kind(feed_forward, attention) for feed_forward, attention in rows)

    @property
    def layer_counts(self) -> dict[BlockKind, int]:
        """Number of layers of each kind, dense kinds first, MTP modules left out."""
        counts = Counter(self.layer_kinds)
        return {kind: counts[kind] for kind in sorted(counts, key=is_routed_layer)}

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Attention and feed-forward half of every layer, MTP modules left out."""
        kinds = self.layer_kinds
        of_kind = {kind: self._layer(kind) for kind in dict.fromkeys(kinds)}
        return tuple(of_kind[kind] for kind in kinds)

    @property
    def main_layer_kind(self) -> BlockKind:
        """Most frequent kind of layer, among those with routed experts if there are any."""
        counts = self.layer_counts
        return max(counts, key=lambda kind: (is_routed_layer(kind), counts[kind]))

    @property
    def block_kinds(self) -> tuple[BlockKind, ...]:
        """Every kind of block that the model has, once."""
        return (EMBEDDING, *self.layer_counts, *((MTP,) if self.mtp_layers else ()), HEAD)

    def block(self, kind: BlockKind) -> BlockShape:
        """Contents of a kind of block; raises InputError for a kind that the model does not have."""
        if kind in (EMBEDDING, HEAD):
            return BlockShape(kind)
        return _BLOCKS.get((Same(self), kind), lambda: BlockShape(kind, self._layer(kind)))

    def _layer(self, kind: BlockKind) -> Layer:
        if kind == MTP:
            if not self.mtp_layers:
                raise InputError(f"model {self.name} has no MTP modules, so no block of kind {kind!r}")
            kind = self.mtp_layer or layer_kind(ROUTED if self.moe else DENSE, self._attention_names[-1])
        half, slash, name = kind.partition("/")
        attentions: dict[str | None, Attention] = {**self.attention_by_name, NONE: NoAttention()}
        halves: dict[str, FeedForward] = {**self.feed_forward_by_name, NONE: NoFeedForward()}
        attention, feed_forward = attentions.get(name if slash else None), halves.get(half)
        if half == ROUTED and self.moe is None:
            raise InputError(f"model {self.name} has no experts, so no block of kind {kind!r}")
        if attention is None or feed_forward is None or half == name == NONE:
            raise InputError(
                f"model {self.name} has no block of kind {kind!r}; it has {', '.join(self.block_kinds)}"
            )
        return Layer(attention, feed_forward, self.norm_position == "sandwich", self.residual_streams)


_BLOCKS: BoundedCache[BlockShape] = BoundedCache(1024)
"""Blocks of the models that were asked for before."""
