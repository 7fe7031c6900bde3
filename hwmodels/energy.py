"""Price and carbon emissions of electricity at the site of a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from moesim.hwmodels import ranges
from moesim.hwmodels.frozen import Frozen
from moesim.hwmodels.library import by_name, load_described, shipped_names
from moesim.hwmodels.provenance import SourcedFraction, SourcedKgPerKwh, SourcedUsdPerKwh

FOLDER = "energy"


class EnergySite(Frozen):
    """Data of one place (`data/energy/*.yaml`): price per kWh, facility overhead (PUE), grid carbon."""

    name: str
    title: str
    electricity_price: SourcedUsdPerKwh
    pue: Annotated[SourcedFraction, ranges.POWER_USAGE]
    carbon_intensity: SourcedKgPerKwh


def list_energy_sites() -> tuple[str, ...]:
    """Names of the shipped sites."""
    return shipped_names(FOLDER)


def load_energy_site(name: str, base: Path | None = None) -> EnergySite:
    """The site of a shipped name or a file path; raises InputError for an unknown or malformed one."""
    return load_described(EnergySite, FOLDER, name, "energy site", base)


EnergySiteRef = Annotated[EnergySite, by_name(EnergySite, load_energy_site)]
"""A field that takes a site's name, path or full description."""
