"""Finds the shipped calibration profiles that may price an accelerator."""

from __future__ import annotations

from functools import lru_cache

from moesim.hwmodels.calibration import PROFILE_DIRECTORY, list_profiles
from moesim.hwmodels.yaml_io import parse_mapping

GENERIC_PROFILE = "generic-roofline"
"""Prices any accelerator from its datasheet peaks."""


def fitting_profiles(accelerator: str) -> list[str]:
    """Names of the shipped profiles that may price an accelerator, the generic one last."""
    fitting = [name for name in list_profiles() if accelerator in accelerators_of(name)]
    return [*fitting, GENERIC_PROFILE]


@lru_cache(maxsize=256)
def accelerators_of(profile: str) -> tuple[str, ...]:
    """The accelerators that a shipped profile may price, read from the head of its file alone."""
    lines = (PROFILE_DIRECTORY / f"{profile}.yaml").read_text("utf-8").splitlines()
    head = "\n".join(line for line in lines if line.startswith(("accelerator:", "also_for:")))
    keys = parse_mapping(head, f"profile {profile}")
    return (keys["accelerator"], *keys.get("also_for", ()))
