"""Model shapes of published measurements, from a row's columns and the facts of its model family."""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import lru_cache
from importlib import resources
from typing import Any, Literal, Self

from pydantic import NonNegativeInt, PositiveInt, model_validator

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.frozen import Frozen
from moesim.hwmodels.validation import validate_model
from moesim.hwmodels.yaml_io import parse_mapping
from moesim.simulator.model.attention import GQA, MLA
from moesim.simulator.model.feed_forward.moe import MoE
from moesim.simulator.model.shape import ModelShape, ShapeSource
from moesim.simulator.scoring.scoreboard.configurations import published_of
from moesim.simulator.scoring.scoreboard.rows import OpenRow

FILE = "families.yaml"


class FamilyGqa(Frozen):
    """Grouped-query attention of a family; the numbers of heads come from the row."""

    head_dim: PositiveInt | Literal["hidden / heads"]
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    rotary: bool


class FamilyMla(Frozen):
    """Latent attention of a family; the number of heads comes from the row."""

    q_lora_rank: PositiveInt | None
    kv_lora_rank: PositiveInt
    qk_nope_dim: PositiveInt
    qk_rope_dim: PositiveInt
    v_dim: PositiveInt


class FamilyMoe(Frozen):
    """Experts of a family; their number, width and top-k come from the row."""

    dense_first: NonNegativeInt
    shared_experts: NonNegativeInt = 0
    shared_ffn: NonNegativeInt = 0
    shared_gate: bool = False
    groups: PositiveInt = 1
    groups_per_token: PositiveInt = 1
    group_score: Literal["best", "top2-sum"] | None = None
    scoring: Literal["softmax", "sigmoid"]
    score_bias: bool = False


class Family(Frozen):
    """One entry of `families.yaml`."""

    models: tuple[str, ...]
    source: str
    arch: Literal["dense", "moe"]
    gqa: FamilyGqa | None = None
    mla: FamilyMla | None = None
    moe: FamilyMoe | None = None
    gated: bool | None = None
    """Whether a dense FFN has a gate, that is three matrices; required for a dense model."""
    dense_ffn: PositiveInt | None = None
    tied: bool
    vocab: PositiveInt | None = None
    not_modelled: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if (self.gqa is None) == (self.mla is None):
            raise ValueError("give gqa or mla, one of them")
        if (self.arch == "moe") != (self.moe is not None):
            raise ValueError("arch moe and the key moe go together")
        if self.arch == "dense" and self.gated is None:
            raise ValueError("gated is missing: say whether the FFN has a gate")
        return self


class Families(Frozen):
    """The file `families.yaml`."""

    families: tuple[Family, ...]


@lru_cache(maxsize=1)
def families() -> tuple[Family, ...]:
    """Every known family. Raises InputError for a malformed entry."""
    text = resources.files("moesim.simulator").joinpath("data", "published", FILE).read_text("utf-8")
    return validate_model(Families, parse_mapping(text, FILE), FILE).families


def family_of(row: OpenRow) -> Family:
    """The family of a row's model. Raises InputError if it is not known."""
    for family in families():
        if family.arch == row.arch and any(fnmatchcase(row.model, name) for name in family.models):
            return family
    raise InputError(f"{row.id}: the shape of {row.model} is not known")


def shape_of(row: OpenRow) -> ModelShape:
    """The model of a row. Raises InputError if columns and family do not determine a shape."""
    if not (row.layers and row.hidden and row.heads and row.ffn):
        raise InputError(f"{row.id}: layers, hidden, heads or FFN of {row.model} are missing")
    family, published = family_of(row), published_of(row)
    vocab = published.vocab or row.vocab or family.vocab
    if not vocab:
        raise InputError(f"{row.id}: the vocabulary of {row.model} is missing")
    common: dict[str, Any] = {
        "name": row.model,
        "source": ShapeSource(kind="published", reference=f"{row.source}; {family.source}", date="undated"),
        "n_layers": row.layers,
        "hidden": row.hidden,
        "vocab": vocab,
        "attention": _attention(row, family),
        "mtp_layers": published.mtp or 0,
        "tied_embeddings": family.tied if published.tied_embeddings is None else published.tied_embeddings,
        "not_modelled": family.not_modelled,
    }
    if family.moe is None:
        return ModelShape(**common, dense_ffn=row.ffn, ffn_gated=bool(family.gated))
    if not (row.n_experts and row.topk):
        raise InputError(
            f"{row.id}: the number of experts of {row.model} or of those a token takes is missing"
        )
    first = family.moe.dense_first if published.dense_layers is None else published.dense_layers
    moe = MoE(
        experts=row.n_experts,
        top_k=row.topk,
        expert_ffn=row.ffn,
        dense_layers=tuple(range(first)),
        **family.moe.model_dump(exclude={"dense_first"}),
    )
    return ModelShape(**common, moe=moe, dense_ffn=family.dense_ffn if first else None)


def _attention(row: OpenRow, family: Family) -> GQA | MLA:
    if family.mla is not None:
        return MLA(heads=row.heads, **family.mla.model_dump())
    assert family.gqa is not None
    fields = family.gqa.model_dump(exclude={"head_dim"})
    if not row.kv_heads:
        raise InputError(f"{row.id}: the key and value heads of {row.model} are missing")
    if isinstance(family.gqa.head_dim, int):
        width = family.gqa.head_dim
    elif row.hidden % row.heads:
        raise InputError(f"{row.id}: hidden={row.hidden} is no multiple of heads={row.heads}")
    else:
        width = row.hidden // row.heads
    return GQA(heads=row.heads, kv_heads=row.kv_heads, head_dim=width, **fields)
