"""Reads the slow-down of compute beside communication SMs from a profile's laws (eq. C8)."""

from __future__ import annotations

from typing import NamedTuple

from moesim.hwmodels.accelerator import Accelerator
from moesim.hwmodels.calibration import CalibrationProfile, Law
from moesim.hwmodels.calibration_entry import LawGroup
from moesim.hwmodels.errors import InputError

ASSUMED_RESIDUAL = 0.2
"""Relative error of the free-SM ratio where a profile has no law for a group."""


class SlowDown(NamedTuple):
    """Time over time alone on all SMs, with its evidence."""

    factor: float = 1.0
    residual: float = 0.0
    id: str = ""
    extrapolated: str = ""
    assumed: str = ""


NO_SLOW_DOWN = SlowDown()


class SmLaws:
    """The laws of one profile on one accelerator, with cached readings."""

    def __init__(self, accelerator: Accelerator, profile: CalibrationProfile) -> None:
        """Index the laws by group; the first one of a group wins."""
        self._accelerator, self._profile = accelerator, profile.name
        self._laws: dict[LawGroup, Law] = {}
        for law in profile.laws:
            self._laws.setdefault(law.group, law)
        self._readings: dict[tuple[LawGroup, int, bool], SlowDown] = {}

    def at(self, group: LawGroup, sms: int, overlapped: bool) -> SlowDown:
        """S(n) of a group while `sms` communication SMs are busy (`overlapped`) or reserved but idle.

        Idle SMs slow only SM-aware GEMMs, which leave them free, by the free-SM ratio. Raises InputError when
        no SM is left.
        """
        key = (group, sms, overlapped)
        reading = self._readings.get(key)
        if reading is None:
            reading = self._readings[key] = self._read(*key)
        return reading

    def _read(self, group: LawGroup, sms: int, overlapped: bool) -> SlowDown:
        law = self._laws.get(group)
        if sms == 0:  # no SM is shared, which also holds on an accelerator whose compute units are not known
            return SlowDown(1.0, 0.0, law.id if law else "")
        total = self._accelerator.n_sms
        if not 0 < sms < total:
            raise InputError(
                f"communication.sms={sms} is not between 0 and {total - 1}: "
                f"{self._accelerator.name} has {total} SMs and compute needs at least one"
            )
        free = total / (total - sms)
        if not overlapped:
            return SlowDown(free if group == "gemm_sm_aware" else 1.0, 0.0, law.id if law else "")
        if law is None:
            note = (
                f"no slow-down law for {group} in profile {self._profile}: free-SM ratio {free:.2f} assumed"
            )
            return SlowDown(free, ASSUMED_RESIDUAL, "", "", note)
        if law.form == "free_sms":
            return SlowDown(free, law.residual.relative, law.id)
        reading = law.curve.at(sms)
        # Beyond the measured counts the end value is held constant, but never below the free-SM ratio.
        least = free if group == "gemm_sm_aware" and reading.extrapolated else 1.0
        return SlowDown(max(reading.value, least), law.residual.relative, law.id, reading.note)
