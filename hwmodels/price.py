"""What machines cost: dated rental offers, purchase, electricity, switches and cables."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from moesim.hwmodels import ranges
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.frozen import Frozen
from moesim.hwmodels.provenance import (
    UNDATED,
    DateText,
    SourcedFraction,
    SourcedKgPerKwh,
    SourcedSeconds,
    SourcedUsd,
    SourcedUsdPerHour,
    SourcedUsdPerKwh,
    SourcedUsdPerWatt,
    SourcedUsdPerWattYear,
    sourced_numbers,
)
from moesim.hwmodels.validation import nearest
from moesim.hwmodels.yaml_io import by_name, load_described, shipped_names

# -- rent ------------------------------------------------------------------------------------------

PRICES = "prices"

Term = Literal["on-demand", "spot", "reserved", "capacity-block", "assumed", "not stated"]
"""How the accelerator is rented; `reserved` is for about a year, and nobody offers an `assumed` price."""


class Offer(SourcedUsdPerHour):
    """One price per GPU and hour with its quoted terms; a price without a date is refused."""

    terms: str = "not stated"
    term: Term = "not stated"
    region: str = "not stated"

    @field_validator("date")
    @classmethod
    def _dated(cls, date: str) -> str:
        if date == UNDATED:
            raise ValueError("a price needs the date that it was quoted on, for example 2026-05")
        return date


class RentChoice(Frozen):
    """Selects a shipped offer: the latest that fits and, among those of one date, the cheapest."""

    term: Term
    region: str | None = None
    until: DateText | None = None
    """Latest date of the quotation (YYYY, YYYY-MM or YYYY-MM-DD)."""


class PriceList(Frozen):
    """Rental offers of one accelerator (`data/prices/<accelerator>.yaml`), cheapest first."""

    accelerator: str
    offers: tuple[Offer, ...] = Field(min_length=1)

    def choose(self, choice: RentChoice) -> Offer:
        """The offer that fits a choice; raises InputError, which lists all offers, where none does."""
        fitting = [
            offer
            for offer in self.offers
            if offer.term == choice.term
            and (choice.region is None or offer.region.lower() == choice.region.lower())
            and (choice.until is None or offer.date[: len(choice.until)] <= choice.until[: len(offer.date)])
        ]
        if not fitting:
            wanted = ", ".join(f"{k}={v}" for k, v in choice.model_dump(exclude_none=True).items())
            regions = sorted({offer.region for offer in self.offers})
            hint = nearest(choice.region, regions) if choice.region else ""
            there = "; ".join(f"{o.term}, {o.region}, {o.date}: {o.text}" for o in self.offers)
            raise InputError(
                f"no offer for {self.accelerator} with {wanted}{hint}; the price list has {there}. "
                "Or state a price of your own with its date (run.price.offer)"
            )
        latest = max(offer.date for offer in fitting)
        return min((o for o in fitting if o.date == latest), key=lambda offer: offer.value)


def list_prices() -> tuple[str, ...]:
    """Accelerators with a shipped price list."""
    return shipped_names(PRICES)


def load_prices(accelerator: str, base: Path | None = None) -> PriceList:
    """The price list of an accelerator or a file; raises InputError where there is none."""
    return load_described(PriceList, PRICES, accelerator, "price list", base)


# -- purchase --------------------------------------------------------------------------------------

PURCHASES = "purchases"


class Purchase(Frozen):
    """Data of one way to buy (`data/purchases/*.yaml`); every price needs its date.

    Hardware is written off in equal parts over `amortisation` and the building over
    `building_amortisation`; both are divided by `utilisation`.
    """

    name: str = "custom"
    title: str = "stated purchase"
    accelerators: tuple[str, ...] = ()
    """Accelerators that it buys; empty for whichever the cluster has."""
    system_per_gpu: SourcedUsd
    """GPU with its share of server, NICs and whatever `title` says is in the price."""
    network_per_gpu: SourcedUsd | None = None
    """Switches and cables, where `system_per_gpu` does not include them."""
    storage: SourcedUsd | None = None
    """The whole storage system."""
    amortisation: Annotated[SourcedSeconds, ranges.LIFETIME]
    building: SourcedUsdPerWatt | None = None
    """Shell, cooling and power distribution per W of IT load."""
    building_amortisation: Annotated[SourcedSeconds, ranges.LIFETIME] | None = None
    upkeep: SourcedUsdPerWattYear | None = None
    """Staff, maintenance, taxes per W of IT load and year, without electricity."""
    utilisation: Annotated[SourcedFraction, ranges.USE]
    """Share of calendar time in which the cluster does paid work."""
    note: str | None = None

    @model_validator(mode="after")
    def _complete(self) -> Purchase:
        undated = [path for path, number in sourced_numbers(self) if number.date == UNDATED]
        if undated:
            raise ValueError(
                f"{', '.join(undated)}: a price needs provenance with its date, for example "
                '{value: "$30000", kind: assumed, source: "a quote", date: 2026-05}'
            )
        if (self.building is None) != (self.building_amortisation is None):
            raise ValueError("building and building_amortisation belong together: give both or none")
        return self


def list_purchases(accelerator: str | None = None) -> tuple[str, ...]:
    """Names of the shipped purchases: all, or those that buy an accelerator."""
    names = shipped_names(PURCHASES)
    if accelerator is None:
        return names
    return tuple(name for name in names if accelerator in load_purchase(name).accelerators)


def load_purchase(name: str, base: Path | None = None) -> Purchase:
    """The purchase of a shipped name or a file path; raises InputError for an unknown or malformed one."""
    return load_described(Purchase, PURCHASES, name, "purchase", base)


PurchaseRef = Annotated[Purchase, by_name(Purchase, load_purchase)]
"""A field that takes a purchase's name, path or full description."""


# -- electricity -----------------------------------------------------------------------------------

ENERGY = "energy"


class EnergySite(Frozen):
    """Data of one place (`data/energy/*.yaml`): price per kWh, facility overhead (PUE), grid carbon."""

    name: str
    title: str
    electricity_price: SourcedUsdPerKwh
    pue: Annotated[SourcedFraction, ranges.POWER_USAGE]
    carbon_intensity: SourcedKgPerKwh


def list_energy_sites() -> tuple[str, ...]:
    """Names of the shipped sites."""
    return shipped_names(ENERGY)


def load_energy_site(name: str, base: Path | None = None) -> EnergySite:
    """The site of a shipped name or a file path; raises InputError for an unknown or malformed one."""
    return load_described(EnergySite, ENERGY, name, "energy site", base)


EnergySiteRef = Annotated[EnergySite, by_name(EnergySite, load_energy_site)]
"""A field that takes a site's name, path or full description."""


# -- switches and cables ---------------------------------------------------------------------------

FABRIC_PRICES = "fabric_prices"


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
    return load_described(FabricPrices, FABRIC_PRICES, name, "price list of a network", base)
