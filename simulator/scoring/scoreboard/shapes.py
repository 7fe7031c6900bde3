"""Model shapes of published measurements: a model file with a source, checked against the row's columns.

Nothing is a default. A model with a published configuration is a shipped model file; the columns of a row
must agree with it, or `families.yaml` says why they differ. Other models are built from the row's columns and
facts with a source each.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, Generic, Literal, Self, TypeVar

from pydantic import NonNegativeInt, PositiveInt, ValidationError, model_validator

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.frozen import Frozen
from moesim.hwmodels.validation import nearest
from moesim.simulator.model.attention import GQA
from moesim.simulator.model.attention.recurrent import RecurrentMixer
from moesim.simulator.model.catalogue import load_model, shipped_models
from moesim.simulator.model.feed_forward.moe import MoE
from moesim.simulator.model.shape import ModelShape, ShapeSource, expanded
from moesim.simulator.scoring import published_data
from moesim.simulator.scoring.scoreboard.configurations import Published, published_of
from moesim.simulator.scoring.scoreboard.rows import OpenRow

FAMILIES_FILE = "families.yaml"
Column = Literal["layers", "hidden", "ffn", "heads", "kv_heads", "vocab", "n_experts", "topk"]
"""Columns of a row that describe the model."""
T = TypeVar("T")


class Fact(Frozen, Generic[T]):
    """A value and the text or file that states it."""

    value: T
    source: str


class ExplainedDifference(Frozen):
    """A column that differs from the model's configuration in the rows of a source, and why."""

    column: Literal["kv_heads"]
    rows: str
    """Beginning of the source of the rows."""
    because: str


class FamilyFacts(Frozen):
    """What the columns of a row leave unsaid about a model that has no published `config.json`."""

    head_dim: Fact[PositiveInt | Literal["hidden / heads"]]
    rotary: Fact[bool]
    qk_norm: Fact[bool]
    attention_bias: Fact[bool]
    """Biases of the projections to queries, keys and values, and of the output projection."""
    ffn_gated: Fact[bool]
    """Whether an FFN or an expert has a gate, that is three matrices."""
    ffn_bias: Fact[bool]
    norm: Fact[Literal["rmsnorm", "layernorm"]]
    tied: Fact[bool]
    learned_positions: Fact[NonNegativeInt | Literal["sequence"]]
    """Rows of a table of positions; `sequence`: one for every token of the row's sequence."""
    vocab: Fact[PositiveInt] | None = None
    """For rows whose table has no vocabulary."""
    dense_layers: Fact[NonNegativeInt] | None = None
    """First layers without experts; required for a mixture of experts, as the fields below are."""
    shared_experts: Fact[Literal[0]] | None = None
    scoring: Fact[Literal["softmax", "sigmoid"]] | None = None
    router_bias: Fact[bool] | None = None
    plain: Fact[Literal[True]]
    """The source describes whole layers, and none of `PLAIN` is in them."""


PLAIN = frozenset(
    {
        "v_head_dim", "sinks", "output_gate", "key_is_value", "attentions", "attention_layers", "dense_ffns",
        "ffn_layers", "mtp_layers", "mtp_layer", "norm_position", "residual_streams", "shared_ffn",
        "shared_gate", "groups", "groups_per_token", "group_score", "score_bias", "latent", "latent_norm",
        "zero_experts", "extra_norms", "context",
    }
)  # fmt: skip
"""Fields of a shape for what a plain transformer layer does not have."""


class Family(Frozen):
    """One entry of `families.yaml`: `model` names a shipped model, `facts` replace it."""

    models: tuple[str, ...]
    """Patterns of names of models in the rows."""
    arch: Literal["dense", "moe"]
    model: str | None = None
    """Name of a shipped model."""
    differs: tuple[ExplainedDifference, ...] = ()
    facts: FamilyFacts | None = None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if (self.model is None) == (self.facts is None):
            raise ValueError("give the name of a shipped model, or facts, one of them")
        facts = self.facts
        if facts and self.arch == "moe" and None in (facts.dense_layers, facts.shared_experts, facts.scoring):
            raise ValueError("dense_layers, shared_experts or scoring of a mixture of experts is missing")
        return self


class Families(Frozen):
    """The file `families.yaml`."""

    families: tuple[Family, ...]


@lru_cache(maxsize=1)
def families() -> tuple[Family, ...]:
    """Every known family. Raises InputError for a malformed entry."""
    return published_data(Families, FAMILIES_FILE).families


