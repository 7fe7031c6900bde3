"""The key and the outcome of a point of a sweep, as a store keeps them; imports nothing that predicts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Status = Literal["ok", "does not fit", "infeasible", "illegal", "failed"]
"""`does not fit`: the prediction needs more memory than a GPU has. `infeasible` and `illegal`: the scenario
was refused with a reason. `failed`: the program or its process broke."""


@dataclass(frozen=True, slots=True)
class Key:
    """Hashes of everything that a prediction depends on; equal keys mean equal results."""

    scenario: str
    calibration: str
    version: str

    @property
    def text(self) -> str:
        """The key as one text."""
        return f"{self.scenario}-{self.calibration[:16]}-{self.version}"


@dataclass(frozen=True, slots=True)
class PointOutcome:
    """The outcome of a point; `result` is the prediction as JSON, empty if there is none.

    `work_s`: seconds of computing it, 0 if it was not computed here; they are no part of the result.
    """

    status: Status
    reason: str
    figures: dict[str, float | bool | None]
    result: str
    work_s: float = field(default=0.0, compare=False)
