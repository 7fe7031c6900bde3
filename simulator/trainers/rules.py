"""Conditions on plans: what a training framework cannot run, as data."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from importlib import resources
from typing import Any

from msgspec import Struct

from moesim.hwmodels.yaml_io import parse_mapping
from moesim.simulator.frameworks.software import Software
from moesim.simulator.model.precision import Precision
from moesim.simulator.model.recompute import Recompute, modules_of
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.scenario import Scenario
from moesim.simulator.scenario.parallel import ParallelPlan
from moesim.simulator.schedules import SCHEDULES
from moesim.simulator.schedules.spec import Project
from moesim.simulator.trainers.megatron.model_arguments import attention_arguments, linear_biases

Scalar = str | int | float | bool | None
Condition = Scalar | Sequence[Scalar] | Mapping[str, Any]
"""What a fact must be: a value, one of several values, {not: ...}, {above: n} or {below: n}."""


class Exclusion(Struct, frozen=True):
    """Plans that a trainer cannot run: those for which every condition holds.

    `when` maps names of facts (`PlanFacts.values`) to conditions. `because` is the reason as a clause.
    `versions` are those of the trainer that it applies to; empty for all.
    """

    when: Mapping[str, Condition]
    because: str
    versions: tuple[str, ...] = ()

    @property
    def reads(self) -> frozenset[str]:
        """Names of the facts that it depends on."""
        return frozenset(self.when)

    def applies(self, values: Mapping[str, Any]) -> bool:
        """Whether a plan with these facts is excluded."""
        return all(holds(condition, values[name]) for name, condition in self.when.items())


def holds(condition: Condition, value: Any) -> bool:
    """Whether a fact meets a condition; a fact of several values meets it if one of them does."""
    if isinstance(value, tuple | frozenset):
        return any(holds(condition, one) for one in value)
    if isinstance(condition, Mapping):
        ((word, limit),) = condition.items()
        if word == "not":
            return not holds(limit, value)
        return value is not None and bool(value > limit if word == "above" else value < limit)
    if isinstance(condition, Sequence) and not isinstance(condition, str):
        return any(holds(one, value) for one in condition)
    # Equal and of one kind, so that 1 is not true.
    return bool(condition == value) and isinstance(condition, bool) == isinstance(value, bool)


def check_words(condition: Any, place: str) -> None:
    """Raise ValueError for a condition with an unknown word."""
    if isinstance(condition, Mapping) and (
        len(condition) != 1 or next(iter(condition)) not in ("not", "above", "below")
    ):
        raise ValueError(f"{place}: {dict(condition)} is no condition; write not, above or below")


# -- facts -------------------------------------------------------------------------------------------
# What a training framework must know of a plan to say whether it can run it.


class PlanFacts(Struct, frozen=True):
    """The parts of a plan that training frameworks differ on, with everything loaded.

    Every trainer has a function `problems(plan: PlanFacts) -> tuple[str, ...]`: one sentence for each reason
    why it cannot run the plan, none where it can.
    """

    n_gpus: int
    """GPUs of the job, over all clusters of a fleet."""
    shape: ModelShape
    """The model."""
    parallel: ParallelPlan
    """Degrees of parallelism."""
    schedule: str
    """A schedule's name, or a CSV file in PyTorch's notation."""
    layers: tuple[int, ...] | None
    """Decoder layers per pipeline stage; None where they are balanced by compute."""
    recompute: Recompute
    """What the backward computes again."""
    recipe: Precision
    """Formats of tensors and GEMMs."""
    sms: int
    """SMs that communication kernels reserve."""
    placement_in_order: bool
    """Experts are in order, one replica each."""
    sequences: int
    """Sequences of one step over all GPUs."""
    sequence_length: int
    """Tokens of one sequence."""
    software: Software
    """Behaviour of the framework that the prediction assumed."""
    kernels: str
    """The dispatcher, as `communication.kernels` names it."""

    @property
    def flash_recomputes_alone(self) -> bool:
        """Whether only the core attention is recomputed, which flash attention does in any case."""
        return self.recompute == "attention" and self.software.attention != "unfused"

    @property
    def replicas(self) -> int:
        """Data-parallel replicas of the parameters outside the experts; 0 where the GPUs do not suffice."""
        return self.n_gpus // (self.parallel.tp * self.parallel.cp * self.parallel.pp)

    @property
    def microbatches(self) -> int:
        """Micro-batches that each data-parallel replica runs in one step; 0 where the batch is too small."""
        return self.sequences // max(self.replicas * self.parallel.microbatch, 1)

    def values(self, project: Project) -> dict[str, Any]:
        """The facts by the names that the rules of a trainer use; `project` is its name in the registries."""
        shape, moe = self.shape, self.shape.moe
        return {
            **plan_values(shape, self.parallel, self.schedule, project),
            **batch_values(self.parallel, self.replicas, self.microbatches),
            "features": tuple(sorted(shape.features)),
            "moe": moe is not None,
            "experts": moe.experts if moe else 0,
            "mtp_layers": shape.mtp_layers,
            "dense_layers": shape.n_layers - sum(shape.is_moe_layer(n) for n in range(shape.n_layers)),
            "attention_in_megatron": attention_arguments(shape) is not None,
            "linear_biases": linear_biases(shape),
            "gated": shape.ffn_gated,
            **recipe_values(self.recipe),
            **recompute_values(self.recompute),
            **sms_values(self.sms),
            "kernels": self.kernels,
            "zero_stage": self.parallel.zero_stage,
            "experts_in_order": self.placement_in_order,
            **{f"software.{key}": value for key, value in self.software},
        }


def plan_values(shape: ModelShape, plan: ParallelPlan, schedule: str, project: Project) -> dict[str, Any]:
    """Facts of the degrees of parallelism and of the schedule, with its name in a project or None."""
    kv_heads = [getattr(attention, "kv_heads", plan.tp) for attention in shape.attention_by_name.values()]
    same = ("tp", "pp", "ep", "cp", "vpp", "microbatch", "sequence_parallel")
    return {
        **{key: getattr(plan, key) for key in same},
        "etp": plan.expert_tp,
        "kv_heads_divide": all(heads % plan.tp == 0 for heads in kv_heads),
        **schedule_values(schedule, project),
    }


def batch_values(plan: ParallelPlan, replicas: int, microbatches: int) -> dict[str, Any]:
    """Facts of the data-parallel replicas and their micro-batches."""
    return {"dp": replicas, "microbatches": microbatches, "fills_pipeline": microbatches >= plan.pp}


def schedule_values(schedule: str, project: Project) -> dict[str, Any]:
    """The name of the schedule in a project; None where the project does not have it."""
    spec = SCHEDULES.get(schedule)
    return {"schedule_there": None if spec is None else spec.names_elsewhere.get(project)}


def sms_values(sms: int) -> dict[str, Any]:
    """Facts of the SMs that communication kernels reserve."""
    return {"sms": sms, "sms_odd": sms % 2 == 1}


def recipe_values(recipe: Precision) -> dict[str, Any]:
    """Facts of the precision recipe: its fields."""
    return dict(recipe)


def recompute_values(recompute: Recompute) -> dict[str, Any]:
    """Facts of what the backward computes again: a policy's name ("modules" for a list), and modules."""
    modules = tuple(sorted(modules_of(recompute)))
    return {"recompute": recompute if isinstance(recompute, str) else "modules", "recompute_modules": modules}


