"""Draws step times from the sources of their uncertainty."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moesim.hwmodels.arrays import FloatArray
from moesim.simulator.studies.effects import EntryEffect, drawn_changes
from moesim.simulator.studies.sources import MODEL_ERROR, model_error

SAMPLES = 4096
"""Draws of a Monte Carlo; with so many, the 10 % point lies between the true 9 % and 11 % points."""


def draws_s(
    time_s: float,
    effects: Sequence[EntryEffect],
    *,
    left_out: float = MODEL_ERROR,
    samples: int = SAMPLES,
    seed: int = 0,
) -> FloatArray:
    """Draws of the step time (s) from the effects and from the error that no entry carries (eq. U2)."""
    seconds = np.full(samples, time_s)
    for effect in effects:
        seconds += effect.draw_s(samples, seed)
    return bounded(seconds, left_out, time_s, seed)


def bounded(seconds: FloatArray, left_out: float, time_s: float, seed: int) -> FloatArray:
    """Apply the factor for the error that no entry carries, and keep every draw above 0.1 `time_s`.

    Otherwise far tails could make a step instant or negative.
    """
    changed = seconds * (1.0 + drawn_changes(model_error(left_out), len(seconds), seed))
    return np.asarray(np.maximum(changed, 0.1 * time_s))
