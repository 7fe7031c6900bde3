"""Is a scenario legal, and does it fit? Everything that can be said before any time is simulated."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from moesim.simulator.layout.stages import describe
from moesim.simulator.predict.compile import prepare
from moesim.simulator.predict.result_parts import MemoryResult
from moesim.simulator.scenario import Scenario


class Check(BaseModel):
    """What a legal plan comes to; counts are of GPUs, micro-batches of one pipeline and blocks."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    accelerator: str
    n_gpus: int
    dp: int
    microbatches: int
    stages: tuple[str, ...]
    memory: MemoryResult
    """Of the fullest GPU; of a fleet, that of the pool with the least to spare."""


def check(scenario: Scenario) -> Check:
    """Resolve, check and lay out a scenario without running it.

    Raises InputError, with key and nearest legal values, where something does not fit together.
    """
    prepared = prepare(scenario)
    return Check(
        model=prepared.shape.name,
        accelerator=" + ".join(pool.part.cluster.accelerator.title for pool in prepared.pools),
        n_gpus=prepared.n_gpus,
        dp=prepared.layout.dp,
        microbatches=prepared.schedule.microbatches,
        stages=tuple(describe(prepared.stages).splitlines()),
        memory=prepared.memory,
    )
