"""Replays a rank's training steps through PyTorch's allocator: its peaks of active and reserved bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from moesim.simulator.layout.allocator import AllocatorBytes, peak_bytes
from moesim.simulator.layout.eager_blocks import eager_block, eager_loss
from moesim.simulator.layout.eager_tape import EagerOp, Saving
from moesim.simulator.layout.fsdp2_step import EagerStage, StepPlan, events_of_rank
from moesim.simulator.layout.fsdp2_units import NARROW, WIDE
from moesim.simulator.layout.memory import MemoryInputs
from moesim.simulator.layout.stages import Block, StageAssignment
from moesim.simulator.model.precision import Precision
from moesim.simulator.schedules.action import Action, actions_of
from moesim.simulator.schedules.schedule import Schedule

MOST_OPERATORS = 400_000
"""Operators of two steps that are replayed at most: about two seconds."""
LEFT_BY_FORWARD: dict[str, Saving] = {"none": "all", "op": "some", "full": "none"}
"""What the forward of a layer leaves, by recompute policy."""
FSDP2_PRECISION = {
    "linear": "bf16",
    "head": "bf16",
    "loss": "fp32",
    "parameters": "fp32",
    "parameter_gather": "bf16",
    "gradient_reduce": "fp32",
    "activation_cache": "bf16",
}
"""FSDP2's mixed precision that is described: FP32 parameters and reductions, BF16 compute and gathers."""


def replayed_peaks(
    inputs: MemoryInputs, assignment: StageAssignment, schedule: Schedule, rank: int
) -> AllocatorBytes | str:
    """Peaks of the bytes active and reserved on a GPU of a pipeline rank (docs/model.md, eqs. M40 to M43).

    A plan that the replay does not describe gives the reason instead.
    """
    reason = _not_described(inputs, schedule)
    if reason is not None:
        return reason
    numbers = schedule.stages_on_rank(rank)
    stages = []
    for number in numbers:
        stage = _eager_stage(inputs, assignment.stages[number])
        if stage is None:
            return "its blocks have operators that the replay does not describe"
        stages.append(stage)
    actions = [action for step in schedule.ranks[rank] for action in actions_of(step)]
    places = {number: place for place, number in enumerate(numbers)}
    plan = inputs.layout.plan
    passes = [Action(places[a.stage], a.kind, a.microbatch) for a in _first_microbatches(actions)]
    if 2 * sum(len(ops) for a in passes for ops in stages[a.stage].blocks) > MOST_OPERATORS:
        return f"its steps have more than {MOST_OPERATORS} operators on a rank"
    events = events_of_rank(
        stages,
        passes,
        StepPlan(
            microbatches=schedule.microbatches,
            pipeline=plan.pp > 1,
            reshard=plan.zero_stage == 3,
            states=round(_state_bytes(inputs.precision) / WIDE),
        ),
    )
    return peak_bytes(events, expandable=inputs.software.allocator == "expandable")


def _not_described(inputs: MemoryInputs, schedule: Schedule) -> str | None:
    """Why a plan's steps are not replayed; None if they are."""
    plan, precision = inputs.layout.plan, inputs.precision
    if plan.tp > 1 or plan.cp > 1 or plan.expert_tp > 1:
        return "tensor and context parallelism are not described"
    if plan.zero_stage < 2 or plan.shard_group is not None:
        return "FSDP2 is described for zero_stage 2 and 3 without groups of shards"
    if any(getattr(precision, key) != value for key, value in FSDP2_PRECISION.items()):
        return "only FSDP2's mixed precision of FP32 parameters and BF16 compute is described"
    if not isinstance(inputs.recompute, str) or inputs.recompute not in LEFT_BY_FORWARD:
        return "the recompute policies none, op and full are described"
    if inputs.shape.tied_embeddings or inputs.redundant_experts or len(schedule.routes) > 1:
        return "tied tables, replicas of experts and bidirectional pipelines are not described"
    return None


def _state_bytes(precision: Precision) -> float:
    """Bytes of the optimizer states of a parameter: both moments, and a master copy in another format."""
    sizes = {"fp32": 4.0, "bf16": 2.0, "fp8": 1.0}
    master = 0.0 if precision.master_weights == precision.parameters else sizes[precision.master_weights]
    return master + 2 * sizes[precision.moments]


def _eager_stage(inputs: MemoryInputs, blocks: tuple[Block, ...]) -> EagerStage | None:
    """Operators of a stage's blocks; None where one is not described."""
    plan, shape = inputs.layout.plan, inputs.shape
    tokens = float(plan.microbatch * inputs.sequence)
    described: dict[str, tuple[EagerOp, ...] | None] = {}
    lists: list[tuple[EagerOp, ...]] = []
    left: list[Saving] = []
    for block in blocks:
        if block.kind not in described:
            described[block.kind] = eager_block(
                shape, shape.block(block.kind), tokens, plan.ep, inputs.software.op_keeps_transfers
            )
        ops = described[block.kind]
        if ops is None:
            return None
        lists.append(ops)
        left.append(LEFT_BY_FORWARD[str(inputs.recompute)] if block.is_layer else "all")
        if block.is_head:
            lists.append(eager_loss(shape.vocab, tokens, compiled=inputs.software.loss == "compiled"))
            left.append("all")
    of_experts, of_others = inputs.layout.shards
    return EagerStage(
        tuple(lists),
        tuple(left),
        of_others,
        of_experts,
        NARROW * tokens * shape.hidden,
        is_first=any(block.is_embedding for block in blocks),
        is_last=any(block.is_head for block in blocks),
    )


def _first_microbatches(actions: list[Action]) -> Iterator[Action]:
    """Actions of the first micro-batches, after which the bytes in flight repeat."""
    in_flight: Counter[int] = Counter()
    most = 0
    ends = "W" if any(action.kind == "W" for action in actions) else "B"
    for action in actions:
        in_flight[action.stage] += (action.kind == "F") - (action.kind == ends)
        most = max(most, in_flight[action.stage])
    return (action for action in actions if action.microbatch < most + 2)
