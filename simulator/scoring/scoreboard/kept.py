"""Medians and coverage of the open scoreboard as computed last, because computing them takes minutes."""

from __future__ import annotations

import datetime
from functools import lru_cache
from importlib import resources

from moesim.hwmodels.frozen import Frozen
from moesim.hwmodels.validation import validate_model
from moesim.hwmodels.yaml_io import parse_mapping

FILE = "scoreboard.yaml"


class KeptScore(Frozen):
    """Errors of a set of rows, as fractions, and the share of the rows inside the 80 % interval.

    `interval_width`: median width of the intervals, relative to the predicted steps.
    """

    name: str
    rows: int
    median_error: float
    median_absolute_error: float
    worst_absolute_error: float
    covered: float
    interval_width: float


class KeptBoard(Frozen):
    """Scores of the sets of rows and of the groups of sources, with day and version of their computation."""

    computed: datetime.date
    version: str
    sets: tuple[KeptScore, ...]
    groups: tuple[KeptScore, ...]

    def named(self, name: str) -> KeptScore:
        """The score of one set; raises KeyError for a set that there is not."""
        return {score.name: score for score in self.sets}[name]


@lru_cache(maxsize=1)
def kept_board() -> KeptBoard:
    """The board that is kept in `data/scoreboard.yaml`; lab/writers write it with docs/validation.md."""
    text = resources.files("moesim.simulator").joinpath("data", FILE).read_text("utf-8")
    return validate_model(KeptBoard, parse_mapping(text, FILE), FILE)
