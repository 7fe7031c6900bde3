"""What machines cost: dated rental offers, purchase, electricity, switches and cables."""

from __future__ import annotations

import csv
import datetime
import io
import math
import zoneinfo
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from msgspec import Struct
from pydantic import Field, field_validator, model_validator

from moesim.hwmodels import ranges
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.files import read_text
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
from moesim.hwmodels.units import SECONDS_PER_HOUR
from moesim.hwmodels.validation import nearest
from moesim.hwmodels.yaml_io import by_name, load_described, shipped_names

# -- rent ------------------------------------------------------------------------------------------

PRICES = "prices"

Term = Literal["on-demand", "spot", "reserved", "capacity-block", "purchase", "assumed", "not stated"]
"""How the accelerator is rented; `reserved` is for about a year, and nobody offers an `assumed` price."""

TERM_WORDS: dict[Term, str] = {
    "on-demand": "on demand",
    "spot": "spot, may be taken away",
    "reserved": "reserved",
    "capacity-block": "capacity block",
    "purchase": "purchase",
    "assumed": "price assumed, no offer",
    "not stated": "terms not stated",
}
"""Terms for people; every price label has one."""


def term_words(term: Term, years: float | None = None) -> str:
    """The words of a term, with the length of a reservation where it is known."""
    if term != "reserved":
        return TERM_WORDS[term]
    if years is None:
        return "reserved, length not stated"
    return f"reserved for {years:g} year{'' if years == 1 else 's'}"


Years = Annotated[float, Field(gt=0, le=10)]


class RentPrice(SourcedUsdPerHour):
    """A price per GPU and hour with its term, which every label of it says."""

    term: Term = Field("not stated", exclude_if=lambda term: term == "not stated")
    years: Years | None = Field(None, exclude_if=lambda years: years is None)
    """Length of a reservation; absent: not stated."""

    @property
    def label(self) -> str:
        """The term in words."""
        return term_words(self.term, self.years)


def mixed_terms(terms: Mapping[str, str]) -> tuple[str, ...]:
    """A warning where prices side by side have different terms; `terms`: words by what is paid."""
    if len(set(terms.values())) < 2:
        return ()
    said = "; ".join(f"{name}: {term}" for name, term in terms.items())
    return (
        f"prices of different terms stand side by side ({said}): choose one term for all to compare them",
    )


class Offer(RentPrice):
    """One quoted price; one without a date is refused."""

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
    years: Years | None = None
    """Length of a reservation; absent: any."""
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
            and (choice.years is None or offer.years == choice.years)
            and (choice.region is None or offer.region.lower() == choice.region.lower())
            and (choice.until is None or offer.date[: len(choice.until)] <= choice.until[: len(offer.date)])
        ]
        if not fitting:
            wanted = ", ".join(f"{k}={v}" for k, v in choice.model_dump(exclude_none=True).items())
            regions = sorted({offer.region for offer in self.offers})
            hint = nearest(choice.region, regions) if choice.region else ""
            there = "; ".join(f"{o.label}, {o.region}, {o.date}: {o.text}" for o in self.offers)
            near = max(self.offers, key=lambda offer: (*_likeness(offer, choice), offer.date, -offer.value))
            raise InputError(
                f"no offer for {self.accelerator} with {wanted}{hint}; nearest that exists: {near.label} at "
                f"{near.text} ({near.date}, region {near.region}); the price list has {there}. "
                "Or state a price of your own with its date (run.price.offer)"
            )
        latest = max(offer.date for offer in fitting)
        return min((o for o in fitting if o.date == latest), key=lambda offer: offer.value)


def _likeness(offer: Offer, choice: RentChoice) -> tuple[float, ...]:
    """How much of a choice an offer meets: its term first, then a similar length, then its region."""
    length = 0.0 if choice.years is None else -abs((offer.years or 0.0) - choice.years)
    same_region = choice.region is not None and offer.region.lower() == choice.region.lower()
    return float(offer.term == choice.term), length, float(same_region)


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
    hosting: SourcedUsdPerWattYear | None = None
    """Colocation per W of IT load and year, in place of building and upkeep."""
    interest: Annotated[SourcedFraction, ranges.SHARE] | None = None
    """Yearly rate on the capital; written off in equal payments (an annuity)."""
    residual: Annotated[SourcedFraction, ranges.SHARE] | None = None
    """Share of the hardware's price that it sells for at the end of its amortisation."""
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
        if self.hosting is not None and (self.building is not None or self.upkeep is not None):
            raise ValueError("hosting is paid in place of building and upkeep: give one or the other")
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
    hourly: str | None = None
    """CSV of hourly prices and carbon (`HourlyEnergy`), which `run.start` places; absent: the same always."""
    time_zone: str | None = None
    """Zone of its times without an offset, such as Europe/Berlin; absent: every time needs its offset."""


def list_energy_sites() -> tuple[str, ...]:
    """Names of the shipped sites."""
    return shipped_names(ENERGY)


def load_energy_site(name: str, base: Path | None = None) -> EnergySite:
    """The site of a shipped name or a file path; raises InputError for an unknown or malformed one."""
    return load_described(EnergySite, ENERGY, name, "energy site", base)


EnergySiteRef = Annotated[EnergySite, by_name(EnergySite, load_energy_site)]
"""A field that takes a site's name, path or full description."""


MOST_HOURLY_BYTES = 20_000_000
HOURLY_COLUMNS = ("time", "usd_per_kwh", "kg_per_kwh")


