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
    ) -> tuple[IntArray, IntArray, IntArray, FloatArray] | None:
        """Nanoseconds [micro-batches, members] of a phase, and their largest, sum and mean by micro-batch.

        `load`, `factor`: contiguous arrays of that shape, or None for 1. None where some duration is no usual
        one, which NumPy's way then checks.
        """
        microbatches, members = shape
        results = np.empty(microbatches * (members + 3), np.int64)
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
        figures = results[microbatches * members :].reshape(3, microbatches)
        return (
            results[: microbatches * members].reshape(shape),
            *(figures[0], figures[1], figures[2].view(np.float64)),
        )

    def payloads(
        self,
        nic_s: float,
        scale_up_s: float,
        loads: tuple[FloatArray, FloatArray] | None,
        shape: tuple[int, int],
    ) -> tuple[FloatArray, IntArray] | None:
        """Nanoseconds of a payload: the longest of each micro-batch, not rounded, and those of all members.

        `loads`: contiguous arrays of that shape, averaged over a node and by member, or None for 1. None
        where some duration is no usual one.
        """
        microbatches, members = shape
        results = np.empty(microbatches * (members + 1), np.int64)
        node_load, load = (0, 0) if loads is None else map(address_of, loads)
        out = address_of(results)
        if not native().fill_payloads(nic_s, scale_up_s, node_load, load, microbatches, members, out):
            return None
        rows = microbatches * members
        return results[rows:].view(np.float64), results[:rows].reshape(shape)

    def noisy_clock(self, cv: float, draws: SingleArray, clock: FloatArray) -> FloatArray:
        """Clock times run-to-run noise [micro-batches, members], from contiguous arrays of that shape."""
        factors = np.empty(draws.shape)
        native().fill_noise(cv, address_of(draws), address_of(clock), draws.size, address_of(factors))
        return factors
