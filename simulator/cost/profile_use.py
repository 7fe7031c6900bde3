"""Figures of a profile for all collectives of a job: residuals, and shares of link rates."""

from __future__ import annotations

from moesim.hwmodels.calibration import CalibrationProfile
from moesim.hwmodels.confidence import GENERIC
from moesim.simulator.cost.price_evidence import NO_EVIDENCE, PriceEvidence
from moesim.simulator.layout.job import ResolvedJob


def collective_residual(profile: CalibrationProfile, prefix: str = "") -> float:
    """Relative uncertainty of the data-parallel collectives, the larger of those of their two curves."""
    curves = ("collective.scale_up_fraction", "collective.nic_fraction")
    return max(profile.curve(prefix + name).residual.relative for name in curves)


def link_share_evidence(job: ResolvedJob) -> PriceEvidence:
    """Evidence with a note where shares of link rates come from other hardware or are assumed."""
    accelerator, profile = job.cluster.accelerator, job.profile
    engine = accelerator.communication_engine
    if engine is not None:
        note = (
            f"{accelerator.name}: a dedicated engine ({engine.name}) moves collectives at assumed shares "
            "of the link rates (engine.* curves); no slow-down of or by compute beside it is priced"
        )
        return PriceEvidence.of([], [note])
    if profile.accelerator == "any" or GENERIC in profile.include:
        note = f"profile {profile.name}: communication shares of Hopper used for {accelerator.name}"
        return PriceEvidence.of([], [note])
    return NO_EVIDENCE
