"""The bill of a run: dollars, kWh and CO2 of an hour on a cluster, and of the whole run (pure)."""

from __future__ import annotations

import datetime
from pathlib import Path

from msgspec import Struct

from moesim.hwmodels.cluster import Cluster
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.frozen import Frozen
from moesim.hwmodels.price import EnergySite, Purchase, RentPrice, load_hourly, load_prices
from moesim.hwmodels.provenance import UNDATED, SourcedFraction
from moesim.hwmodels.units import SECONDS_PER_DAY, SECONDS_PER_HOUR
from moesim.simulator.scenario.run_plan import Price

HOURS_PER_DAY = SECONDS_PER_DAY / SECONDS_PER_HOUR


class RunSpread(Frozen):
    """A figure as predicted, with the 10 %, 50 % and 90 % points of its distribution.

    `predicted`: the mean over random interruptions with every input at its stated value; the tables of
    GPU-hours and the parts of the bill add up to it. The percentiles are over the replicas, which vary in
    their interruptions and, where it is uncertain, in the step time.
    """

    predicted: float
    p10: float
    p50: float
    p90: float


def per_hour(days: RunSpread, rate: float | None) -> RunSpread | None:
    """Hours of the run times a rate, for the mean and all percentiles; None without a rate."""
    if rate is None:
        return None
    return RunSpread(**{name: value * HOURS_PER_DAY * rate for name, value in days.model_dump().items()})


SECONDS_PER_YEAR = 31_557_600.0
"""Seconds of a year of 365.25 days."""


class Rates(Struct, frozen=True):
    """Cost and energy of one hour of the whole cluster, including spares.

    `usd_per_hour` by part: rent, or hardware, building, upkeep and electricity; None where no price is known.
    """

    gpus: int
    usd_per_hour: dict[str, float] | None
    kwh_per_hour: float | None
    kg_co2_per_hour: float | None
    electricity_usd_per_hour: float | None
    """Electricity, which `usd_per_hour` contains for a purchase and a rent includes in its price."""
    described: str
    notes: tuple[str, ...]
    committed_hours: float = 0.0
    """Hours that are paid for whatever the run takes."""

    def usd_of_run(self, hours: float) -> float | None:
        """Dollars of a run of `hours` hours, with what is reserved beyond it; None without a price."""
        return self.usd(max(hours, self.committed_hours))

    def parts_of_run(self, hours: float) -> dict[str, float]:
        """Dollars of a run by part; idle reservation is its own."""
        parts = {name: rate * hours for name, rate in (self.usd_per_hour or {}).items()}
        idle = self.usd(max(0.0, self.committed_hours - hours))
        return parts | ({"reserved but idle": idle} if idle and self.committed_hours else {})

    def of_run(self, days: RunSpread) -> RunSpread | None:
        """Dollars of the run, for the mean and all percentiles; None without a price."""
        if self.usd_per_hour is None:
            return None
        each = {name: self.usd_of_run(value * HOURS_PER_DAY) for name, value in days.model_dump().items()}
        return RunSpread(**each)

    def usd(self, hours: float) -> float | None:
        """Dollars of `hours` hours; None where no price is known."""
        return None if self.usd_per_hour is None else hours * sum(self.usd_per_hour.values())


class Drawn(Struct, frozen=True):
    """What a run draws: mean W of a GPU with its share of the node over all billed hours, and when it runs.

    `mean_w_per_gpu`: None takes the node's power under load all the time. `hours`: of the run; hourly prices
    need them and `start`.
    """

    mean_w_per_gpu: float | None = None
    hours: float | None = None
    start: datetime.date | None = None


