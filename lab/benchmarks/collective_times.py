"""Medians and spread of repeated collectives: what benchmarks state of `moesim.kernels.timing`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moesim.hwmodels.errors import InputError
from moesim.kernels.launch import GpuGroup
from moesim.kernels.timing import time_group


@dataclass(frozen=True, slots=True)
class Summary:
    """Times of one repeated operation, in seconds."""

    median_s: float
    quartile_low_s: float
    quartile_high_s: float
    least_s: float
    repeats: int

    @property
    def iqr_s(self) -> float:
        """Inter-quartile range."""
        return self.quartile_high_s - self.quartile_low_s


def summarize(times_s: Sequence[float]) -> Summary:
    """Median, quartiles and minimum of one or more times."""
    if not times_s:
        raise InputError("no measurement was kept: nothing to summarize")
    low, high = np.percentile(times_s, [25, 75])
    return Summary(statistics.median(times_s), float(low), float(high), min(times_s), len(times_s))


def time_collective(group: GpuGroup, work: Callable[[int], None], **options: Any) -> Summary:
    """Summary of the slowest rank's times over the repeats."""
    return summarize([max(row) for row in time_group(group, work, **options)])