def facts_of(scenario: Scenario) -> PlanFacts:
    """The facts of a scenario's plan; raises InputError for a model or cluster that cannot be loaded."""
    return PlanFacts(
        n_gpus=sum(machine.n_gpus for machine in scenario.machines),
        shape=scenario.shape,
        parallel=scenario.parallel,
        schedule=scenario.schedule,
        layers=scenario.stages.layers,
        recompute=scenario.recompute,
        recipe=scenario.recipe,
        sms=scenario.communication.sms,
        placement_in_order=scenario.routing.eplb is None,
        sequences=scenario.batch.sequences,
        sequence_length=scenario.batch.sequence_length,
        software=scenario.software,
        kernels=scenario.communication.kernels,
    )


# -- features ----------------------------------------------------------------------------------------
# Names of what a model may have beyond plain layers, and what a trainer's plan does not say of them.

FEATURES_FILE = "data/trainers/features.yaml"
FEATURES: Mapping[str, str] = parse_mapping(
    (resources.files("moesim.simulator") / FEATURES_FILE).read_text("utf-8"), FEATURES_FILE
)
"""Words for a feature's name (`ModelShape.features`)."""


def missing_features(shape: ModelShape, expressed: Collection[str]) -> tuple[str, ...]:
    """Words for the features of a model that are not among those that a trainer's plan expresses."""
    return tuple(_words(name) for name in sorted(shape.features - set(expressed)))


def feature_exclusions(expressed: Collection[str]) -> tuple[Exclusion, ...]:
    """Exclusions of plans of models with a feature that is not among these."""
    named = [name for name in FEATURES if name not in expressed]
    return (
        *(Exclusion({"features": name}, _reason(_words(name))) for name in named),
        Exclusion({"features": {"not": [*FEATURES, *expressed]}}, _reason("a part of this model")),
    )


def _words(name: str) -> str:
    return FEATURES.get(name, name.replace("-", " ").replace("_", " "))


def _reason(words: str) -> str:
    return f"moesim knows no setting of it for {words}"
