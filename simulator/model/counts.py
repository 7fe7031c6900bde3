"""Counts the parameters and model FLOPs of a shape by summing over its layers."""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum

from moesim.simulator.model.block import EMBEDDING, HEAD, MTP, is_layer
from moesim.simulator.model.hyper_connections import head_parameters, site_parameters
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
