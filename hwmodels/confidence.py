"""How far a prediction on a machine can be trusted: what its compute rates stand on, and what is missing."""

from __future__ import annotations

from typing import Literal

from moesim.hwmodels.accelerator import Accelerator
from moesim.hwmodels.calibration import (
    CalibrationProfile,
    GemmTable,
    Prior,
    list_profiles,
    load_profile,
)
from moesim.hwmodels.cluster import Cluster

Confidence = Literal["measured", "published", "peak-only"]

LEVELS: tuple[Confidence, ...] = ("measured", "published", "peak-only")
"""Best first."""

GENERIC = "generic-roofline"
"""The profile that prices any accelerator from its data file."""


def confidence(cluster: Cluster, profile: CalibrationProfile) -> Confidence:
    """What the matrix products, the larger part of a step's compute, stand on (docs/profiles.md).

    `measured`: every format's first rate table was measured on this accelerator. `published`: rates by
    shape that were stated by others, derived, or measured on a sibling; or the best rate that somebody
    measured on this accelerator. `peak-only`: datasheet peaks times a stated efficiency prior.
    """
    return _confidence(cluster.accelerator, profile)


def _confidence(accelerator: Accelerator, profile: CalibrationProfile) -> Confidence:
    first: dict[tuple[str, str], GemmTable] = {}
    for table in profile.gemm_tables:
        first.setdefault((table.cls, table.dtype), table)
    if first:
        own = accelerator.name == profile.accelerator
        measured = own and all(table.kind == "measured" for table in first.values())
        return "measured" if measured else "published"
    prior = efficiency_prior(accelerator, profile)
    return "published" if prior is not None and prior.of == "gemm_achievable" else "peak-only"


def efficiency_prior(accelerator: Accelerator, profile: CalibrationProfile) -> Prior | None:
    """The prior that prices dense BF16 products where a profile has no rate table for them."""
    for prior in profile.priors:
        fits = "gemm" in prior.used_for and prior.dtype in (None, "bf16")
        known = prior.of == "tensor_peak" or (prior.of == "gemm_achievable" and accelerator.gemm_achievable)
        if fits and known:
            return prior
    return None


def statement(cluster: Cluster, profile: CalibrationProfile) -> str:
    """One line for the result: the confidence, and the efficiency prior with its range and source."""
    level = confidence(cluster, profile)
    if profile.gemm_tables:
        return f"{level}: matrix products from the rate tables of profile {profile.name}"
    prior = efficiency_prior(cluster.accelerator, profile)
    if prior is None:
        return f"{level}: profile {profile.name} has no rate of matrix products"
    of = "the datasheet peak" if prior.of == "tensor_peak" else "the best product measured on it"
    return (
        f"{level}, efficiency prior {prior.fraction:g} ({prior.low:g} to {prior.high:g}) of {of} of "
        f"{cluster.accelerator.name} ({prior.id}: {prior.source})"
    )


def peak_only_note(cluster: Cluster, profile: CalibrationProfile) -> tuple[str, ...]:
    """The statement as an extrapolation, where products are priced without a table of rates by shape."""
    return () if profile.gemm_tables else (statement(cluster, profile),)


def missing_figures(accelerator: Accelerator) -> tuple[str, ...]:
    """Figures that nobody published and that a step, its energy or a comparison needs, by field name."""
    needed = ["scale_up_bandwidth", "tdp", "clock", "l2"]
    if accelerator.communication_engine is None:
        needed.insert(0, "compute_units")
    missing = [name for name in needed if getattr(accelerator, name) is None]
    return tuple(["peak.bf16"] if "bf16" not in accelerator.peak else []) + tuple(missing)


def units(accelerator: Accelerator) -> str:
    """The compute units by the vendor's own word, or that nobody published their number."""
    count = accelerator.compute_units
    return f"? {accelerator.unit_name}s" if count is None else f"{count.n} {accelerator.unit_name}s"


def best_profile(accelerator: Accelerator) -> tuple[Confidence, str]:
    """The best confidence that a shipped profile gives an accelerator, and that profile's name.

    Of equals the one with the most entries; `generic-roofline` where none is for this accelerator.
    """
    found = [(LEVELS.index(_confidence(accelerator, load_profile(GENERIC))), 0, GENERIC)]
    for name in list_profiles():
        profile = load_profile(name)
        if accelerator.name in (profile.accelerator, *profile.also_for) and profile.gemm_tables:
            size = sum(1 for _ in profile.entries())
            found.append((LEVELS.index(_confidence(accelerator, profile)), -size, name))
    level, _, name = min(found)
    return LEVELS[level], name
