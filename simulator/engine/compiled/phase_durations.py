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
        microbatches, members = shape
        results = np.empty(microbatches * (members + 2), np.int64)
        usual = native().fill_rows(
            fixed_s,
            row_s,
            0 if load is None else address_of(load),
            0 if factor is None else address_of(factor),
            microbatches,
            members,
            address_of(results),
        )
        if not usual:
            return None
        figures = results[microbatches * members :].reshape(2, microbatches)
        return results[: microbatches * members].reshape(shape), figures[0], figures[1]

    def noisy_clock(self, cv: float, draws: SingleArray, clock: FloatArray) -> FloatArray:
        """Clock times run-to-run noise [micro-batches, members], from contiguous arrays of that shape."""
        factors = np.empty(draws.shape)
        native().fill_noise(cv, address_of(draws), address_of(clock), draws.size, address_of(factors))
        return factors
