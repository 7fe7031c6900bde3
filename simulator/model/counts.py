"""Parameters and model FLOPs of a shape, by component."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import fsum

from moesim.simulator.model.operator import BlockKind
from moesim.simulator.model.shape import GQA, MLA, ModelShape


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameter counts by component; `+` adds and `*` repeats them."""

    embedding: int = 0
    head: int = 0
    attention: int = 0
    dense_ffn: int = 0
    routed_experts: int = 0
    shared_experts: int = 0
    router: int = 0
    norms: int = 0
    mtp_projection: int = 0

    def __add__(self, other: Parameters) -> Parameters:
        """Sum component by component."""
        return Parameters(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __mul__(self, times: int) -> Parameters:
        """The same components `times` over."""
        return Parameters(*(getattr(self, f.name) * times for f in fields(self)))

    @property
    def total(self) -> int:
        """All components together."""
        return sum(getattr(self, f.name) for f in fields(self))

    @property
    def products(self) -> int:
        """What the published FLOP counts multiply with: no embedding, no router, no norms."""
        return self.total - self.embedding - self.router - self.norms

    def as_dict(self) -> dict[str, int]:
        """Counts by component name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


def attention_parameters(shape: ModelShape) -> int:
    """Projections of one attention layer (DeepSeek-V2 report 2.1 for MLA), biases included."""
    a, h = shape.attention, shape.hidden
    if isinstance(a, GQA):
        q, kv = a.heads * a.head_dim, 2 * a.kv_heads * a.head_dim
        biases = (q + kv) * a.qkv_bias + h * a.o_bias
        return h * (q + kv) + q * h + biases
    q_width = a.heads * a.qk_head_dim
    query = h * q_width if a.q_lora_rank is None else (h + q_width) * a.q_lora_rank
    kv_down = h * (a.kv_lora_rank + a.qk_rope_dim)
    kv_up = a.kv_lora_rank * a.heads * (a.qk_nope_dim + a.v_dim)
    return query + kv_down + kv_up + a.heads * a.v_dim * h + indexer_parameters(shape)


def indexer_parameters(shape: ModelShape) -> int:
    """Query, key and head-weight projections of one sparse-attention indexer and its key norm."""
    a = shape.attention
    if not isinstance(a, MLA) or a.indexer is None:
        return 0
    query_in = shape.hidden if a.q_lora_rank is None else a.q_lora_rank
    i = a.indexer
    return query_in * i.heads * i.head_dim + shape.hidden * (i.head_dim + i.heads) + 2 * i.head_dim


def expert_parameters(shape: ModelShape) -> int:
    """Gate, up and down projection of one routed expert (0 for a dense model)."""
    return 3 * shape.hidden * shape.moe.expert_ffn if shape.moe else 0


def _layer_norms(shape: ModelShape) -> int:
    a = shape.attention
    if isinstance(a, GQA):
        return 2 * shape.hidden + 2 * a.head_dim * a.qk_norm
    return 2 * shape.hidden + (a.q_lora_rank or 0) + a.kv_lora_rank


def layer_parameters(shape: ModelShape, moe: bool, activated: bool = False) -> Parameters:
    """One transformer layer; `activated` counts only the experts that one token uses."""
    attention, norms = attention_parameters(shape), _layer_norms(shape)
    if not moe:
        assert shape.dense_ffn is not None
        return Parameters(
            attention=attention,
            norms=norms,
            dense_ffn=(shape.ffn_branches + 1) * shape.hidden * shape.dense_ffn,
        )
    m = shape.moe
    assert m is not None
    return Parameters(
        attention=attention,
        norms=norms,
        routed_experts=(m.top_k if activated else m.experts) * expert_parameters(shape),
        shared_experts=m.shared_experts * 3 * shape.hidden * m.shared_ffn + shape.hidden * m.shared_gate,
        router=m.experts * (shape.hidden + m.score_bias),
    )


def block_parameters(shape: ModelShape, kind: BlockKind, activated: bool = False) -> Parameters:
    """One block of a pipeline stage; an `mtp` block is without embedding and head, which it shares."""
    h = shape.hidden
    if kind == "embedding":
        return Parameters(embedding=shape.vocab * h)
    if kind == "head":
        return Parameters(head=shape.vocab * h, norms=h)
    if kind == "mtp":
        layer = layer_parameters(shape, shape.moe is not None, activated)
        return layer + Parameters(mtp_projection=2 * h * h, norms=3 * h)
    return layer_parameters(shape, kind == "moe", activated)


def parameters_by_component(shape: ModelShape, activated: bool = False) -> Parameters:
    """The main model without MTP modules; a tied head counts once, as embedding (docs/model.md, eq. F1)."""
    out = block_parameters(shape, "embedding") + block_parameters(shape, "head")
    if shape.tied_embeddings:
        out = out + Parameters(head=-out.head)
    if shape.n_dense_layers:
        out = out + layer_parameters(shape, False, activated) * shape.n_dense_layers
    if shape.n_moe_layers:
        out = out + layer_parameters(shape, True, activated) * shape.n_moe_layers
    return out


def parameters_total(shape: ModelShape) -> int:
    """All parameters of the main model, MTP modules left out as in published totals."""
    return parameters_by_component(shape).total


def parameters_mtp(shape: ModelShape) -> int:
    """What the MTP modules add; embedding and head are shared with the main model."""
    return block_parameters(shape, "mtp").total * shape.mtp_layers if shape.mtp_layers else 0


def parameters_activated(shape: ModelShape, embedding: bool) -> int:
    """Parameters that one token uses; with `embedding` the whole table counts, as some reports do.

    A tied table is the head of the product, so it counts in either case.
    """
    parts = parameters_by_component(shape, activated=True)
    return parts.total if embedding or shape.tied_embeddings else parts.total - parts.embedding


def flop_per_token(shape: ModelShape, sequence: int, causal: bool, kept_rows: float = 1.0) -> float:
    """Model FLOPs of one training token, forward and backward, in the convention of published MFUs.

    Eq. F2: 6 x the matrix parameters that a token uses (no embedding, router, norms, MTP or indexer, no
    recompute) plus 3 x the attention products, halved when only the causal half counts. Reproduces
    249.8 and 280.5 GF for DeepSeek-V3 at 4,096 tokens (arXiv 2505.09343v2, tables 2 and 4). `kept_rows`:
    share of the routed rows that capacity did not drop; the others compute nothing.
    """
    parts = parameters_by_component(shape, activated=True)
    weights = parts.products - shape.n_layers * indexer_parameters(shape)
    if shape.tied_embeddings:
        weights += shape.vocab * shape.hidden
    computed = weights - (1.0 - kept_rows) * parts.routed_experts
    return 6.0 * computed + attention_flop_per_token(shape, sequence, causal)


def blocks_flop_per_token(
    shape: ModelShape, kinds: Sequence[BlockKind], sequence: int, causal: bool, kept_rows: float = 1.0
) -> float:
    """`flop_per_token` of some blocks alone: their layers, and one head where they hold any.

    Embeddings and MTP modules, which have a head of their own, are not in it.
    """
    layers = [block_parameters(shape, kind, activated=True) for kind in kinds if kind in ("dense", "moe")]
    weights = fsum(
        p.products - indexer_parameters(shape) - (1.0 - kept_rows) * p.routed_experts for p in layers
    )
    head = block_parameters(shape, "head").products if "head" in kinds else 0
    attention = attention_flop_per_token(shape, sequence, causal) * len(layers) / shape.n_layers
    return 6.0 * (weights + head) + attention


def attention_flop_per_token(shape: ModelShape, sequence: int, causal: bool) -> float:
    """The part of `flop_per_token` that attention scores and their product with V take (eq. F3)."""
    a = shape.attention
    products = 2.0 * a.heads * sequence * (a.qk_head_dim + a.v_head_dim)
    return 3.0 * shape.n_layers * products * (0.5 if causal else 1.0)
