"""A plan as Megatron-LM arguments: exactly the plan that was priced, with what they cannot express."""

from __future__ import annotations

from moesim.simulator.model.shape import ModelShape
from moesim.simulator.predict.compile import prepare
from moesim.simulator.scenario import Scenario
from moesim.simulator.schedules.interleaved import per_round
from moesim.simulator.trainers.export import SETTINGS, Arguments, Words, unwritten
from moesim.simulator.trainers.facts import facts_of
from moesim.simulator.trainers.megatron.environment import megatron_environment
from moesim.simulator.trainers.megatron.layout import layout_text
from moesim.simulator.trainers.megatron.model_arguments import (
    CLAMPED,
    SWIGLU,
    expert_arguments,
    model_arguments,
)
from moesim.simulator.trainers.megatron.plan_arguments import (
    dispatcher_arguments,
    parallel_arguments,
    precision_arguments,
    recompute_arguments,
    software_arguments,
)
from moesim.simulator.trainers.trainer import Writer, build_trainer
from moesim.simulator.trainers.variables import VARIABLES

UNWRITTEN = ("parallel.shard_group", "parallel.shard_optimizer_over_groups", "software.static_experts")
"""Keys of `export.SETTINGS` that the arguments do not hold."""


def megatron_arguments(scenario: Scenario, version: str = "0.20") -> Arguments:
    """Arguments of Megatron-LM's `pretrain_gpt.py` for a scenario's model, batch and plan.

    Stages are always written out, as they were priced. `unspelled` has a sentence for everything in which
    the run would differ from the prediction. Flags: `megatron/training/arguments.py` of the version. Raises
    InputError for a model that cannot be loaded, a plan that cannot be simulated and an unknown version.
    """
    trainer = build_trainer("megatron", version, Writer(megatron_arguments))
    shape, facts = scenario.shape, facts_of(scenario)
    runs_schedule = facts.values(trainer.project)["schedule_there"] is not None
    adapted, changes = trainer.adapted(scenario)
    unspelled = [*trainer.problems_of(adapted), *changes]
    if scenario.routing.capacity is not None:
        unspelled.append("rows above a capacity are dropped: the arguments ask for a run that drops none")
    activation = None if shape.numerics is None else shape.numerics.activation
    if activation not in (*SWIGLU, CLAMPED) and shape.ffn_gated:
        unspelled.append(
            f"the activation {activation}: the arguments ask for SwiGLU, whose kernels are as long"
        )
    unspelled += unwritten(scenario, set(SETTINGS) - set(UNWRITTEN), trainer.label)
    groups: dict[str, dict[str, Words]] = {
        "model": model_arguments(shape),
        "experts": {} if shape.moe is None else expert_arguments(shape, shape.moe),
        "parallel": parallel_arguments(scenario.parallel, shape),
        "dispatcher": dispatcher_arguments(scenario, shape, trainer.version),
        "precision": precision_arguments(scenario.recipe, scenario.parallel.zero_stage),
        "recompute": recompute_arguments(scenario.recompute, shape),
        "software": software_arguments(scenario.software, scenario.parallel, shape),
        "batch": _batch(scenario),
        "optimizer": _optimizer(),
        "data": _data(scenario.parallel.zero_stage),
    }
    if runs_schedule and scenario.parallel.pp > 1:
        groups["parallel"]["--pipeline-model-parallel-layout"] = _layout(scenario, shape)
        if scenario.parallel.vpp > 1:
            group = per_round(scenario.parallel.pp, facts.microbatches)
            groups["parallel"]["--microbatch-group-size-per-virtual-pipeline-stage"] = str(group)
    words = [word for group in groups.values() for word in group.values() if isinstance(word, str)]
    used = {word[1:] for word in words if word.startswith("$")}
    variables = {name: text for name, text in VARIABLES.items() if name in used}
    return Arguments(
        trainer.label,
        f"{scenario.name}, {_plan(scenario)}",
        {name: group for name, group in groups.items() if group},
        variables,
        megatron_environment(facts, scenario.machines[0].accelerator),
        facts.n_gpus,
        "${MEGATRON_PATH}/pretrain_gpt.py",
        tuple(unspelled),
        (
            f"{facts.n_gpus:,} GPUs, {facts.replicas} replicas, {facts.microbatches} micro-batches",
            "Learning-rate schedule, weight decay, betas and clipping do not change the time: set your own.",
        ),
    )


def _plan(scenario: Scenario) -> str:
    plan = scenario.parallel
    return f"TP{plan.tp} PP{plan.pp} EP{plan.ep} CP{plan.cp} VPP{plan.vpp} {scenario.schedule}"


def _layout(scenario: Scenario, shape: ModelShape) -> str:
    """The stages as they were priced: stated, or balanced as the prediction balances them."""
    layers = scenario.stages.layers or prepare(scenario).stages.layers_per_stage
    return layout_text(layers, shape.mtp_layers, scenario.stages.mtp)


def _batch(scenario: Scenario) -> dict[str, Words]:
    batch, run = scenario.batch, scenario.run
    steps = -(-round(run.tokens) // (batch.sequences * batch.sequence_length))
    return {
        "--micro-batch-size": str(scenario.parallel.microbatch),
        "--global-batch-size": str(batch.sequences),
        "--seq-length": str(batch.sequence_length),
        "--max-position-embeddings": str(batch.sequence_length),
        "--train-samples": str(steps * batch.sequences),
    }


def _optimizer() -> dict[str, Words]:
    return {
        "--optimizer": "adam",
        "--lr": "$LEARNING_RATE",
        "--lr-decay-style": "cosine",
        "--lr-warmup-fraction": "0.01",
        "--weight-decay": "0.1",
        "--adam-beta1": "0.9",
        "--adam-beta2": "0.95",
        "--clip-grad": "1.0",
        "--init-method-std": "0.02",
    }


def _data(zero_stage: int) -> dict[str, Words]:
    return {
        "--tokenizer-type": "HuggingFaceTokenizer",
        "--tokenizer-model": "$TOKENIZER_MODEL",
        "--data-path": "$DATA_PATH",
        "--split": "99,1,0",
        "--no-create-attention-mask-in-dataloader": None,
        "--save": "$CHECKPOINT_DIR",
        "--load": "$CHECKPOINT_DIR",
        "--save-interval": "500",
        "--ckpt-format": "fsdp_dtensor" if zero_stage > 1 else "torch_dist",
        "--log-interval": "1",
        "--log-throughput": None,
        "--eval-iters": "0",
        "--distributed-timeout-minutes": "60",
    }
