"""What interrupts a run: published failure rates, times to restart, and storage for checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import Field, model_validator

from moesim.hwmodels.frozen import Frozen
from moesim.hwmodels.provenance import (
    DateText,
    Kind,
    Source,
    SourcedBytes,
    SourcedBytesPerSecond,
    SourcedFraction,
    SourcedPerNodeDay,
    SourcedSeconds,
)
from moesim.hwmodels.ranges import within
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


class CorrelatedFault(Frozen):
    """A fault that takes several nodes at once: a rack, the nodes of a switch, a power feed."""

    cause: str
    nodes: Annotated[int, Field(ge=2, le=100_000, strict=True)]
    """Nodes of one group, which fail together."""
    rate: SourcedPerNodeDay
    """Events of one group and day, written as "/node-day"; the job has nodes / group of them, rounded up."""


class RepeatOffenders(Frozen):
    """A few nodes that fail again and again, and when the operator takes them out for good."""

    nodes: Annotated[SourcedFraction, within(1e-6, 0.5)]
    """Share of the nodes."""
    faults: Annotated[SourcedFraction, within(0.0, 1.0)]
    """Share of all faults that strikes them, as long as all are in the job."""
    evict_after: Annotated[int, Field(ge=1, strict=True)] | None = None
    """Faults after which such a node does not come back; absent: it always does."""


class FailureRate(Frozen):
    """Unexpected interruptions per node and day (`data/failures/*.yaml`)."""

    name: str = "custom"
    title: str = "stated rate"
    interruptions: SourcedPerNodeDay
    causes: Causes | None = None
    correlated: tuple[CorrelatedFault, ...] = ()
    """Faults of whole racks, switches or feeds, beside `interruptions`."""
    repeat_offenders: RepeatOffenders | None = None
    note: str | None = None

    def mean_time_between_s(self, nodes: int) -> float:
        """Mean time between interruptions of a job on this many nodes (independent failures; eq. J4)."""
        rate = self.interruptions.value * nodes
        return SECONDS_PER_DAY / rate if rate > 0.0 else float("inf")

    @property
    def counts(self) -> tuple[CauseCount, ...]:
        """The causes, or the one unknown cause."""
        return self.causes.counts if self.causes is not None else (UNKNOWN_CAUSE,)


class RestartSeconds(NamedTuple):
    """Seconds of each part of a restart, in their order (eq. J11)."""

    isolation: float
    scheduler: float
    image: float
    environment: float
    processes: float
    communicators: float
    load: float
    warm_up: float

    @property
    def total(self) -> float:
        """Seconds of all parts."""
        return sum(self)


class RestartParts(Frozen):
    """What a restart consists of; each part has its own source, or is assumed with a range."""

    isolation: SourcedSeconds
    """Finding the node that must go."""
    scheduler: SourcedSeconds
    """The scheduler gives the job its nodes back."""
    image: SourcedBytes
    """Container image that each node of a fresh job loads."""
    image_rate: SourcedBytesPerSecond
    """Rate of the image store, all nodes together."""
    image_rate_per_node: SourcedBytesPerSecond
    """Rate at which one node can unpack an image."""
    environment: SourcedSeconds
    """Installing what the image leaves out, mounting file systems, checking health."""
    processes: SourcedSeconds
    """Python, the CUDA context and building the model."""
    communicators: SourcedSeconds
    """Set-up of all groups of communicators, for each GPU of the job (eq. J10)."""
    warm_up: SourcedSeconds
    """What the first steps of a fresh job take longer."""

    def seconds(self, nodes: int, gpus: int, load_s: float, how: str) -> RestartSeconds:
        """Parts in s of a restart on a number of nodes and GPUs; `load_s`: loading the checkpoint (eq. J11).

        `how`: "requeued" (all parts), "warm" (spares have image and environment), "hot" (spares run the
        processes already: no scheduler either) or "in place" (no node is replaced: processes only).
        """
        fresh, warm = how == "requeued", how in ("requeued", "warm")
        image = max(
            self.image.value * nodes / self.image_rate.value,
            self.image.value / self.image_rate_per_node.value,
        )
        return RestartSeconds(
            isolation=0.0 if how == "in place" else self.isolation.value,
            scheduler=self.scheduler.value if warm else 0.0,
            image=image if fresh else 0.0,
            environment=self.environment.value if fresh else 0.0,
            processes=self.processes.value,
            communicators=gpus * self.communicators.value,
            load=load_s,
            warm_up=self.warm_up.value if fresh else 0.0,
        )


class Restart(Frozen):
    """Times to detect an interruption and to recover from it (`data/restarts/*.yaml`)."""

    name: str = "custom"
    title: str = "stated restart"
    detection: SourcedSeconds
    """Time from the failure until it is noticed, while the job stands still."""
    detection_of: dict[str, SourcedSeconds] = Field({}, exclude_if=lambda value: not value)
    """That time for single causes, by the names that the failure rate gives them."""
    recovery: SourcedSeconds | None = None
    """Time from the diagnosis to the first step after the checkpoint, as one figure whatever the scale."""
    parts: RestartParts | None = None
    """The recovery by parts, which grow with the job."""
    note: str | None = None

    @model_validator(mode="after")
    def _recovers_one_way(self) -> Restart:
        if (self.recovery is None) == (self.parts is None):
            raise ValueError(
                "recovery: missing; give recovery (one time, for example 10 min) or parts, not both"
            )
        return self

    def recovery_s(self, nodes: int, gpus: int, load_s: float, how: str) -> float:
        """Seconds from the diagnosis to the first step; a stated recovery is the same for all arguments."""
        if self.parts is None:
            assert self.recovery is not None
            return self.recovery.value
        return self.parts.seconds(nodes, gpus, load_s, how).total

    @property
    def source(self) -> str:
        """Where the recovery is from."""
        return self.recovery.source if self.recovery is not None else self.note or self.title


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
    read: SourcedBytesPerSecond | None = None
    """Read rate of all compute nodes together; absent: the rate of writes."""
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

    def read_bytes_per_s(self, nodes: int) -> float:
        """Read rate of this many compute nodes together; a node reads no faster than it is known to write."""
        if self.read is None:
            return self.write_bytes_per_s(nodes)
        each = self.write_per_node
        return self.read.value if each is None else min(self.read.value, each.value * nodes)


def list_storage() -> tuple[str, ...]:
    """Names of the shipped storage systems."""
    return shipped_names(STORAGE)


def load_storage(name: str, base: Path | None = None) -> Storage:
    """The storage system of a shipped name or a file path; raises InputError for an unknown one."""
    return load_described(Storage, STORAGE, name, "storage system", base)


StorageRef = Annotated[Storage, by_name(Storage, load_storage)]
"""A field that takes a storage system's name, path or full description."""
