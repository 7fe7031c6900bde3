"""Surveys a sweep before it starts: which points its store knows, which are illegal, which are missing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moesim.hwmodels.errors import InputError
from moesim.simulator.scenario import Scenario
from moesim.simulator.studies.point import key_of
from moesim.simulator.studies.space import Space, points
from moesim.simulator.studies.store import Store
from moesim.simulator.studies.sweep import SweepPoint


@dataclass(frozen=True, slots=True)
class Survey:
    """The points of a sweep, in the order of its design: those with an outcome, and those without."""

    points: tuple[SweepPoint, ...]
    """Points that the store knows, and illegal ones."""
    missing: tuple[dict[str, Any], ...]
    """Values of the points that are still to be computed."""

    @property
    def total(self) -> int:
        """Number of points of the design."""
        return len(self.points) + len(self.missing)


def survey(
    scenario: Scenario,
    space: Space,
    store: Path | None = None,
    *,
    design: str = "grid",
    count: int | None = None,
    seed: int = 0,
    admit: Callable[[Scenario], object] = lambda scenario: None,
) -> Survey:
    """Look every point of a sweep up, without computing any; the arguments are those of `sweep`.

    `admit` is called with the scenario of each missing point and may refuse it by InputError, which ends the
    survey. Raises InputError for a malformed space or store.
    """
    known: list[SweepPoint] = []
    missing: list[dict[str, Any]] = []
    opened = Store(store, durable=False) if store is not None and store.is_file() else None
    try:
        for values in points(space, design, count, seed):
            try:
                changed = scenario.replace(**values)
                key = key_of(changed)
            except InputError as error:
                known.append(SweepPoint(values=values, status="illegal", reason=str(error), key=""))
                continue
            outcome = None if opened is None else opened.get(key)
            if outcome is None:
                admit(changed)
                missing.append(values)
                continue
            known.append(
                SweepPoint(
                    values=values,
                    status=outcome.status,
                    reason=outcome.reason,
                    figures=outcome.figures,
                    key=key.text,
                )
            )
    finally:
        if opened is not None:
            opened.close()
    return Survey(tuple(known), tuple(missing))
