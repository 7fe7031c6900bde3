"""What a step of an inference engine takes: operators, exchange and host, and tables of it for the events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from moesim.simulator.cost.evidence import Evidence
from moesim.simulator.serving.deployment import Deployment
from moesim.simulator.serving.replicas import Pace
from moesim.simulator.serving.scheduler import Batch


class Part(NamedTuple):
    """Seconds of a class of work in a step, exposed ones and all."""

    name: str
    kind: str
    exposed_s: float
    busy_s: float
    launches: int
    evidence: Evidence


@dataclass(frozen=True)
class StepCost:
    """A step: its seconds, best and worst of an 80 % interval, and its parts, whose exposed seconds add up to it."""

    seconds: float
    low: float
    high: float
    parts: tuple[Part, ...] = field(repr=False)


class StepModel:
    """Prices steps of one replica; equal batches are priced once."""

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment

    def cost(self, ranks: Sequence[Batch]) -> StepCost:
        """The cost of a step in which each rank of `dp` has its batch."""
        raise NotImplementedError

    def pace(self, now_ns: int, ranks: Sequence[Batch]) -> Pace:
        """The pace of these batches from tables of `cost` (protocol `replicas.StepTimes`)."""
        raise NotImplementedError
