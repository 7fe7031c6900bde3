"""Checks whether a scenario is legal and fits into memory, without simulating it."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from moesim.simulator.layout.stages import describe
from moesim.simulator.predict.compile import prepare
from moesim.simulator.predict.result_parts import MemoryResult
from moesim.simulator.scenario import Scenario
from moesim.simulator.scenario.inputs import Inputs, inputs_of


class Check(BaseModel):
    """Figures of a legal plan; `microbatches` counts those of one pipeline."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    inputs: Inputs
    model: str
    accelerator: str
    n_gpus: int
    dp: int
    microbatches: int
    stages: tuple[str, ...]
    memory: MemoryResult
    """Memory of the fullest GPU; for a fleet, in the pool with the smallest reserve."""


def check(scenario: Scenario) -> Check:
    """Resolve, check and lay out a scenario without running it.

    Raises InputError, with key and nearest legal values, for an illegal scenario.
    """
    prepared = prepare(scenario)
    return Check(
        inputs=inputs_of(scenario),
        model=prepared.shape.name,
        accelerator=" + ".join(pool.part.cluster.accelerator.title for pool in prepared.pools),
        n_gpus=prepared.n_gpus,
        dp=prepared.layout.dp,
        microbatches=prepared.schedule.microbatches,
        stages=tuple(describe(prepared.stages).splitlines()),
        memory=prepared.memory,
    )