class HourlyEnergy(Struct, frozen=True):
    """Price and carbon of electricity by hour, without holes: `usd_per_kwh[i]` from `start` + i hours on."""

    start: datetime.datetime
    usd_per_kwh: tuple[float, ...]
    kg_per_kwh: tuple[float, ...]

    def mean(self, begin: datetime.datetime, hours: float) -> tuple[float, float]:
        """Mean (price, carbon) of `hours` from a time on, parts of hours by their share.

        Raises InputError where the file does not cover them.
        """
        first = (begin - self.start).total_seconds() / SECONDS_PER_HOUR
        if first < 0.0 or first + hours > len(self.usd_per_kwh):
            end = self.start + datetime.timedelta(hours=len(self.usd_per_kwh))
            latest = end - datetime.timedelta(hours=hours)
            fits = (
                f"nearest start: {max(self.start, latest):%Y-%m-%d}"
                if latest >= self.start
                else (f"it holds {len(self.usd_per_kwh) / 24:,.1f} days, too few for any start")
            )
            raise InputError(
                f"the run needs energy from {begin:%Y-%m-%d %H:%M} for {hours / 24:,.1f} days, and the "
                f"hourly file covers {self.start:%Y-%m-%d %H:%M} to {end:%Y-%m-%d %H:%M} UTC; {fits}"
            )
        hour = np.arange(len(self.usd_per_kwh))
        share = np.clip(np.minimum(hour + 1, first + hours) - np.maximum(hour, first), 0.0, None)
        usd, kg = (
            math.fsum((share * np.array(values)).tolist()) / max(hours, 1e-300)
            for values in (self.usd_per_kwh, self.kg_per_kwh)
        )
        return usd, kg


def load_hourly(path: Path, time_zone: str | None) -> HourlyEnergy:
    """Hourly prices and carbon of a CSV with the columns `HOURLY_COLUMNS`.

    Times are ISO 8601, whole hours in order. Raises InputError, with the line, for holes and repeated hours,
    times without an offset where no zone is stated, times that a zone has twice or never, and figures that
    are no numbers. A price may be negative, as on markets; carbon may not.
    """
    zone = None if time_zone is None else _zone(time_zone)
    rows = csv.DictReader(io.StringIO(read_text(path, MOST_HOURLY_BYTES, "hourly energy")))
    missing = [name for name in HOURLY_COLUMNS if name not in (rows.fieldnames or ())]
    if missing:
        raise InputError(
            f"{path}: columns {', '.join(missing)} are missing; needed: {', '.join(HOURLY_COLUMNS)}"
        )
    start: datetime.datetime | None = None
    usd: list[float] = []
    kg: list[float] = []
    for number, row in enumerate(rows, start=2):
        place = f"{path}, line {number}"
        when = _utc(row["time"] or "", zone, place)
        start = start or when
        due = start + datetime.timedelta(hours=len(usd))
        if when != due:
            gap = (when - due).total_seconds() / SECONDS_PER_HOUR
            what = f"a hole of {gap:g} hours" if gap > 0 else "an hour that is repeated or out of order"
            raise InputError(
                f"{place}: {what}: {due:%Y-%m-%d %H:%M} UTC is due and {when:%Y-%m-%d %H:%M} stands there; "
                "fill the file by hand, since no value is made up"
            )
        usd.append(_figure(row["usd_per_kwh"], "usd_per_kwh", -10.0, place))
        kg.append(_figure(row["kg_per_kwh"], "kg_per_kwh", 0.0, place))
    if start is None:
        raise InputError(f"{path}: no hours; give one line for each hour of the run")
    return HourlyEnergy(start, tuple(usd), tuple(kg))


def _zone(name: str) -> zoneinfo.ZoneInfo:
    try:
        return zoneinfo.ZoneInfo(name)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        known = sorted(zoneinfo.available_timezones())
        raise InputError(
            f"time_zone={name!r} is unknown{nearest(name, known)}; such as Europe/Berlin"
        ) from None


def _utc(text: str, zone: zoneinfo.ZoneInfo | None, place: str) -> datetime.datetime:
    """The UTC time of an ISO text; InputError for one that is not one exact hour."""
    try:
        when = datetime.datetime.fromisoformat(text.strip())
    except ValueError:
        raise InputError(
            f"{place}: time={text!r} is no ISO 8601 time, such as 2026-12-01T00:00+00:00"
        ) from None
    if when.tzinfo is None:
        if zone is None:
            raise InputError(
                f"{place}: time={text!r} has no offset from UTC; write one, such as {text.strip()}+00:00, or "
                "state cluster.energy.time_zone"
            )
        early, late = (when.replace(tzinfo=zone, fold=fold) for fold in (0, 1))
        if early.utcoffset() != late.utcoffset():
            round_trip = early.astimezone(datetime.UTC).astimezone(zone).replace(tzinfo=None)
            twice = round_trip == when
            what = "occurs twice" if twice else "does not exist"
            raise InputError(
                f"{place}: {text.strip()} {what} in {zone.key}, whose clocks change then;"
                " write the hours of that day with their offset from UTC"
            )
        when = early
    return when.astimezone(datetime.UTC)


def _figure(text: str | None, name: str, least: float, place: str) -> float:
    try:
        value = float(text or "")
    except ValueError:
        value = math.nan
    if not least <= value <= 1e3:
        raise InputError(f"{place}: {name}={text!r} is outside {least:g} to 1000, plain numbers in $ and kg")
    return value


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
