"""What a curve of a merged profile replaced, so that a result can show the old value beside the new one."""

from __future__ import annotations

from moesim.hwmodels.frozen import Frozen
from moesim.hwmodels.provenance import DateText, Source


class ReplacedCurve(Frozen):
    """The curve that an imported one of the same id replaced; units as in the new one."""

    profile: str
    """Name of the profile that held it."""
    source: Source
    date: DateText
    points: tuple[tuple[float, float] | tuple[float, float, str], ...]