def family_of(row: OpenRow) -> Family:
    """The family of a row's model. Raises InputError if it is not known."""
    for family in families():
        if family.arch == row.arch and any(fnmatchcase(row.model, name) for name in family.models):
            return family
    if row.model in shipped_models() and (load_model(row.model).moe is not None) == (row.arch == "moe"):
        return Family(models=(row.model,), arch=row.arch, model=row.model)
    known = [name for family in families() for name in family.models]
    near = nearest(row.model, [*shipped_models(), *known])
    raise InputError(
        f"{row.id}: the shape of {row.model} is not known{near}; `moesim models` lists shipped ones"
    )


def shape_of(row: OpenRow) -> ModelShape:
    """The model of a row.

    Raises InputError if the model is not known, if a column disagrees with the model's configuration for no
    stated reason, and if a field is not stated.
    """
    family = family_of(row)
    if family.model is not None:
        return _shipped(row, family, load_model(family.model))
    assert family.facts is not None
    return _from_facts(row, family.facts)


# -- models with a configuration --------------------------------------------------------------------------


def _shipped(row: OpenRow, family: Family, shape: ModelShape) -> ModelShape:
    published = published_of(row)
    allowed = {d.column for d in family.differs if row.source.startswith(d.rows)}
    changed = {name: stated for name, stated, own in compared_columns(row, shape) if stated and stated != own}
    if "ffn" in changed and changed["ffn"] in (shape.dense_ffn, shape.moe and shape.moe.shared_ffn):
        del changed["ffn"]  # a table may state the width of the dense or the shared FFN
    for name, stated in changed.items():
        own = next(own for other, _, own in compared_columns(row, shape) if other == name)
        if name == "vocab" and (published.vocab or abs(stated / own - 1.0) < PADDING):
            continue  # the padded one, which a configuration may state
        if name not in allowed and not (name == "layers" and stated < own):
            raise InputError(
                f"{row.id}: {name} of {row.model} is {stated} in the table and {own} in its configuration "
                f"({shape.source.reference}), and no reason for the difference is known"
            )
    values = shape.model_dump() | {"name": row.model}
    if "vocab" in changed:
        values["vocab"] = changed["vocab"]
    if "layers" in changed:
        values |= _shortened(shape, changed["layers"])
    if "kv_heads" in changed:
        values["attention"] = values["attention"] | {"kv_heads": changed["kv_heads"]}
    _apply(row, shape, published, values)
    return _built(row, values)


PADDING = 0.01
"""A table's vocabulary that differs by less is the padded or rounded one."""
SAID_MTP = re.compile(
    r"\b(no|without)?[ -]*(?:\d )?(?:mtp|multi-token[ -]prediction)(?: (off|disabled|excluded|0))?\b", re.I
)


def says_mtp(row: OpenRow) -> bool:
    """Whether the notes of a row say that its multi-token-prediction modules were trained."""
    found = SAID_MTP.search(row.notes)
    return found is not None and not (found.group(1) or found.group(2))


def _shortened(shape: ModelShape, layers: int) -> dict[str, Any]:
    """Fields of a proxy of the first `layers` layers."""
    fields: dict[str, Any] = {"n_layers": layers, "numerics": None}
    if shape.attention_layers is not None:
        fields["attention_layers"] = expanded("attention_layers", shape.attention_layers, shape.n_layers)[
            :layers
        ]
    if shape.ffn_layers is not None:
        fields["ffn_layers"] = expanded("ffn_layers", shape.ffn_layers, shape.n_layers)[:layers]
    if shape.moe is not None and shape.moe.dense_layers:
        dense = tuple(layer for layer in shape.moe.dense_layers if layer < layers)
        fields["moe"] = shape.moe.model_dump() | {"dense_layers": dense}
    return fields


def left_out_of_shape(row: OpenRow) -> tuple[str, ...]:
    """Notes on what a row and its configuration leave open about a shipped model."""
    family = family_of(row)
    if family.model is None:
        return ()
    shape, published = load_model(family.model), published_of(row)
    notes = []
    if shape.mtp_layers and published.mtp is None and not says_mtp(row):
        notes.append(
            "multi-token-prediction modules are not mentioned: priced without, the default of trainers"
        )
    if (
        shape.moe
        and shape.moe.dense_layers
        and 0 < row.layers < shape.n_layers
        and published.dense_layers is None
    ):
        dense = sum(layer < row.layers for layer in shape.moe.dense_layers)
        notes.append(f"a proxy of {row.layers} layers: {dense} dense, as the first ones of its model")
    return tuple(notes)


