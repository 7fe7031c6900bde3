"""Model families of published rows: a shipped model file, or a list of facts with a source for each."""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import lru_cache
from importlib import resources
from typing import Generic, Literal, Self, TypeVar

from pydantic import NonNegativeInt, PositiveInt, model_validator

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.frozen import Frozen
from moesim.hwmodels.validation import validate_model
from moesim.hwmodels.yaml_io import parse_mapping
from moesim.simulator.scoring.scoreboard.rows import OpenRow

FILE = "families.yaml"
Column = Literal["layers", "hidden", "ffn", "heads", "kv_heads", "vocab", "n_experts", "topk"]
"""Columns of a row that describe the model."""
T = TypeVar("T")


class Fact(Frozen, Generic[T]):
    """A value and the text or file that states it."""

    value: T
    source: str


class ExplainedDifference(Frozen):
    """A column that differs from the model's configuration in the rows of a source, and why."""

    column: Literal["layers", "kv_heads", "vocab"]
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
    text = resources.files("moesim.simulator").joinpath("data", "published", FILE).read_text("utf-8")
    return validate_model(Families, parse_mapping(text, FILE), FILE).families


def family_of(row: OpenRow) -> Family:
    """The family of a row's model. Raises InputError if it is not known."""
    for family in families():
        if family.arch == row.arch and any(fnmatchcase(row.model, name) for name in family.models):
            return family
    raise InputError(f"{row.id}: the shape of {row.model} is not known")
