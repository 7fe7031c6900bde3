"""Intervals of a prediction and what they come from (plain data)."""

from __future__ import annotations

from moesim.hwmodels.frozen import Frozen
from moesim.simulator.common.tables import Row, TableResult


class Band(Frozen):
    """A figure: as predicted, and the 10 %, 50 % and 90 % points of its distribution."""

    predicted: float
    p10: float
    p50: float
    p90: float

    @property
    def has_sign(self) -> bool:
        """Of a difference: whether P10 and P90 lie on the same side of zero."""
        return self.p10 > 0.0 or self.p90 < 0.0


class Effect(Frozen):
    """One source of uncertainty alone: step time where it is at its 10 % point and at its 90 % point.

    `low` and `high` say where the source is: a relative change of its times, or the value of a key.
    `exact`: from the engine; otherwise to first order along the critical path.
    """

    source: str
    meaning: str
    low: str
    high: str
    low_s: float
    high_s: float
    exact: bool = False

    @property
    def swing_s(self) -> float:
        """Distance between the two step times."""
        return abs(self.high_s - self.low_s)


class Uncertainty(TableResult):
    """Bands of the figures of one prediction, and its sources, the largest first."""

    bands: dict[str, Band]
    sources: tuple[Effect, ...]
    samples: int
    seed: int
    note: str = ""
    """Of which resolution the critical path is that the effects were read along."""

    def rows(self) -> list[Row]:
        """One row a figure."""
        return [{"figure": name, **band.model_dump()} for name, band in self.bands.items()]
