"""What renting an accelerator costs: dated offers with their terms."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from moesim.hwmodels.library import load_described, shipped_names
from moesim.hwmodels.provenance import SourcedUsdPerHour

FOLDER = "prices"


class Offer(SourcedUsdPerHour):
    """One price per GPU and hour, with the terms it was quoted for."""

    terms: str
    region: str = "not stated"


class PriceList(BaseModel):
    """Rental offers of one accelerator (`data/prices/<accelerator>.yaml`), cheapest first."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    accelerator: str
    offers: tuple[Offer, ...] = Field(min_length=1)


def list_prices() -> tuple[str, ...]:
    """Accelerators with a shipped price list."""
    return shipped_names(FOLDER)


def load_prices(accelerator: str, base: Path | None = None) -> PriceList:
    """The price list of an accelerator or a file; raises InputError where there is none."""
    return load_described(PriceList, FOLDER, accelerator, "price list", base)