def site_of_run(cluster: Cluster, drawn: Drawn) -> tuple[EnergySite | None, tuple[str, ...]]:
    """The energy site with the mean price and carbon of the run's own hours, and what to say about it.

    Raises InputError where hourly figures do not cover the run, and where the run has no start.
    """
    site = cluster.energy
    if site is None or site.hourly is None or drawn.hours is None:
        return site, ()
    if drawn.start is None:
        raise InputError(
            f"cluster.energy.hourly={site.hourly}: hourly prices need the date of the start; set run.start, "
            "for example run.start=2026-12-01",
            key="run.start",
        )
    hourly = load_hourly(Path(site.hourly), site.time_zone)
    midnight = datetime.datetime.combine(drawn.start, datetime.time(), datetime.UTC)
    usd, kg = hourly.mean(midnight, drawn.hours)
    if usd < 0.0:
        raise InputError(
            f"cluster.energy.hourly={site.hourly}: the mean price of the run is ${usd:g}/kWh, below 0"
        )
    changed = {
        key: figure.model_copy(update={"value": value, "kind": "derived", "source": f"mean of {site.hourly}"})
        for key, figure, value in (
            ("electricity_price", site.electricity_price, usd),
            ("carbon_intensity", site.carbon_intensity, kg),
        )
    }
    note = (
        f"energy by the hour from {site.hourly}, from {drawn.start} 00:00 UTC: ${usd:.4f}/kWh and {kg:.3f} "
        "kg/kWh on average over the predicted run, which is taken to draw the same power in every hour"
    )
    return site.model_copy(update=changed), (note,)


NO_DRAW = Drawn()


def rates(cluster: Cluster, price: Price | None, spare_nodes: int, drawn: Drawn = NO_DRAW) -> Rates:
    """Cost and energy of an hour of a cluster (eqs. J7 and J8).

    Electricity is what the run draws on average; the building and hosting of a purchase are for the power
    under load. Raises InputError where no offer matches a choice, and where the cluster of a purchase names
    no energy site.
    """
    nodes = cluster.nodes + spare_nodes
    gpus = nodes * cluster.node.n_gpus
    site, said = site_of_run(cluster, drawn)
    power_w = gpus * cluster.node.power_w_per_gpu
    mean_w = power_w if drawn.mean_w_per_gpu is None else gpus * drawn.mean_w_per_gpu
    kwh = None if site is None else mean_w / 1000.0 * site.pue.value
    electricity = None if site is None or kwh is None else kwh * site.electricity_price.value
    notes = (
        list(said) if site is not None else [f"cluster {cluster.name!r} names no energy site: no kWh, no CO2"]
    )
    parts: dict[str, float] | None
    if price is not None and price.buy is not None:
        if site is None:
            raise InputError(
                f"run.price.buy needs the electricity of the site, and cluster {cluster.name!r} names none; "
                "set cluster.energy, for example cluster.energy=usa"
            )
        parts = purchase_usd_per_hour(price.buy, gpus, power_w, site, mean_w, price.discount)
        described = f"purchase: {price.buy.title}"
        if price.discount is not None:
            described += f", {price.discount.text} off the hardware"
        chip, buys = cluster.accelerator.name, price.buy.accelerators
        if buys and chip not in buys:
            notes.append(f"{price.buy.title} hold {', '.join(buys)}, and cluster {cluster.name!r} has {chip}")
    else:
        rent, described = _rent(cluster, price)
        off = 0.0 if price is None or price.discount is None else price.discount.value
        parts = None if rent is None else {"rent": gpus * rent.value * (1.0 - off)}
        if rent is not None and rent.date == UNDATED:
            notes.append(f"the cluster's price of {rent.text} has no date ({rent.source})")
    return Rates(
        gpus=gpus,
        usd_per_hour=parts,
        kwh_per_hour=kwh,
        kg_co2_per_hour=None if site is None or kwh is None else kwh * site.carbon_intensity.value,
        electricity_usd_per_hour=electricity,
        described=described,
        notes=tuple(notes),
        committed_hours=0.0
        if price is None or price.commitment is None
        else price.commitment.value / SECONDS_PER_HOUR,
    )


