"""Draws random legal plans for the judges of exported arguments."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise

from moesim.simulator.layout.job import resolve
from moesim.simulator.model.precision import PRECISIONS, Precision
from moesim.simulator.planner.frames import legal_frames
from moesim.simulator.planner.space import PlanSpace, with_defaults
from moesim.simulator.planner.trainer_limits import TrainerLimits
from moesim.simulator.scenario import Scenario, load_scenario
from moesim.simulator.scenario.sections import Stages
from moesim.simulator.trainers.rules import facts_of
from moesim.simulator.trainers.trainer import Trainer

MODELS = (
    "deepseek-v3",
    "mixtral-8x7b",
    "mixtral-8x22b",
    "qwen3-235b-a22b",
    "qwen3-30b-a3b",
    "llama-3-70b",
)
CLUSTERS = {"deepseek-v3": 128, "qwen3-235b-a22b": 64}
"""Nodes of eight H100 for a model; 32 for the others."""
SEQUENCES = 2048


def job_of(model: str) -> Scenario:
    """A scenario of a model on H100, whose plan is drawn anew."""
    nodes = CLUSTERS.get(model, 32)
    return load_scenario(
        "deepseek-v3-2048xh800",
        [
            f"model={model}",
            "cluster=h100-1024",
            f"cluster.nodes={nodes}",
            f"batch.sequences={SEQUENCES}",
            "parallel={}",
            "schedule=1f1b",
            "recompute=none",
            "precision=bf16",
            "profile=",
            "name=",
        ],
    )


def drawn(trainer: Trainer, model: str, count: int, seed: int) -> Iterator[Scenario]:
    """`count` random plans that the trainer can run, with random sizes of the stages; they need not fit."""
    scenario, _ = trainer.adapted(job_of(model), any_plan=True)
    job = resolve(scenario)
    precision = tuple(trainer.adapted_recipe(r)[0] for r in _recipes())
    wanted = PlanSpace(precision=precision, expert_tp=(1, 2))
    space = with_defaults(wanted, scenario, job.shape, job.cluster)
    space, _ = TrainerLimits(trainer, scenario).chosen(wanted, space)
    frames, _ = legal_frames(
        space,
        job.shape,
        job.cluster,
        scenario.batch.sequences,
        scenario.batch.sequence_length,
        "any",  # a trainer judges the arguments, whatever the machine
    )
    draw, made = random.Random(f"{model} {seed}"), 0
    while made < count:
        frame = draw.choice(frames)
        plan = frame.plan.model_copy(update={"zero_stage": draw.choice(space.zero_stage)})
        changed = scenario.model_copy(
            update={
                "parallel": plan,
                "schedule": frame.schedule,
                "precision": draw.choice(space.precision),
                "recompute": draw.choice(space.recompute),
                "communication": scenario.communication.model_copy(update={"sms": draw.choice(space.sms)}),
                "software": scenario.software.model_copy(
                    update={"overlap_data_parallel": draw.random() < 0.5}
                ),
                "stages": Stages(layers=_split(draw, job.shape.n_layers, frame.pattern.n_stages)),
            }
        )
        if not trainer.problems(facts_of(changed)):
            made += 1
            yield changed


def _recipes() -> list[Precision]:
    tensor = PRECISIONS["fp8"].model_copy(
        update={"scaling": "tensor", "moments": "fp32", "parameter_gather": "fp8"}
    )
    small = PRECISIONS["bf16"].model_copy(
        update={"gradients": "bf16", "gradient_reduce": "bf16", "moments": "bf16"}
    )
    return [PRECISIONS["bf16"], PRECISIONS["fp8"], tensor, small]


def _split(draw: random.Random, layers: int, stages: int) -> tuple[int, ...]:
    """Random sizes of the stages; some have no layer."""
    cuts = sorted(draw.choices(range(layers + 1), k=stages - 1))
    if draw.random() < 0.5 and stages <= layers:
        cuts = sorted(draw.sample(range(1, layers), stages - 1))
    return tuple(b - a for a, b in pairwise([0, *cuts, layers]))
