"""What a profile says of a whole prediction: its residuals and its law of communication (pure)."""

from __future__ import annotations

from moesim.hwmodels.calibration import CalibrationProfile, Law


def collective_residual(profile: CalibrationProfile, prefix: str = "") -> float:
    """Relative uncertainty of the data-parallel collectives: the larger of their two curves'."""
    curves = ("collective.scale_up_fraction", "collective.nic_fraction")
    return max(profile.curve(prefix + name).residual.relative for name in curves)


def communication_law(profile: CalibrationProfile) -> Law | None:
    """The law of communication kernels beside compute, where the profile has one."""
    return next((law for law in profile.laws if law.group == "communication"), None)
