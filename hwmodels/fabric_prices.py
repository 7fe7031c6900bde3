"""Prices of the switches and cables of a scale-out network."""

from __future__ import annotations

from pathlib import Path

from moesim.hwmodels.frozen import Frozen
from moesim.hwmodels.library import load_described
from moesim.hwmodels.provenance import SourcedUsd

FOLDER = "fabric_prices"


class FabricPrices(Frozen):
    """Prices of the parts of a scale-out network (`data/fabric_prices/*.yaml`)."""

    name: str = "custom"
    title: str = "custom prices"
    switch: SourcedUsd
    link: SourcedUsd
    """One cable with its transceivers or connectors at both ends."""
    note: str | None = None


def load_fabric_prices(name: str, base: Path | None = None) -> FabricPrices:
    """The price list of a shipped name or a file path; raises InputError for an unknown or malformed one."""
    return load_described(FabricPrices, FOLDER, name, "price list of a network", base)
