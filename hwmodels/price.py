"""Rental prices of accelerators: dated offers that are chosen by term, region and date."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.frozen import Frozen
from moesim.hwmodels.library import load_described, shipped_names
from moesim.hwmodels.provenance import UNDATED, DateText, SourcedUsdPerHour
from moesim.hwmodels.validation import nearest

FOLDER = "prices"

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
    return shipped_names(FOLDER)


def load_prices(accelerator: str, base: Path | None = None) -> PriceList:
    """The price list of an accelerator or a file; raises InputError where there is none."""
    return load_described(PriceList, FOLDER, accelerator, "price list", base)
