"""Counts the parameters and model FLOPs of a shape by summing over its layers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from importlib import resources
from math import fsum
from typing import Annotated, Literal, Self

from msgspec import Struct
from pydantic import Field, StringConstraints, model_validator

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.frozen import Frozen
from moesim.hwmodels.provenance import DateText
from moesim.hwmodels.validation import validate_model
from moesim.hwmodels.yaml_io import parse_mapping
from moesim.simulator.model.block import EMBEDDING, HEAD, MTP, head_parameters, is_layer, site_parameters
from moesim.simulator.model.operator import BlockKind
from moesim.simulator.model.parameters import Parameters
from moesim.simulator.model.shape import ModelShape


def expert_parameters(shape: ModelShape) -> int:
    """Parameters of one routed expert's gate, up and down projection; 0 for a dense model."""
    return shape.moe.expert_parameters(shape.hidden) if shape.moe else 0


def block_parameters(shape: ModelShape, kind: BlockKind, activated: bool = False) -> Parameters:
    """Parameters of one block; those of an MTP module exclude embedding and head, which it shares.

    With `activated` only the experts that one token uses count. Raises InputError for a kind that the model
    does not have. Hyper-connections count as norms: published FLOP counts leave both out.
    """
    h, block = shape.hidden, shape.block(kind)
    norm = h * (2 if shape.norm == "layernorm" else 1)
    if block.layer is None:
        table = shape.vocab * h
        if block.is_embedding:
            return Parameters(embedding=table + shape.learned_positions * h)
        return Parameters(head=table, norms=norm + head_parameters(h, shape.residual_streams))
    attention, feed_forward = block.layer.attention, block.layer.feed_forward
    layer = feed_forward.parameters(h, activated) + Parameters(
        attention=attention.parameters(h),
        norms=block.layer.norms * norm
        + attention.norm_parameters()
        + block.layer.halves * site_parameters(h, block.layer.streams),
    )
    return layer + Parameters(mtp_projection=2 * h * h, norms=3 * norm) if block.is_mtp else layer


def parameters_by_component(shape: ModelShape, activated: bool = False) -> Parameters:
    """Parameters of the main model; a tied head counts once, as embedding (docs/model.md, eq. F1).

    MTP modules are left out.
    """
    out = block_parameters(shape, EMBEDDING) + block_parameters(shape, HEAD)
    if shape.tied_embeddings:
        out = out + Parameters(head=-out.head)
    for kind, count in shape.layer_counts.items():
        out = out + block_parameters(shape, kind, activated) * count
    return out


def parameters_total(shape: ModelShape) -> int:
    """Total parameters of the main model, without MTP modules as in published totals."""
    return parameters_by_component(shape).total


def parameters_mtp(shape: ModelShape) -> int:
    """Parameters that the MTP modules add, without the embedding and head of the main model."""
    return block_parameters(shape, MTP).total * shape.mtp_layers if shape.mtp_layers else 0


def parameters_activated(shape: ModelShape, embedding: bool) -> int:
    """Parameters that one token uses; with `embedding` the whole table counts, as in some reports.

    A tied table is the weight of the head's GEMM, so it counts in either case.
    """
    parts = parameters_by_component(shape, activated=True)
    return parts.total if embedding or shape.tied_embeddings else parts.total - parts.embedding


def uncounted_parameters(shape: ModelShape, kind: BlockKind) -> int:
    """Parameters of a block's attention that published FLOP counts leave out, such as an indexer's."""
    layer = shape.block(kind).layer
    return 0 if layer is None else layer.attention.uncounted_parameters(shape.hidden)


