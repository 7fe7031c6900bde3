"""Counts the parameters of given blocks that one GPU holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moesim.simulator.layout.parallel import Layout
from moesim.simulator.layout.stages import Block
from moesim.simulator.model.block import EMBEDDING, HEAD, MTP
from moesim.simulator.model.counts import block_parameters
from moesim.simulator.model.operator import BlockKind
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.scenario.parallel import ParallelPlan


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
    kinds = {block.kind for block in blocks}
    of_kind = {kind: _of_block(shape, plan, kind, redundant_experts) for kind in kinds}
    for block in blocks:
        experts, other = of_kind[block.kind]
        total[0] += experts
        total[1] += other
    embedding = EMBEDDING in kinds or MTP in kinds or (shape.tied_embeddings and HEAD in kinds)
    head = HEAD in kinds and not shape.tied_embeddings
    table = shape.vocab * shape.hidden / plan.tp
    positions = shape.learned_positions * shape.hidden * (EMBEDDING in kinds)
    return LocalParameters(total[0], total[1] + table * (embedding + head) + positions)


def _of_block(shape: ModelShape, plan: ParallelPlan, kind: BlockKind, redundant: int) -> tuple[float, float]:
    """Parameters of a block on one GPU, as (routed experts, others); those of a table are left out."""
    held = 1.0 if shape.moe is None else (shape.moe.experts + redundant) / shape.moe.experts
    p, latent = block_parameters(shape, kind), _latent(shape, kind)
    whole = p.norms + p.router + latent
    cut = p.attention + p.dense_ffn + p.shared_experts - latent + p.mtp_projection
    return p.routed_experts * held / (plan.ep * plan.expert_tp), cut / plan.tp + whole


def _latent(shape: ModelShape, kind: BlockKind) -> int:
    """Parameters of the projections of latent rows, of which every tensor-parallel rank has a copy."""
    routed = shape.moe is not None and shape.block(kind).routed
    return shape.moe.latent_parameters(shape.hidden) if routed and shape.moe is not None else 0
