"""What interrupts a run: published failure rates, times to restart, and storage for checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from moesim.hwmodels.frozen import Frozen
from moesim.hwmodels.provenance import (
    DateText,
    Kind,
    Source,
    SourcedBytesPerSecond,
    SourcedPerNodeDay,
    SourcedSeconds,
)
from moesim.hwmodels.units import SECONDS_PER_DAY
from moesim.hwmodels.yaml_io import by_name, load_described, shipped_names

# -- failures and restarts -------------------------------------------------------------------------

FAILURES = "failures"
RESTARTS = "restarts"


class CauseCount(Frozen):
    """Interruptions that one cause accounts for; `node` says whether the node must be replaced."""

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
"""The cause assumed where nobody published causes; it costs the node, which is the careful assumption."""


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
    """Times to detect an interruption and to recover from it (`data/restarts/*.yaml`)."""

    name: str = "custom"
    title: str = "stated restart"
    detection: SourcedSeconds
    """Time from the failure until it is diagnosed, while the job stands still."""
    recovery: SourcedSeconds
    """Time from the diagnosis to the first step after the checkpoint: scheduling, set-up, loading."""
    note: str | None = None


NO_FAILURES = "none"
"""Name of the rate of a run that nothing interrupts."""


def list_failure_rates() -> tuple[str, ...]:
    """Names of the shipped failure rates."""
    return shipped_names(FAILURES)


def load_failure_rate(name: str, base: Path | None = None) -> FailureRate:
    """The failure rate of a shipped name, of "none" or of a file; raises InputError for an unknown one."""
    if name == NO_FAILURES:
        never = SourcedPerNodeDay(
            value=0.0, kind="assumed", source="run.failures=none as stated", date="undated"
        )
        return FailureRate(name=NO_FAILURES, title="no failures", interruptions=never)
    return load_described(FailureRate, FAILURES, name, "failure rate", base)


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


# -- storage ---------------------------------------------------------------------------------------

STORAGE = "storage"


class Storage(Frozen):
    """Data of one storage system (`data/storage/*.yaml`), as a whole, per compute node, or both."""

    name: str = "custom"
    title: str = "stated storage"
    write: SourcedBytesPerSecond | None = None
    """Write rate of all compute nodes together."""
    write_per_node: SourcedBytesPerSecond | None = None
    """Write rate of one compute node."""
    note: str | None = None

    @model_validator(mode="after")
    def _some_rate(self) -> Storage:
        rates = [rate for rate in (self.write, self.write_per_node) if rate is not None]
        if not rates or any(rate.value <= 0.0 for rate in rates):
            raise ValueError("give write or write_per_node (or both), above 0, for example 2 TB/s")
        return self

    def write_bytes_per_s(self, nodes: int) -> float:
        """Write rate of this many compute nodes together, limited by the system or by the nodes."""
        rates = []
        if self.write is not None:
            rates.append(self.write.value)
        if self.write_per_node is not None:
            rates.append(self.write_per_node.value * nodes)
        return min(rates)


def list_storage() -> tuple[str, ...]:
    """Names of the shipped storage systems."""
    return shipped_names(STORAGE)


def load_storage(name: str, base: Path | None = None) -> Storage:
    """The storage system of a shipped name or a file path; raises InputError for an unknown one."""
    return load_described(Storage, STORAGE, name, "storage system", base)


StorageRef = Annotated[Storage, by_name(Storage, load_storage)]
"""A field that takes a storage system's name, path or full description."""
