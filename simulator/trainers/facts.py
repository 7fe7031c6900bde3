"""What a training framework must know of a plan to say whether it can run it."""

from __future__ import annotations

from dataclasses import dataclass

from moesim.simulator.model.precision import Precision
from moesim.simulator.model.recompute import RecomputePolicy
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.model.software import Software
from moesim.simulator.scenario import Scenario
from moesim.simulator.scenario.parallel import ParallelPlan


@dataclass(frozen=True, slots=True)
class PlanFacts:
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
    recompute: RecomputePolicy
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

    @property
    def replicas(self) -> int:
        """Data-parallel replicas of the parameters outside the experts; 0 where the GPUs do not suffice."""
        return self.n_gpus // (self.parallel.tp * self.parallel.cp * self.parallel.pp)

    @property
    def microbatches(self) -> int:
        """Micro-batches that each data-parallel replica runs in one step; 0 where the batch is too small."""
        return self.sequences // max(self.replicas * self.parallel.microbatch, 1)


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
    )
