"""Durations of phases by compiled code; they equal those that `task_durations` computes with NumPy."""

from __future__ import annotations

import numpy as np

from moesim.hwmodels.arrays import FloatArray, IntArray
from moesim.simulator.engine.compiled.addresses import address_of
from moesim.simulator.engine.compiled.native import native
from moesim.simulator.engine.durations import SingleArray


class CompiledPhases:
    """Durations of phases by compiled code."""

    def phase_rows(
        self,
        fixed_s: float,
        row_s: float,
        load: FloatArray | None,
        factor: FloatArray | None,
        shape: tuple[int, int],
    ) -> tuple[IntArray, IntArray, IntArray] | None:
        """Nanoseconds [micro-batches, members] of a phase, and their largest and sum by micro-batch.

        `load`, `factor`: contiguous arrays of that shape, or None for 1. None where some duration is no usual
        one, which NumPy's way then checks.
        """
        rows = np.empty(shape, np.int64)
        slowest, total = np.empty(shape[0], np.int64), np.empty(shape[0], np.int64)
        sizes = np.array(shape, dtype=np.int64)
        usual = native().fill_rows(
            fixed_s,
            row_s,
            0 if load is None else address_of(load),
            0 if factor is None else address_of(factor),
            *[address_of(array) for array in (sizes, rows, slowest, total)],
        )
        return (rows, slowest, total) if usual else None

    def noisy_clock(self, cv: float, draws: SingleArray, clock: FloatArray) -> FloatArray:
        """Clock times run-to-run noise [micro-batches, members], from contiguous arrays of that shape."""
        factors, sizes = np.empty(draws.shape), np.array(draws.shape, dtype=np.int64)
        native().fill_noise(cv, *[address_of(array) for array in (draws, clock, sizes, factors)])
        return factors
