"""How often a training job is interrupted, and how long it takes to come back, as operators published it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from moesim.hwmodels.frozen import Frozen
from moesim.hwmodels.library import by_name, load_described, shipped_names
from moesim.hwmodels.provenance import DateText, Kind, Source, SourcedPerNodeDay, SourcedSeconds
from moesim.hwmodels.units import SECONDS_PER_DAY

FOLDER = "failures"
RESTARTS = "restarts"


class CauseCount(Frozen):
    """How many of the counted interruptions one cause accounts for; `node`: the node has to be replaced."""

    cause: str
    count: Annotated[int, Field(ge=1, strict=True)]
    node: bool


class Causes(Frozen):
    """Counts by cause, with their provenance."""

    kind: Kind
    source: Source
    date: DateText
    counts: tuple[CauseCount, ...] = Field(min_length=1)


UNKNOWN_CAUSE = CauseCount(cause="any", count=1, node=True)
"""Where nobody published causes: one, which takes its node with it (the careful assumption)."""


class FailureRate(Frozen):
    """Unexpected interruptions per node and day (`data/failures/*.yaml`)."""

    name: str = "custom"
    title: str = "stated rate"
    interruptions: SourcedPerNodeDay
    causes: Causes | None = None
    note: str | None = None

    def mean_time_between_s(self, nodes: int) -> float:
        """Mean time between interruptions of a job on this many nodes (independent failures; eq. J4)."""
        rate = self.interruptions.value * nodes
        return SECONDS_PER_DAY / rate if rate > 0.0 else float("inf")

    @property
    def counts(self) -> tuple[CauseCount, ...]:
        """The causes, or the one unknown cause."""
        return self.causes.counts if self.causes is not None else (UNKNOWN_CAUSE,)


class Restart(Frozen):
    """What follows an interruption (`data/restarts/*.yaml`): noticing it, then getting going again."""

    name: str = "custom"
    title: str = "stated restart"
    detection: SourcedSeconds
    """From the failure until it is noticed and diagnosed; the job stands still."""
    recovery: SourcedSeconds
    """From there until the first step after the checkpoint starts: scheduling, set-up, loading."""
    note: str | None = None


def list_failure_rates() -> tuple[str, ...]:
    """Names of the shipped failure rates."""
    return shipped_names(FOLDER)


def load_failure_rate(name: str, base: Path | None = None) -> FailureRate:
    """The failure rate of a shipped name or a file path; raises InputError for an unknown one."""
    return load_described(FailureRate, FOLDER, name, "failure rate", base)


def list_restarts() -> tuple[str, ...]:
    """Names of the shipped restart times."""
    return shipped_names(RESTARTS)


def load_restart(name: str, base: Path | None = None) -> Restart:
    """The restart times of a shipped name or a file path; raises InputError for an unknown one."""
    return load_described(Restart, RESTARTS, name, "restart", base)


FailureRateRef = Annotated[FailureRate, by_name(FailureRate, load_failure_rate)]
"""A field that takes a failure rate's name, path or full description."""

RestartRef = Annotated[Restart, by_name(Restart, load_restart)]
"""A field that takes restart times by name, path or full description."""