def compared_columns(row: OpenRow, shape: ModelShape) -> list[tuple[Column, int, int]]:
    """(column, its number, the number of the model file); 0 for a number that one of them does not have."""
    attention = [a for a in shape.attention_by_name.values() if not isinstance(a, RecurrentMixer)]
    heads = attention[0] if attention else None
    kv_heads = getattr(heads, "kv_heads", getattr(heads, "heads", 0))  # latent attention: as many as heads
    moe = shape.moe
    return [
        ("layers", row.layers, shape.n_layers),
        ("hidden", row.hidden, shape.hidden),
        ("heads", row.heads, getattr(heads, "heads", 0)),
        ("kv_heads", row.kv_heads, kv_heads),
        ("vocab", row.vocab, shape.vocab),
        ("ffn", row.ffn, moe.expert_ffn if moe else shape.dense_ffn or 0),
        ("n_experts", row.n_experts, moe.experts if moe else 0),
        ("topk", row.topk, moe.top_k if moe else 0),
    ]


def _apply(row: OpenRow, shape: ModelShape, published: Published, values: dict[str, Any]) -> None:
    """Write into `values` what the run's configuration states about the model."""
    if published.vocab:
        values["vocab"] = published.vocab
    if published.tied_embeddings is not None:
        values["tied_embeddings"] = published.tied_embeddings
    mtp = published.mtp if published.mtp is not None or says_mtp(row) else 0
    if mtp is not None:
        values["mtp_layers"] = mtp
        if not mtp:
            values["mtp_layer"] = None
    if shape.moe is not None and shape.moe.dense_layers and published.dense_layers is not None:
        values["moe"] = values["moe"] | {"dense_layers": tuple(range(published.dense_layers))}


# -- models without one -----------------------------------------------------------------------------------


def _from_facts(row: OpenRow, facts: FamilyFacts) -> ModelShape:
    published = published_of(row)
    for name in ("layers", "hidden", "heads", "kv_heads", "ffn"):
        if not getattr(row, name):
            raise InputError(f"{row.id}: {name} of {row.model} is missing")
    vocab = published.vocab or row.vocab or (facts.vocab.value if facts.vocab else 0)
    if not vocab:
        raise InputError(f"{row.id}: the vocabulary of {row.model} is missing")
    width = facts.head_dim.value
    if width == "hidden / heads":
        if row.hidden % row.heads:
            raise InputError(f"{row.id}: hidden={row.hidden} is no multiple of heads={row.heads}")
        width = row.hidden // row.heads
    positions = facts.learned_positions.value
    bias = facts.attention_bias.value
    values: dict[str, Any] = {
        "name": row.model,
        "source": ShapeSource(kind="published", reference=f"{row.source}; {facts.plain.source}"),
        "n_layers": row.layers,
        "hidden": row.hidden,
        "vocab": vocab,
        "attention": GQA(
            heads=row.heads,
            kv_heads=row.kv_heads,
            head_dim=width,
            qkv_bias=bias,
            o_bias=bias,
            qk_norm=facts.qk_norm.value,
            rotary=facts.rotary.value,
        ),
        "tied_embeddings": facts.tied.value
        if published.tied_embeddings is None
        else published.tied_embeddings,
        "norm": facts.norm.value,
        "learned_positions": row.seq if positions == "sequence" else positions,
        "mtp_layers": published.mtp or 0,
    }
    if row.arch == "moe":
        return _built(row, values | {"moe": _experts(row, facts)})
    dense = {"dense_ffn": row.ffn, "ffn_gated": facts.ffn_gated.value, "ffn_bias": facts.ffn_bias.value}
    return _built(row, values | dense)


def _experts(row: OpenRow, facts: FamilyFacts) -> MoE:
    if not (row.n_experts and row.topk):
        raise InputError(
            f"{row.id}: the number of experts of {row.model} or of those a token takes is missing"
        )
    assert facts.dense_layers is not None and facts.scoring is not None
    if facts.dense_layers.value:
        raise InputError(f"{row.id}: the width of the dense layers of {row.model} is missing")
    return MoE(
        experts=row.n_experts,
        top_k=row.topk,
        expert_ffn=row.ffn,
        scoring=facts.scoring.value,
        router_bias=bool(facts.router_bias and facts.router_bias.value),
        expert_gated=facts.ffn_gated.value,
        expert_bias=facts.ffn_bias.value,
    )


def _built(row: OpenRow, values: Mapping[str, Any]) -> ModelShape:
    try:
        return ModelShape.model_validate(dict(values))
    except ValidationError as error:
        words = "; ".join(str(problem["msg"]) for problem in error.errors()[:4])
        raise InputError(f"{row.id}: no shape of {row.model}: {words}") from None