def annuity(capital: float, residual: float, interest: float, life_s: float) -> float:
    """Dollars per second of equal payments that write capital off to its residual value (eq. J7)."""
    years = life_s / SECONDS_PER_YEAR
    if not interest:
        return (capital - residual) / life_s
    growth = float((1.0 + interest) ** years)
    return (capital - residual / growth) * interest / (1.0 - 1.0 / growth) / SECONDS_PER_YEAR


def purchase_usd_per_hour(
    buy: Purchase,
    gpus: int,
    power_w: float,
    site: EnergySite,
    mean_w: float | None = None,
    discount: SourcedFraction | None = None,
) -> dict[str, float]:
    """Dollars per hour of owned hardware, by part (eq. J7); `mean_w`: drawn on average, else `power_w`.

    With interest, capital is written off in equal payments, and what they hold beyond the straight line is
    the part `interest`.
    """
    used_hours_per_s = buy.utilisation.value / SECONDS_PER_HOUR
    interest = buy.interest.value if buy.interest else 0.0
    extra = 0.0

    def written_off(usd: float, life_s: float, kept: float = 0.0) -> float:
        nonlocal extra
        plain = (usd - kept) / (life_s * used_hours_per_s)
        extra += annuity(usd, kept, interest, life_s) / used_hours_per_s - plain
        return plain

    per_gpu = buy.system_per_gpu.value + (buy.network_per_gpu.value if buy.network_per_gpu else 0.0)
    hardware = gpus * per_gpu + (buy.storage.value if buy.storage else 0.0)
    hardware *= 1.0 - (discount.value if discount else 0.0)
    kept = hardware * (buy.residual.value if buy.residual else 0.0)
    parts = {"hardware": written_off(hardware, buy.amortisation.value, kept)}
    if buy.building is not None and buy.building_amortisation is not None:
        parts["building"] = written_off(power_w * buy.building.value, buy.building_amortisation.value)
    if buy.upkeep is not None:
        parts["upkeep"] = power_w * buy.upkeep.value / (SECONDS_PER_YEAR * used_hours_per_s)
    if buy.hosting is not None:
        parts["hosting"] = power_w * buy.hosting.value / (SECONDS_PER_YEAR * used_hours_per_s)
    if interest:
        parts["interest"] = extra
    parts["electricity"] = (
        (power_w if mean_w is None else mean_w) / 1000.0 * site.pue.value * site.electricity_price.value
    )
    return parts


def _rent(cluster: Cluster, price: Price | None) -> tuple[RentPrice | None, str]:
    if price is None:
        rent = cluster.price_per_gpu_hour
        if rent is None:
            return (
                None,
                f"no price: cluster {cluster.name!r} has no price_per_gpu_hour, and run.price is not set",
            )
        return rent, f"{rent.label}: rented at {rent.text} ({rent.date}, {rent.source})"
    if price.offer is None and price.rent is None:
        rent, described = _rent(cluster, None)
        return rent, described if rent is None else f"{described}{_changes(price)}"
    offer = price.offer
    if price.rent is not None:
        offer = load_prices(cluster.accelerator.name).choose(price.rent)
    assert offer is not None
    return (
        offer,
        f"{offer.label}: rented at {offer.text} ({offer.date}, {offer.terms}, region {offer.region}, "
        f"{offer.source}){_changes(price)}",
    )


def _changes(price: Price) -> str:
    """Discount and commitment in words."""
    said = [] if price.discount is None else [f"{price.discount.text} off"]
    said += [] if price.commitment is None else [f"{price.commitment.text} paid for whatever the run takes"]
    return f", {', '.join(said)}" if said else ""


class BoardPower(Struct, frozen=True):
    """W of a GPU with its share of the node, while it trains and while it waits."""

    training_w: float
    waiting_w: float


NO_RATES = Rates(0, None, None, None, None, "", ())
