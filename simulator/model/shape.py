"""The shape of a transformer: the sizes that determine its parameters, GEMMs and traffic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from typing import Annotated, Any, Literal, Self, TypeVar

from msgspec import Struct
from pydantic import (
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
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
from moesim.simulator.model.attention.protocol import NoAttention
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
from moesim.simulator.model.feed_forward.protocol import FeedForward, NoFeedForward
from moesim.simulator.model.operator import BlockKind
from moesim.simulator.model.parameters import ModelPart
from moesim.simulator.model.precision import BYTES_PER_ELEMENT

# -- patterns of layers as model files write them: names with counts, which repeat over the layers -----

MAX_LAYERS = 1000
"""Most layers of a model, far above any real one; lists of layers are built, so a mistyped number must not
exhaust the memory."""

_MOST_IN_GROUP = 32
"""Most names in a group that is written once for all its repeats."""

NONE = "none"
"""Name of a half that a layer does not have, in `attention_layers` and `ffn_layers`."""


def check_pattern(key: str, entries: tuple[str, ...], n_layers: int, known: Collection[str]) -> None:
    """Check a list of names with counts; raises ValueError where it does not name `n_layers` layers.

    Every entry is one of `known` or `none`, the numbers of layers repeat to `n_layers` a whole number of
    times, and every known name has a layer. The layers are added up before any list is built, because a file
    may ask for many.
    """
    counts = [_counted(key, entry) for entry in entries]
    total = sum(times for _, times in counts)
    if total and n_layers % total:
        raise ValueError(f"{key} has {total} entries, which do not repeat to {n_layers} layers")
    listed = dict.fromkeys(name for name, _ in counts)
    unknown = [name for name in listed if name not in known and name != NONE]
    if unknown:
        raise ValueError(f"{key} names {unknown[0]!r}; the model has {', '.join(known)}")
    unused = [name for name in known if name not in listed]
    if unused:
        raise ValueError(f"no layer of {key} has {unused[0]!r}")
    if not total:
        raise ValueError(f"{key} is empty: name the half of every layer")


def expanded(key: str, entries: tuple[str, ...], n_layers: int) -> tuple[str, ...]:
    """Name of every layer; `entries` have passed `check_pattern`."""
    names = [name for name, times in (_counted(key, entry) for entry in entries) for _ in range(times)]
    return tuple(names) * (n_layers // len(names))


def _counted(key: str, entry: str) -> tuple[str, int]:
    """Name and count of an entry such as "linear*3"; raises ValueError for an illegal count."""
    name, star, times = entry.partition("*")
    if not star:
        return entry, 1
    if not (times.isascii() and times.isdigit() and len(times) <= 4 and 0 < int(times) <= MAX_LAYERS):
        raise ValueError(f"{key}: {entry!r} is no name with a count such as linear*3")
    return name, int(times)


def in_groups(names: Sequence[str], joint: str = ", ") -> str:
    """Names in order as runs, such as "3 dense, 58 moe"; groups that repeat are written once, with a count.

    From the front, the group is taken whose repeats reach farthest, as in "1 dense, 2 x (3 a, 1 b), 1 c".
    """
    parts, start = [], 0
    while start < len(names):
        size, times = _farthest(names[start:])
        group = names[start : start + size]
        parts.append(f"{times} {group[0]}" if size == 1 else f"{times} x ({in_groups(group, joint)})")
        start += size * times
    return joint.join(parts)


def _farthest(names: Sequence[str]) -> tuple[int, int]:
    """(size, times) of the group at the front whose repeats reach farthest; the smallest of equals."""
    best = (1, len(list(next(groupby(names))[1])))
    for size in range(2, min(len(names) // 2, _MOST_IN_GROUP) + 1):
        group, times = tuple(names[:size]), 1
        while tuple(names[times * size : (times + 1) * size]) == group:
            times += 1
        if times > 1 and size * times > best[0] * best[1]:
            best = (size, times)
    return best


class Numerics(ModelPart):
    """Numbers that a trainer needs beside the shape; none of them changes a prediction."""

    rope_theta: PositiveFloat | None = None
    """Base of the rotary position embedding."""
    norm_epsilon: PositiveFloat | None = None
    """Added to the mean square in RMSNorm."""
    router_scale: PositiveFloat | None = None
    """Factor on the weights of a token's routed experts."""
    context: PositiveInt | None = None
    """Positions, in tokens, for which the model was trained or extended; a scenario may be longer."""
    activation: Annotated[str, StringConstraints(pattern=r"^[a-z0-9_]{1,40}$")] | None = None
    """Nonlinearity of the feed-forward halves where it is not SiLU: gelu, relu2, situ and others."""


