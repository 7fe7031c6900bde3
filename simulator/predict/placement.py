"""Which blocks each pipeline stage holds: as the scenario says, or balanced by compute."""

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
from moesim.simulator.model.operator import BlockKind
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.scenario import Scenario
from moesim.simulator.schedules import Schedule


def assign_stages(scenario: Scenario, pricer: Pricer, schedule: Schedule) -> StageAssignment:
    """Stages as the scenario says; otherwise balanced by the compute of one micro-batch on all SMs (eq. S1).

    The principle is fixed beforehand: the heaviest stage is as light as it can be, embedding on the
    first stage, MTP module and head passes on the last (docs/decisions/0003-stage-balance.md).
    """
    if scenario.stages.blocks is not None:
        stages = explicit_blocks(scenario.stages.blocks, schedule.n_stages)
        _check_blocks(stages, pricer.shape)
        return stages
    blocks = blocks_of(pricer.shape)
    if scenario.stages.layers is not None:
        if len(scenario.stages.layers) != schedule.n_stages:
            raise InputError(
                f"stages.layers has {len(scenario.stages.layers)} entries, but {schedule.name} with "
                f"parallel.pp={scenario.parallel.pp} has {schedule.n_stages} stages"
            )
        return from_layers_per_stage(blocks, scenario.stages.layers)
    weight = {kind: block_seconds(pricer, kind) for kind in sorted({block.kind for block in blocks})}
    return balanced(blocks, [weight[block.kind] for block in blocks], schedule.n_stages)


def _check_blocks(stages: StageAssignment, shape: ModelShape) -> None:
    """Explicit blocks must be of kinds that the model has."""
    missing = {"moe": shape.moe is None, "dense": shape.dense_ffn is None, "mtp": shape.mtp_layers == 0}
    for number, stage in enumerate(stages.stages):
        for block in stage:
            if missing.get(block.kind, False):
                has = ", ".join(kind for kind in ("dense", "moe", "mtp") if not missing[kind])
                raise InputError(
                    f"stages.blocks.{number} names a {block.kind} block, but model {shape.name} has none; it "
                    f"has {has}, embedding and head"
                )


def block_seconds(pricer: Pricer, kind: BlockKind) -> float:
    """Compute seconds of one micro-batch of a block, alone on all SMs (eq. S1)."""
    costs = [pricer.phase(kind, phase, "alone") for phase in pricer.operators(kind)]
    return fsum(cost.fixed_s + cost.row_s for cost in costs)


def explicit_blocks(texts: Sequence[str], n_stages: int) -> StageAssignment:
    """Stages from texts such as "embedding dense*3 moe" (kinds with a count)."""
    kinds: tuple[BlockKind, ...] = ("embedding", "dense", "moe", "mtp", "head")
    if len(texts) != n_stages:
        raise InputError(f"stages.blocks has {len(texts)} entries, but the schedule has {n_stages} stages")
    stages = []
    for number, text in enumerate(texts):
        stage: list[Block] = []
        for word in text.split():
            name, _, times = word.partition("*")
            kind = next((k for k in kinds if k == name), None)
            if kind is None or not (times.isdigit() or not times) or len(times) > 4:
                raise InputError(
                    f"stages.blocks.{number}={text!r}: {word!r} is not a block; write {', '.join(kinds)}, "
                    "with a count such as moe*4"
                )
            stage.extend([Block(kind)] * int(times or 1))
        if not stage:
            raise InputError(f"stages.blocks.{number} is empty: every stage needs a block")
        stages.append(tuple(stage))
    return StageAssignment(tuple(stages))
