"""Assigns blocks to pipeline stages, as the scenario states or balanced by compute."""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum

from moesim.hwmodels.errors import InputError
from moesim.simulator.cost.pricing import Pricer
from moesim.simulator.layout.stages import (
    Block,
    StageAssignment,
    balanced,
    blocks_of,
    from_layers_per_stage,
)
from moesim.simulator.model.block import PLAIN_KINDS
from moesim.simulator.model.operator import BlockKind
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.scenario import Scenario
from moesim.simulator.schedules import Schedule


def assign_stages(scenario: Scenario, pricer: Pricer, schedule: Schedule) -> StageAssignment:
    """Stages as the scenario states, or balanced by the compute of one micro-batch on all SMs (eq. S1).

    Balancing makes the heaviest stage as light as possible, with the embedding on the first stage, MTP module
    and head passes on the last. This rule was fixed before any comparison
    (docs/decisions/0003-stage-balance.md).
    """
    if scenario.stages.blocks is not None:
        return explicit_blocks(scenario.stages.blocks, schedule.n_stages, pricer.shape)
    blocks = blocks_of(pricer.shape)
    if scenario.stages.layers is not None:
        if len(scenario.stages.layers) != schedule.n_stages:
            raise InputError(
                f"stages.layers has {len(scenario.stages.layers)} entries, but {schedule.name} with "
                f"parallel.pp={scenario.parallel.pp} has {schedule.n_stages} stages"
            )
        return from_layers_per_stage(blocks, scenario.stages.layers, scenario.stages.mtp)
    weight = {kind: block_seconds(pricer, kind) for kind in sorted({block.kind for block in blocks})}
    # Both ends of a bidirectional pipeline are on one rank, where an end without layers hides no transfers.
    ends_alone = len(schedule.routes) == 1
    weights = [weight[block.kind] for block in blocks]
    return balanced(blocks, weights, schedule.n_stages, ends_alone=ends_alone)


def block_seconds(pricer: Pricer, kind: BlockKind) -> float:
    """Compute seconds of one micro-batch of a block, alone on all SMs (eq. S1)."""
    costs = [pricer.phase(kind, phase, "alone") for phase in pricer.operators(kind)]
    return fsum(cost.fixed_s + cost.row_s for cost in costs)


def explicit_blocks(texts: Sequence[str], n_stages: int, shape: ModelShape) -> StageAssignment:
    """Stages from texts such as "embedding dense*3 moe" (kinds with a count).

    Raises InputError for another number of stages, an empty one, and a kind that the model does not have.
    """
    kinds = PLAIN_KINDS if shape.attentions is None else shape.block_kinds
    if len(texts) != n_stages:
        raise InputError(f"stages.blocks has {len(texts)} entries, but the schedule has {n_stages} stages")
    stages = []
    for number, text in enumerate(texts):
        stage: list[Block] = []
        for word in text.split():
            name, _, times = word.partition("*")
            if name not in kinds or not (times.isdigit() or not times) or len(times) > 4:
                raise InputError(
                    f"stages.blocks.{number}={text!r}: {word!r} is not a block; write {', '.join(kinds)}, "
                    "with a count such as moe*4"
                )
            stage.extend([Block(name)] * int(times or 1))
        if not stage:
            raise InputError(f"stages.blocks.{number} is empty: every stage needs a block")
        stages.append(tuple(stage))
    _check_kinds(stages, shape)
    return StageAssignment(tuple(stages))


def _check_kinds(stages: Sequence[Sequence[Block]], shape: ModelShape) -> None:
    """Raise InputError for explicit blocks of a kind that the model does not have."""
    for number, stage in enumerate(stages):
        for kind in dict.fromkeys(block.kind for block in stage):
            try:
                shape.block(kind)
            except InputError:
                has = ", ".join(k for k in shape.block_kinds if shape.block(k).layer is not None)
                raise InputError(
                    f"stages.blocks.{number} names a {kind} block, but model {shape.name} has none; it has "
                    f"{has}, embedding and head"
                ) from None
