"""Predictions frozen before anyone compared them, in CSV files whose blocks the code knows by digest.

A freeze is never changed, only followed by another.
"""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from pydantic import PositiveFloat

from moesim.hwmodels.frozen import Frozen
from moesim.hwmodels.validation import validate_model
from moesim.simulator.predict.result import Result
from moesim.simulator.scenario import Scenario
from moesim.simulator.studies.uncertainty import with_uncertainty

DATA = Path(__file__).with_name("data")
"""Plans, measurements and frozen predictions that the lab reads."""


class FrozenStep(Frozen):
    """What was predicted for a run on a day, with an 80 % interval of the step (s)."""

    name: str
    date: str
    commit: str
    """Tree that predicted it."""
    step_s: PositiveFloat
    p10_s: PositiveFloat
    p50_s: PositiveFloat
    p90_s: PositiveFloat


LineT = TypeVar("LineT", bound=FrozenStep)


class StepInterval(NamedTuple):
    """A predicted step (s) with its 80 % interval and the median."""

    step_s: float
    p10_s: float
    p50_s: float
    p90_s: float

    def rounded(self) -> dict[str, float]:
        """The seconds as a line of a frozen file holds them, by column."""
        return {name: round(value, 4) for name, value in self._asdict().items()}


@dataclass(frozen=True)
class Freezes(Generic[LineT]):
    """The frozen predictions of one file in `lab/scoring/data`, and the digest of every block."""

    file: str
    line: type[LineT]
    digests: Mapping[str, str]
    """SHA-256 of a block's lines by its date, oldest first."""

    def lines(self) -> tuple[LineT, ...]:
        """The frozen predictions, oldest first. Raises InputError for a malformed line."""
        return tuple(validate_model(self.line, row, self.file) for row in _rows(self.file))

    def changed(self, lines: Sequence[LineT]) -> tuple[str, ...]:
        """Dates of blocks whose `lines` are not those that were frozen, and of blocks without a digest."""
        dates = dict.fromkeys([*self.digests, *(line.date for line in lines)])
        return tuple(
            date for date in dates if self.digests.get(date) != digest([x for x in lines if x.date == date])
        )

    def as_csv(self, block: Sequence[LineT], header: bool) -> str:
        """Lines to append to the file, with the names of its columns if it is new."""
        text = io.StringIO()
        writer = csv.DictWriter(text, list(self.line.model_fields), lineterminator="\n")
        if header:
            writer.writeheader()
        writer.writerows(line.model_dump() for line in block)
        return text.getvalue()


def digest(lines: Sequence[FrozenStep]) -> str:
    """SHA-256 of frozen predictions."""
    text = "\n".join(",".join(str(value) for value in line.model_dump().values()) for line in lines)
    return hashlib.sha256(text.encode()).hexdigest()


def published_text(name: str) -> str:
    """The text of a file in `lab/scoring/data`."""
    return (DATA / name).read_text("utf-8")


@lru_cache(maxsize=8)
def _rows(name: str) -> tuple[dict[str, Any], ...]:
    return tuple(csv.DictReader(io.StringIO(published_text(name))))


def step_with_interval(scenario: Scenario) -> tuple[StepInterval, Result]:
    """Predict a step with its interval, and return the whole result too."""
    result = with_uncertainty(scenario)
    assert result.uncertainty is not None
    band = result.uncertainty.bands["step_time_s"]
    return StepInterval(result.step.time_s, band.p10, band.p50, band.p90), result
