"""Rates the evidence behind a prediction on a machine and lists the figures that nobody published."""

from __future__ import annotations

from typing import Literal

from moesim.hwmodels.accelerator import Accelerator
from moesim.hwmodels.calibration import (
    GENERIC_PROFILE,
    CalibrationProfile,
    GemmTable,
    Prior,
    accelerators_of,
    list_profiles,
    load_profile,
)
from moesim.hwmodels.cluster import Cluster

Confidence = Literal["measured", "published", "peak-only"]

LEVELS: tuple[Confidence, ...] = ("measured", "published", "peak-only")
"""Levels of confidence, best first."""

GENERIC = GENERIC_PROFILE
"""The profile that prices any accelerator from its data file."""


def confidence(cluster: Cluster, profile: CalibrationProfile, dtype: str = "bf16") -> Confidence:
    """Evidence behind the GEMM rates of a format; GEMMs are most of a step's compute (docs/profiles.md).

    `measured` means that the first rate table of every class was measured on this accelerator. `published`
    means rates by shape that others stated, that were derived, or that were measured on a sibling, or else
    the best rate that somebody measured on this accelerator. `peak-only` means the datasheet peak times a
    stated efficiency prior.
    """
    return _confidence(cluster.accelerator, profile, dtype)


def _confidence(accelerator: Accelerator, profile: CalibrationProfile, dtype: str) -> Confidence:
    tables = rate_tables(profile, dtype)
    if tables:
        devices = [table.conditions.device for table in tables]  # as far as the conditions state it
        here = all(d is None or accelerator.name.split("-")[0] in d.lower() for d in devices)
        ours = profile.accelerator == accelerator.name and all(table.kind == "measured" for table in tables)
        return "measured" if ours and here else "published"
    prior = efficiency_prior(accelerator, profile, dtype)
    return "published" if prior is not None and prior.of == "gemm_achievable" else "peak-only"


def rate_tables(profile: CalibrationProfile, dtype: str) -> tuple[GemmTable, ...]:
    """The tables that price GEMMs of a format, first of every class; empty where class "gemm" has none."""
    first: dict[str, GemmTable] = {}
    for table in profile.gemm_tables:
        if table.dtype == dtype:
            first.setdefault(table.cls, table)
    return tuple(first.values()) if "gemm" in first else ()


def efficiency_prior(
    accelerator: Accelerator, profile: CalibrationProfile, dtype: str = "bf16"
) -> Prior | None:
    """The prior that prices dense GEMMs of a format where a profile has no rate table for it."""
    for of in ("gemm_achievable", "tensor_peak"):
        for prior in profile.priors:
            fits = prior.of == of and "gemm" in prior.used_for and prior.dtype in (None, dtype)
            if fits and (of == "tensor_peak" or dtype in accelerator.gemm_achievable):
                return prior
    return None


def confidence_statement(cluster: Cluster, profile: CalibrationProfile, dtype: str = "bf16") -> str:
    """One line for the result with the confidence, and the efficiency prior with its range and source."""
    level, chip = confidence(cluster, profile, dtype), cluster.accelerator
    if rate_tables(profile, dtype):
        return f"{level}: {dtype} products from the rate tables of profile {profile.name}"
    prior = efficiency_prior(chip, profile, dtype)
    if prior is None:
        return f"{level}: profile {profile.name} has no rate of {dtype} products"
    of = "datasheet peak" if prior.of == "tensor_peak" else "best measured product"
    return (
        f"{level}, efficiency prior {prior.fraction:g} ({prior.low:g} to {prior.high:g}) of the {dtype} {of} "
        f"of {chip.name} ({prior.id}: {prior.source})"
    )


def peak_only_note(cluster: Cluster, profile: CalibrationProfile, dtype: str = "bf16") -> tuple[str, ...]:
    """The confidence statement as a note, where GEMMs are priced without a table of rates by shape."""
    return () if rate_tables(profile, dtype) else (confidence_statement(cluster, profile, dtype),)


def missing_figures(accelerator: Accelerator) -> tuple[str, ...]:
    """Field names of unpublished figures that predicting a step, its energy or a comparison needs."""
    needed = ["scale_up_bandwidth", "tdp", "clock", "l2"]
    if accelerator.communication_engine is None:
        needed.insert(0, "compute_units")
    missing = [name for name in needed if getattr(accelerator, name) is None]
    return tuple(["peak.bf16"] if "bf16" not in accelerator.peak else []) + tuple(missing)


def compute_units_text(accelerator: Accelerator) -> str:
    """Number of compute units in the vendor's own word; "?" stands for a number that nobody published."""
    count = accelerator.compute_units
    return f"? {accelerator.unit_name}s" if count is None else f"{count.n} {accelerator.unit_name}s"


def best_profile(accelerator: Accelerator, *dtypes: str) -> tuple[Confidence, str]:
    """The best confidence that a shipped profile gives an accelerator, and that profile's name.

    Considers those of `dtypes` (BF16 and FP8 by default) that the accelerator has. Among equals the profile
    with the most entries wins; `generic-roofline` is the answer where none has rates for this accelerator.
    """
    wanted = [dtype for dtype in dtypes or ("bf16", "fp8") if dtype in accelerator.peak] or ["bf16"]
    generic = load_profile(GENERIC)
    candidates = [(LEVELS.index(_confidence(accelerator, generic, dtype)), 1, GENERIC) for dtype in wanted]
    for name in list_profiles():
        if accelerator.name in accelerators_of(name):
            profile = load_profile(name)
            size = sum(1 for _ in profile.entries())
            candidates += [
                (LEVELS.index(_confidence(accelerator, profile, dtype)), -size, name)
                for dtype in wanted
                if rate_tables(profile, dtype)
            ]
    variants = {  # a profile that includes another candidate is a variant of it; users choose it by name
        name
        for *_, name in candidates
        if set(load_profile(name).include) & {other for *_, other in candidates} - {GENERIC}
    }
    level, _, name = min(entry for entry in candidates if entry[2] not in variants)
    return LEVELS[level], name
