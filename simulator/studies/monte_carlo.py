"""Draws of a step time from the sources of its uncertainty."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moesim.hwmodels.arrays import FloatArray
from moesim.simulator.studies.effects import EntryEffect, drawn_changes
from moesim.simulator.studies.sources import MODEL_ERROR, model_error

SAMPLES = 4096
"""Draws of a Monte Carlo: the 10 % point is then that of 9 to 11 %."""


def draws_s(
    time_s: float,
    effects: Sequence[EntryEffect],
    *,
    left_out: float = MODEL_ERROR,
    samples: int = SAMPLES,
    seed: int = 0,
) -> FloatArray:
    """Draws of the step time (s) from calibration entries and what they leave out (eq. U2)."""
    seconds = np.full(samples, time_s)
    for effect in effects:
        seconds += effect.draw_s(samples, seed)
    return bounded(seconds, left_out, time_s, seed)


def bounded(seconds: FloatArray, left_out: float, time_s: float, seed: int) -> FloatArray:
    """With the factor for what is left out; far tails must not make a step instant or negative."""
    changed = seconds * (1.0 + drawn_changes(model_error(left_out), len(seconds), seed))
    return np.asarray(np.maximum(changed, 0.1 * time_s))
