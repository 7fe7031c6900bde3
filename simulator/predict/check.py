"""Is a scenario legal, and does it fit? Everything that can be said before any time is simulated."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from moesim.simulator.layout.stages import describe
from moesim.simulator.predict.compile import prepare
from moesim.simulator.predict.fleet_compile import prepare_fleet
from moesim.simulator.predict.fleet_simulate import pool_memory
from moesim.simulator.predict.result_parts import MemoryResult
from moesim.simulator.predict.summarise import memory
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
    """Of the fullest GPU."""


def check(scenario: Scenario) -> Check:
    """Resolve, check and lay out a scenario without running it.

    Raises InputError, with key and nearest legal values, where something does not fit together.
    """
    if scenario.fleet is not None:
        return _check_fleet(scenario)
    prepared = prepare(scenario)
    return Check(
        model=prepared.shape.name,
        accelerator=prepared.cluster.accelerator.title,
        n_gpus=prepared.cluster.n_gpus,
        dp=prepared.layout.dp,
        microbatches=prepared.schedule.microbatches,
        stages=tuple(describe(prepared.stages).splitlines()),
        memory=memory(prepared),
    )


def _check_fleet(scenario: Scenario) -> Check:
    """The same for a fleet; the memory is that of the pool with the least to spare."""
    fleet = prepare_fleet(scenario)
    first = fleet.prepared[0]
    pools = [pool_memory(part, p) for part, p in zip(fleet.parts, fleet.prepared, strict=True)]
    return Check(
        model=first.shape.name,
        accelerator=" + ".join(part.cluster.accelerator.title for part in fleet.parts),
        n_gpus=fleet.n_gpus,
        dp=first.layout.dp,
        microbatches=first.schedule.microbatches,
        stages=tuple(describe(first.stages).splitlines()),
        memory=max(pools, key=lambda m: m.total_bytes / m.capacity_bytes),
    )
