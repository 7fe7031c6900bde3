"""The predictions of MLPerf's nine runs that were frozen before anyone compared them."""

from __future__ import annotations

from typing import Literal

from lab.scoring.frozen_predictions import Freezes, FrozenStep

FROZEN = "mlperf-v6-frozen.csv"


class FrozenPrediction(FrozenStep):
    """What was predicted for a run on a day, with an 80 % interval of the step (s), and whether it fitted."""

    fits: Literal["yes", "no"]


FREEZES = Freezes(
    FROZEN,
    FrozenPrediction,
    {
        "2026-11-22 18:44": "6bdb75c0c27ef398fa4118d233d998d11cf93e5a549ec67bb838f0d0bfbce883",
        "2026-11-22 22:32": "7d9b4b2c21b3dc53b4daed40fb0e05c0d7de0709b1111b0c4780475ee62ba849",
    },
)
"""The frozen predictions of all nine runs."""