def flop_per_token(shape: ModelShape, sequence: int, causal: bool, kept_rows: float = 1.0) -> float:
    """Model FLOPs of one training token, forward and backward, in the convention of published MFUs.

    Eq. F2 takes 6 x the matrix parameters that a token uses (without embedding, router, norms, MTP, indexer
    and recompute) plus 3 x the GEMMs of attention, halved when only the causal half counts. It reproduces
    249.8 and 280.5 GF for DeepSeek-V3 at 4,096 tokens (arXiv 2505.09343v2, tables 2 and 4). `kept_rows` is
    the share of the routed rows that capacity did not drop; dropped rows take no FLOPs.
    """
    parts = parameters_by_component(shape, activated=True)
    left_out = sum(count * uncounted_parameters(shape, kind) for kind, count in shape.layer_counts.items())
    weights = parts.in_counted_gemms - left_out
    if shape.tied_embeddings:
        weights += shape.vocab * shape.hidden
    computed = weights - (1.0 - kept_rows) * parts.routed_experts
    return 6.0 * computed + attention_flop_per_token(shape, sequence, causal)


def blocks_flop_per_token(
    shape: ModelShape, kinds: Sequence[BlockKind], sequence: int, causal: bool, kept_rows: float = 1.0
) -> float:
    """`flop_per_token` of the layers among these blocks, and of one head if they include any.

    Embeddings, and MTP modules with their own heads, do not count.
    """
    layers = [kind for kind in kinds if is_layer(kind)]
    activated = {kind: block_parameters(shape, kind, activated=True) for kind in set(layers)}
    weights = fsum(
        p.in_counted_gemms - uncounted_parameters(shape, kind) - (1.0 - kept_rows) * p.routed_experts
        for kind, p in ((kind, activated[kind]) for kind in layers)
    )
    head = block_parameters(shape, HEAD).in_counted_gemms if HEAD in kinds else 0
    attention = fsum(_attention_flop(shape, kind, sequence, causal) for kind in layers)
    return 6.0 * (weights + head) + attention


def attention_flop_per_token(shape: ModelShape, sequence: int, causal: bool) -> float:
    """Model FLOPs of attention per token, without its projections, over all layers (eq. F3)."""
    return fsum(n * _attention_flop(shape, kind, sequence, causal) for kind, n in shape.layer_counts.items())


def _attention_flop(shape: ModelShape, kind: BlockKind, sequence: int, causal: bool) -> float:
    layer = shape.block(kind).layer
    return 0.0 if layer is None else layer.attention.flop_per_token(sequence, causal)


# -- published sizes ---------------------------------------------------------------------------------
# Compares the counted parameters of shipped models with the published figures, by the publisher's own
# rule.
#
# The figures are in `simulator/data/published/model-sizes.yaml`. Publishers count differently: some
# leave the embedding out, some include multi-token-prediction modules or a vision tower. Every entry
# says what its figures include, and the count here includes the same.

FILE = "data/published/model-sizes.yaml"

TOTAL_LIMIT, ACTIVATED_LIMIT = 0.005, 0.02
"""Largest relative error of a total and of an activated count that a shipped model may have, unless the
figure has fewer than three digits and its rounding is coarser."""

Counted = Literal["embedding", "head", "indexer", "mtp"]
"""Parts of a model that some publishers count and others leave out."""

_Figure = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,4}(\.[0-9]{1,4})?[MBT]$")]
_SCALES = {"M": 10**6, "B": 10**9, "T": 10**12}


class PublishedCount(Frozen):
    """A number of parameters as it was printed, with what it includes."""

    value: _Figure
    """As printed, such as "671B" or "1.04T"."""
    counts: Annotated[tuple[Counted, ...], Field(strict=False)] = ("embedding", "head", "indexer")
    """What it includes besides the layers and the final norm; a tied table is one part, under either name."""
    outside: _Figure | None = None
    """Parameters of parts that it includes and a language model's shape lacks, such as a vision tower."""
    rounded_to: _Figure | None = None
    """What the figure is a multiple of, where its last zeros are no digits, as in a model called 30B."""

    @model_validator(mode="after")
    def _rounded(self) -> Self:
        if self.rounded_to is not None and _number(self.value) % _number(self.rounded_to):
            raise ValueError(f"value={self.value} is no multiple of rounded_to={self.rounded_to}")
        if self.rounded_to is not None and _number(self.value) >= 100 * _number(self.rounded_to):
            raise ValueError(f"value={self.value} has three digits or more: leave out rounded_to")
        return self

    @property
    def parameters(self) -> float:
        """The figure as a number, without the parts outside the language model."""
        return _number(self.value) - (0.0 if self.outside is None else _number(self.outside))

    def limit(self, relative: float) -> float:
        """Largest absolute error: `relative` of the figure, or its rounding if it has one or two digits."""
        digits, _, decimals = self.value[:-1].partition(".")
        if self.rounded_to is not None:
            unit = _number(self.rounded_to)
        elif len((digits + decimals).lstrip("0")) < 3:
            unit = _SCALES[self.value[-1]] / 10.0 ** len(decimals)
        else:
            unit = 0.0
        return max(relative * _number(self.value), unit / 2.0)


