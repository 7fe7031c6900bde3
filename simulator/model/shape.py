"""The shape of a transformer: every integer that fixes its parameters, products and traffic."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, model_validator

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.provenance import UNDATED, DateText, Kind

GroupScore = Literal["best", "top2-sum"]
"""How a group of experts is ranked: by its best score, or by the sum of its two best."""

MAX_LAYERS = 1000
"""Far above any real model: lists of layers are built, so a mistyped number must not exhaust memory."""


class _Shape(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ShapeSource(_Shape):
    """Where the numbers of a shape come from."""

    kind: Kind
    reference: str
    date: Annotated[DateText, Field(strict=False)] = UNDATED


class Indexer(_Shape):
    """Sparse-attention indexer: its parameters are counted, its work is not priced."""

    heads: PositiveInt
    head_dim: PositiveInt
    top_k: PositiveInt


class MLA(_Shape):
    """Multi-head latent attention (DeepSeek-V2 report, section 2.1)."""

    kind: Literal["mla"] = "mla"
    heads: PositiveInt
    q_lora_rank: PositiveInt | None = None
    """Width of the compressed query; None = one full query projection."""
    kv_lora_rank: PositiveInt
    qk_nope_dim: PositiveInt
    qk_rope_dim: PositiveInt
    v_dim: PositiveInt
    indexer: Indexer | None = None

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values after up-projection."""
        return self.heads

    @property
    def qk_head_dim(self) -> int:
        """Elements of one query or key head."""
        return self.qk_nope_dim + self.qk_rope_dim

    @property
    def v_head_dim(self) -> int:
        """Elements of one value head."""
        return self.v_dim


class GQA(_Shape):
    """Grouped-query attention; `kv_heads` equal to `heads` is plain multi-head attention."""

    kind: Literal["gqa"] = "gqa"
    heads: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    rotary: bool = True
    """Rotary position embedding of queries and keys; false for learned positions and ALiBi."""

    @property
    def qk_head_dim(self) -> int:
        """Elements of one query or key head."""
        return self.head_dim

    @property
    def v_head_dim(self) -> int:
        """Elements of one value head."""
        return self.head_dim

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads={self.kv_heads} does not divide heads={self.heads}")
        return self


class MoE(_Shape):
    """The mixture-of-experts part: experts, gate and which layers stay dense."""

    experts: PositiveInt
    top_k: PositiveInt
    expert_ffn: PositiveInt
    shared_experts: NonNegativeInt = 0
    shared_ffn: NonNegativeInt = 0
    """Width of one shared expert."""
    shared_gate: bool = False
    """One extra score per token that scales the shared experts (Qwen2-MoE)."""
    groups: PositiveInt = 1
    groups_per_token: PositiveInt = 1
    group_score: GroupScore | None = None
    """None where the gate is not limited to groups."""
    scoring: Literal["softmax", "sigmoid"]
    score_bias: bool = False
    """One balance bias an expert, added to the score for the choice only (DeepSeek-V3 2.1.2)."""
    dense_layers: Annotated[tuple[NonNegativeInt, ...], Field(strict=False)] = ()
    """Indices of the layers that have a dense FFN instead of experts."""

    @property
    def group_limited(self) -> bool:
        """True where a token may only reach some of the groups."""
        return self.groups_per_token < self.groups

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.experts % self.groups:
            raise ValueError(f"groups={self.groups} does not divide experts={self.experts}")
        if self.groups_per_token > self.groups:
            raise ValueError(f"groups_per_token={self.groups_per_token} is above groups={self.groups}")
        reachable = self.experts // self.groups * self.groups_per_token
        if self.top_k > reachable:
            raise ValueError(f"top_k={self.top_k} is above the {reachable} experts that a token can reach")
        if self.group_limited and self.group_score is None:
            raise ValueError("group_score is missing: say how groups are ranked, best or top2-sum")
        if self.group_score == "top2-sum" and self.experts // self.groups < 2:
            raise ValueError("group_score=top2-sum needs at least two experts a group")
        if bool(self.shared_experts) != bool(self.shared_ffn):
            raise ValueError("shared_experts and shared_ffn go together: give both or neither")
        if list(self.dense_layers) != sorted(set(self.dense_layers)):
            raise ValueError("dense_layers must be increasing layer indices without repeats")
        return self


class ModelShape(_Shape):
    """A decoder-only transformer; the keys of a model file are these field names.

    Widths are in elements. Layer indices count from 0. Multi-token-prediction modules come after the
    last layer and are MoE where `moe` is given (DeepSeek-V3 report, section 2.2).
    """

    name: str
    source: ShapeSource
    n_layers: Annotated[PositiveInt, Field(le=MAX_LAYERS)]
    hidden: PositiveInt
    vocab: PositiveInt
    attention: Annotated[MLA | GQA, Field(discriminator="kind")]
    dense_ffn: PositiveInt | None = None
    """Width of the dense FFN; None where every layer is MoE."""
    ffn_gated: bool = True
    """Dense FFN of gate, up and down projection (SwiGLU); false: up and down only (GELU, squared ReLU)."""
    moe: MoE | None = None
    mtp_layers: NonNegativeInt = 0
    tied_embeddings: bool
    norm: Literal["rmsnorm"] = "rmsnorm"
    not_modelled: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """What the original model has and the simulator leaves out, in words for the result."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        dense = self.moe.dense_layers if self.moe else tuple(range(self.n_layers))
        if dense and dense[-1] >= self.n_layers:
            raise ValueError(f"moe.dense_layers names layer {dense[-1]}; the last is {self.n_layers - 1}")
        if dense and self.dense_ffn is None:
            raise ValueError(f"dense_ffn is missing: {len(dense)} layers have a dense FFN")
        return self

    @property
    def ffn_branches(self) -> int:
        """Projections into the width of the dense FFN: gate and up, or up alone."""
        return 2 if self.ffn_gated else 1

    def is_moe_layer(self, index: int) -> bool:
        """Whether layer `index` has experts; indices from `n_layers` on are MTP modules."""
        if not 0 <= index < self.n_layers + self.mtp_layers:
            last = self.n_layers + self.mtp_layers - 1
            raise InputError(f"model {self.name}: no layer {index}; layers run from 0 to {last}.")
        return self.moe is not None and index not in self.moe.dense_layers

    @property
    def n_dense_layers(self) -> int:
        """Layers with a dense FFN, MTP modules left out."""
        return len(self.moe.dense_layers) if self.moe else self.n_layers

    @property
    def n_moe_layers(self) -> int:
        """Layers with experts, MTP modules left out."""
        return self.n_layers - self.n_dense_layers
