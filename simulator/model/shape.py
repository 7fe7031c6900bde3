"""The shape of a transformer: the sizes that determine its parameters, GEMMs and traffic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
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
from moesim.simulator.model.attention import AnyAttention, Attention
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
from moesim.simulator.model.feed_forward.protocol import FeedForward
from moesim.simulator.model.numerics import Numerics
from moesim.simulator.model.operator import BlockKind
from moesim.simulator.model.part import ModelPart

MAX_LAYERS = 1000
"""Most layers of a model, far above any real one; lists of layers are built, so a mistyped number must not
exhaust the memory."""

_LEFT_OUT = ("attention", "attentions", "attention_layers", "numerics")
"""Keys that are not written where a model does not have them."""


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


class ModelShape(ModelPart):
    """A decoder-only transformer; the keys of a model file are these field names.

    Widths are in elements. Layer indices count from 0. Multi-token-prediction modules come after the
    last layer and are MoE where `moe` is given (DeepSeek-V3 report, section 2.2); their attention is that of
    the last layer.
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
    attention_layers: Annotated[tuple[str, ...], Field(strict=False)] | None = None
    """Names of `attentions` in the order of the layers, with counts such as `linear*3`; a shorter list
    repeats, a whole number of times."""
    dense_ffn: PositiveInt | None = None
    """Width of the dense FFN; None where every layer is MoE."""
    ffn_gated: bool = True
    """Dense FFN of gate, up and down projection (SwiGLU); false: up and down only (GELU, squared ReLU)."""
    moe: MoE | None = None
    mtp_layers: NonNegativeInt = 0
    tied_embeddings: bool
    norm: Literal["rmsnorm"] = "rmsnorm"
    numerics: Numerics | None = None
    """Numbers that a trainer needs and that change no prediction; absent: not known."""
    not_modelled: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """What the original model has and the simulator leaves out, in words for the result."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        dense = self.moe.dense_layers if self.moe else tuple(range(self.n_layers))
        if dense and dense[-1] >= self.n_layers:
            raise ValueError(f"moe.dense_layers names layer {dense[-1]}; the last is {self.n_layers - 1}")
        if dense and self.dense_ffn is None:
            raise ValueError(f"dense_ffn is missing: {len(dense)} layers have a dense FFN")
        self._check_attention()
        return self

    def _check_attention(self) -> None:
        if self.attention is not None:
            if self.attentions is not None or self.attention_layers is not None:
                raise ValueError("attention is for all layers: leave out attentions and attention_layers")
            return
        if self.attentions is None or not self.attentions.root:
            raise ValueError("attention is missing: give one for all layers, or attentions by name")
        known = list(self.attentions.root)
        if self.attention_layers is None:
            raise ValueError(f"attention_layers is missing: say which layers have {' and '.join(known)}")
        counts = [_counted(entry) for entry in self.attention_layers]
        total = sum(
            times for _, times in counts
        )  # added up before any list is built: a file may ask for much
        if total and self.n_layers % total:
            raise ValueError(
                f"attention_layers has {total} entries, which do not repeat to {self.n_layers} layers"
            )
        listed = dict.fromkeys(name for name, _ in counts)
        unknown = [name for name in listed if name not in known]
        if unknown:
            raise ValueError(f"attention_layers names {unknown[0]!r}; attentions has {', '.join(known)}")
        unused = [name for name in known if name not in listed]
        if unused:
            raise ValueError(f"no layer of attention_layers has the attention {unused[0]!r}")

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
        return self.moe is not None and index not in self.moe.dense_layers

    @property
    def attention_by_name(self) -> Mapping[str | None, Attention]:
        """Attention by name; a model with one kind of attention has it under None."""
        if self.attention is not None:
            return {None: self.attention}
        assert self.attentions is not None
        return dict(self.attentions.root.items())

    @property
    def layer_kinds(self) -> tuple[BlockKind, ...]:
        """Kinds of the layers in forward order, MTP modules left out."""
        names: tuple[str | None, ...] = (None,)
        if self.attention_layers is not None:
            names = tuple(_expanded(self.attention_layers))
        return tuple(layer_kind(self.is_moe_layer(i), names[i % len(names)]) for i in range(self.n_layers))

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
        return BlockShape(kind, self._layer(kind))

    def _layer(self, kind: BlockKind) -> Layer:
        by_name = self.attention_by_name
        if kind == MTP:
            if not self.mtp_layers:
                raise InputError(f"model {self.name} has no MTP modules, so no block of kind {kind!r}")
            name: str | None = None
            if self.attention_layers is not None:
                *_, name = _expanded(self.attention_layers)
            return Layer(by_name[name], self._feed_forward(kind, ROUTED if self.moe else DENSE))
        half, slash, text = kind.partition("/")
        attention = by_name.get(text if slash else None)
        if attention is None or half not in (DENSE, ROUTED):
            raise InputError(
                f"model {self.name} has no block of kind {kind!r}; it has {', '.join(self.block_kinds)}"
            )
        return Layer(attention, self._feed_forward(kind, half))

    def _feed_forward(self, kind: BlockKind, half: str) -> FeedForward:
        if half == ROUTED:
            if self.moe is None:
                raise InputError(f"model {self.name} has no experts, so no block of kind {kind!r}")
            return self.moe
        if self.dense_ffn is None:
            raise InputError(f"model {self.name} has no dense FFN, so no block of kind {kind!r}")
        return DenseFFN(self.dense_ffn, self.ffn_gated)


def _expanded(names: tuple[str, ...]) -> Iterator[str]:
    """Repeat every name by its count; raises ValueError for an illegal count."""
    for entry in names:
        name, times = _counted(entry)
        yield from [name] * times


def _counted(entry: str) -> tuple[str, int]:
    """Name and count of an entry such as "linear*3"; raises ValueError for an illegal count."""
    name, star, times = entry.partition("*")
    if not star:
        return entry, 1
    if not (times.isascii() and times.isdigit() and len(times) <= 4 and 0 < int(times) <= MAX_LAYERS):
        raise ValueError(f"attention_layers: {entry!r} is no name with a count such as linear*3")
    return name, int(times)
