"""Intervals of a prediction and the sources of its uncertainty (plain data)."""

from __future__ import annotations

from pydantic import Field

from moesim.hwmodels.frozen import Frozen
from moesim.simulator.common.tables import Row, TableResult


class Band(Frozen):
    """A figure as predicted, with the 10 %, 50 % and 90 % points of its distribution."""

    predicted: float
    p10: float
    p50: float
    p90: float

    @property
    def has_sign(self) -> bool:
        """Whether P10 and P90 of a difference lie on the same side of zero."""
        return self.p10 > 0.0 or self.p90 < 0.0


class Effect(Frozen):
    """Step times with one source of uncertainty alone at its 10 % point and at its 90 % point.

    `low` and `high` state the source's points, as a relative change of its times or as the value of a key.
    `exact`: the engine computed the step times; otherwise they are first-order along the critical path.
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


class EngineBands(Frozen):
    """Bands from engine runs with all sources off together, one run a draw.

    `first_order_mean` and `first_order_rms`: mean and root mean square of the relative error of the
    first-order step time over the same draws.
    """

    bands: dict[str, Band]
    draws: int
    seed: int
    first_order_mean: float
    first_order_rms: float


class Uncertainty(TableResult):
    """Bands of the figures of one prediction, and its sources of uncertainty, largest first."""

    bands: dict[str, Band]
    sources: tuple[Effect, ...]
    samples: int
    seed: int
    note: str = ""
    """Names the resolution of the critical path along which the effects were computed."""
    by_engine: EngineBands | None = Field(None, exclude_if=lambda value: value is None)
    """Bands by the engine itself, where they were asked for."""

    def rows(self) -> list[Row]:
        """One row a figure."""
        return [{"figure": name, **band.model_dump()} for name, band in self.bands.items()]
