"""What a profile says of a whole prediction: whose it is, its residuals, its law of communication (pure)."""

from __future__ import annotations

from moesim.hwmodels.calibration import CalibrationProfile, Law
from moesim.hwmodels.cluster import Cluster
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.fitting import fitting_profiles


def collective_residual(profile: CalibrationProfile, prefix: str = "") -> float:
    """Relative uncertainty of the data-parallel collectives: the larger of their two curves'."""
    curves = ("collective.scale_up_fraction", "collective.nic_fraction")
    return max(profile.curve(prefix + name).residual.relative for name in curves)


def communication_law(profile: CalibrationProfile) -> Law | None:
    """The law of communication kernels beside compute, where the profile has one."""
    return next((law for law in profile.laws if law.group == "communication"), None)


def check_profile(profile: CalibrationProfile, cluster: Cluster) -> None:
    """Raise InputError where a profile of one accelerator would price another."""
    accelerator = cluster.accelerator.name
    if profile.accelerator == "any" or accelerator in (profile.accelerator, *profile.also_for):
        return
    fitting = fitting_profiles(accelerator)
    raise InputError(
        f"profile={profile.name} was taken on {profile.accelerator}, but the cluster has {accelerator}; use "
        f"{' or '.join(fitting)} (the last one prices from datasheet peaks)",
        key="profile",
        nearest=fitting,
    )