class PublishedSize(Frozen):
    """What was published on the size of one shipped model."""

    model: str
    total: PublishedCount
    activated: PublishedCount | None = None
    """None for dense models, and where the figure is left out."""
    activated_left_out: str = ""
    """Why a model with experts has no activated figure here: none was found, or no rule reproduces it."""
    source: str
    """The document in which the figures were read: a report and its section, or a file of a repository."""
    date: Annotated[DateText, Field(strict=False)]
    """Date of that document or of the file's commit, or the day on which it was read where it has none."""
    note: str = ""
    """What the source says on its way of counting, or what it leaves open."""

    @model_validator(mode="after")
    def _left_out_or_not(self) -> Self:
        if self.activated is not None and self.activated_left_out:
            raise ValueError("activated_left_out says why no figure is given: leave one of them out")
        return self


class _Sizes(Frozen):
    models: tuple[PublishedSize, ...]


class SizeComparison(Struct, frozen=True):
    """A count beside its published figure, counted by the publisher's rule."""

    counted: int
    published: PublishedCount
    relative: float
    """Limit of the relative error where the figure's own rounding is finer."""

    @property
    def error(self) -> float:
        """counted / published - 1."""
        return self.counted / self.published.parameters - 1.0

    @property
    def agrees(self) -> bool:
        """Whether the error is within the limit, or within the rounding of a figure of one or two digits."""
        return abs(self.counted - self.published.parameters) <= self.published.limit(self.relative)


@lru_cache(maxsize=1)
def published_sizes() -> dict[str, PublishedSize]:
    """Published sizes by the name of the shipped model."""
    text = (resources.files("moesim.simulator") / FILE).read_text(encoding="utf-8")
    entries = validate_model(_Sizes, parse_mapping(text, FILE), FILE).models
    by_name = {entry.model: entry for entry in entries}
    if len(by_name) != len(entries):
        raise InputError(f"{FILE}: a model is named twice; keep one entry of each")
    return by_name


def compare_total(shape: ModelShape, size: PublishedSize) -> SizeComparison:
    """The total of a shape beside the published one."""
    return SizeComparison(_counted(shape, size.total, activated=False), size.total, TOTAL_LIMIT)


def compare_activated(shape: ModelShape, size: PublishedSize) -> SizeComparison | None:
    """The activated parameters of a shape beside the published ones; None without a figure."""
    if size.activated is None:
        return None
    return SizeComparison(_counted(shape, size.activated, activated=True), size.activated, ACTIVATED_LIMIT)


def _counted(shape: ModelShape, figure: PublishedCount, activated: bool) -> int:
    parts = parameters_by_component(shape, activated)
    embedding, head = "embedding" in figure.counts, "head" in figure.counts
    if shape.tied_embeddings:
        embedding = embedding or head
    count = parts.total - (0 if embedding else parts.embedding) - (0 if head else parts.head)
    if "indexer" not in figure.counts:
        layers = shape.layer_counts.items()
        count -= sum(times * uncounted_parameters(shape, kind) for kind, times in layers)
    if "mtp" in figure.counts and shape.mtp_layers:
        count += block_parameters(shape, MTP, activated).total * shape.mtp_layers
    return count


def _number(text: str) -> float:
    return float(text[:-1]) * _SCALES[text[-1]]
