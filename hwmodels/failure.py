"""How often a training job is interrupted, as large operators published it."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from moesim.hwmodels.library import load_described, shipped_names
from moesim.hwmodels.provenance import SourcedPerNodeDay

FOLDER = "failures"


class FailureRate(BaseModel):
    """Unexpected interruptions per node and day (`data/failures/*.yaml`)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    title: str
    interruptions: SourcedPerNodeDay
    note: str | None = None

    def mean_time_between_s(self, nodes: int) -> float:
        """Mean time between interruptions of a job on this many nodes (independent failures)."""
        return 86400.0 / (self.interruptions.value * nodes)


def list_failure_rates() -> tuple[str, ...]:
    """Names of the shipped failure rates."""
    return shipped_names(FOLDER)


def load_failure_rate(name: str, base: Path | None = None) -> FailureRate:
    """The failure rate of a shipped name or a file path; raises InputError for an unknown one."""
    return load_described(FailureRate, FOLDER, name, "failure rate", base)