WeightFormat = Literal["bf16", "fp8", "nvfp4", "mxfp4"]
"""Format of weights, routed experts or keys and values that are served."""


class PublishedFormats(ModelPart):
    """Formats in which a model's weights were published; only serving reads them."""

    linear: WeightFormat | None
    """Linear layers outside routed experts; None for a format that is not priced."""
    experts: WeightFormat | None
    """Routed experts; None for a format that is not priced."""
    note: str = ""
    """What is counted otherwise than published, or why a format is not priced."""


_LEFT_OUT = (
    "attention", "attentions", "attention_layers", "dense_ffns", "ffn_layers", "mtp_layer", "numerics",
    "published",
)  # fmt: skip
"""Keys that are not written where a model does not have them."""
_RESERVED = (DENSE, ROUTED, NONE, EMBEDDING, HEAD, MTP)
"""Names that mean something else in `ffn_layers` or as kinds of block."""


class ShapeSource(ModelPart):
    """Source of the numbers of a shape."""

    kind: Kind
    reference: str
    date: Annotated[DateText, Field(strict=False)] = UNDATED


_Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]+$")]


_Value = TypeVar("_Value")


class _Named(RootModel[dict[_Name, _Value]]):
    model_config = ConfigDict(frozen=True, strict=True)

    def __hash__(self) -> int:
        """Hash without regard to order, as equality ignores it."""
        return hash(frozenset(self.root.items()))


class Attentions(_Named[AnyAttention]):
    """Kinds of attention of one model, by names that the model file chooses."""


class DenseFFNs(_Named[PositiveInt]):
    """Widths of dense FFNs of one model, by names that the model file chooses."""


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
    published: PublishedFormats | None = None
    """Formats of the published weights; absent: BF16, or those of the shipped model of that name."""
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
        own = {
            "several-attentions": len(attentions) > 1,
            "layernorm": self.norm == "layernorm",
            "post-norm": self.norm_position == "post",
            "sandwich-norms": self.norm_position == "sandwich",
            "ffn-bias": self.ffn_bias,
            "several-ffn-widths": self.dense_ffns is not None,
            "missing-halves": NONE in (*self._attention_names, *self._feed_forward_names),
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


class StateSize(Struct, frozen=True):
    """What one kind of attention keeps of one sequence over all of its layers."""

    name: str | None
    """Name in `attentions`; None in a model with one kind."""
    kind: str
    layers: int
    bytes_per_token: float
    """Bytes of one more token behind the last length; 0 for windows and recurrent states."""
    bytes_at: tuple[float, ...]
    """Bytes at every length that was asked for."""


def state_sizes(shape: ModelShape, lengths: Sequence[int], dtype: str = "bf16") -> tuple[StateSize, ...]:
    """Keys, values and recurrent states of one sequence at several lengths, by kind of attention."""
    element = BYTES_PER_ELEMENT[dtype]
    layers = Counter(kind.partition("/")[2] or None for kind in shape.layer_kinds)
    sizes = []
    for name, attention in shape.attention_by_name.items():
        count = layers[name]
        at = [count * attention.state_bytes(length, element) for length in lengths]
        more = count * attention.state_bytes(max(lengths) + 1, element) - at[lengths.index(max(lengths))]
        sizes.append(StateSize(name, attention.kind, count, more, tuple(at)))
    return tuple(sizes)
