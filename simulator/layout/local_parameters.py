"""Counts the parameters of given blocks that one GPU holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moesim.simulator.layout.parallel import Layout
from moesim.simulator.layout.stages import Block
from moesim.simulator.model.block import EMBEDDING, HEAD, MTP
from moesim.simulator.model.counts import block_parameters
from moesim.simulator.model.shape import ModelShape


@dataclass(frozen=True, slots=True)
class LocalParameters:
    """Parameters on one GPU, split into those of routed experts and all others."""

    experts: float
    other: float


def local_parameters(
    shape: ModelShape, layout: Layout, blocks: Sequence[Block], redundant_experts: int = 0
) -> LocalParameters:
    """Count the parameters of these blocks on one GPU; a table that several blocks share counts once.

    An MTP module and a tied head need the embedding table, so a rank that holds one of them without the
    embedding block holds a copy of the table.
    """
    plan, total = layout.plan, [0.0, 0.0]
    held = 1.0 if shape.moe is None else (shape.moe.experts + redundant_experts) / shape.moe.experts
    for block in blocks:
        p = block_parameters(shape, block.kind)
        total[0] += p.routed_experts * held / (plan.ep * plan.expert_tp)
        whole = p.norms + p.router + _latent(shape, block)
        cut = p.attention + p.dense_ffn + p.shared_experts - _latent(shape, block) + p.mtp_projection
        total[1] += cut / plan.tp + whole
    kinds = {block.kind for block in blocks}
    embedding = EMBEDDING in kinds or MTP in kinds or (shape.tied_embeddings and HEAD in kinds)
    head = HEAD in kinds and not shape.tied_embeddings
    table = shape.vocab * shape.hidden / plan.tp
    positions = shape.learned_positions * shape.hidden * (EMBEDDING in kinds)
    return LocalParameters(total[0], total[1] + table * (embedding + head) + positions)


def _latent(shape: ModelShape, block: Block) -> int:
    """Parameters of the projections of latent rows, of which every tensor-parallel rank has a copy."""
    routed = shape.moe is not None and shape.block(block.kind).routed
    return shape.moe.latent_parameters(shape.hidden) if routed and shape.moe is not None else 0
