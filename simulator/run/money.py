"""Prices hours on a cluster in dollars, kWh and CO2 (pure)."""

from __future__ import annotations

from dataclasses import dataclass

from moesim.hwmodels.cluster import Cluster
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.price import EnergySite, Purchase, load_prices
from moesim.hwmodels.provenance import UNDATED, SourcedUsdPerHour
from moesim.hwmodels.units import SECONDS_PER_HOUR
from moesim.simulator.scenario.run_plan import Price

SECONDS_PER_YEAR = 31_557_600.0
"""Seconds of a year of 365.25 days."""


@dataclass(frozen=True, slots=True)
class Rates:
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

    def usd(self, hours: float) -> float | None:
        """Dollars of `hours` hours; None where no price is known."""
        return None if self.usd_per_hour is None else hours * sum(self.usd_per_hour.values())


def rates(cluster: Cluster, price: Price | None, spare_nodes: int) -> Rates:
    """Cost and energy of an hour of a cluster (eqs. J7 and J8).

    Electricity assumes that all nodes, including spares, always draw their power under load. Raises
    InputError where no offer matches a choice, and where the cluster of a purchase names no energy site.
    """
    nodes = cluster.nodes + spare_nodes
    gpus = nodes * cluster.node.n_gpus
    site = cluster.energy
    power_w = gpus * cluster.node.power_w_per_gpu
    kwh = None if site is None else power_w / 1000.0 * site.pue.value
    electricity = None if site is None or kwh is None else kwh * site.electricity_price.value
    notes = [] if site is not None else [f"cluster {cluster.name!r} names no energy site: no kWh, no CO2"]
    parts: dict[str, float] | None
    if price is not None and price.buy is not None:
        parts = purchase_usd_per_hour(price.buy, gpus, power_w, _known(site, cluster))
        described = f"bought: {price.buy.title}"
        chip, buys = cluster.accelerator.name, price.buy.accelerators
        if buys and chip not in buys:
            notes.append(f"{price.buy.title} hold {', '.join(buys)}, and cluster {cluster.name!r} has {chip}")
    else:
        rent, described = _rent(cluster, price)
        parts = None if rent is None else {"rent": gpus * rent.value}
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
    )


def purchase_usd_per_hour(buy: Purchase, gpus: int, power_w: float, site: EnergySite) -> dict[str, float]:
    """Dollars per hour of owned hardware, by part (eq. J7)."""
    used_hours_per_s = buy.utilisation.value / SECONDS_PER_HOUR

    def written_off(usd: float, life_s: float) -> float:
        return usd / (life_s * used_hours_per_s)

    per_gpu = buy.system_per_gpu.value + (buy.network_per_gpu.value if buy.network_per_gpu else 0.0)
    hardware = gpus * per_gpu + (buy.storage.value if buy.storage else 0.0)
    parts = {"hardware": written_off(hardware, buy.amortisation.value)}
    if buy.building is not None and buy.building_amortisation is not None:
        parts["building"] = written_off(power_w * buy.building.value, buy.building_amortisation.value)
    if buy.upkeep is not None:
        parts["upkeep"] = written_off(power_w * buy.upkeep.value, SECONDS_PER_YEAR)
    parts["electricity"] = power_w / 1000.0 * site.pue.value * site.electricity_price.value
    return parts


def _known(site: EnergySite | None, cluster: Cluster) -> EnergySite:
    if site is None:
        raise InputError(
            f"run.price.buy needs the electricity of the site, and cluster {cluster.name!r} names none; set "
            "cluster.energy, for example cluster.energy=usa"
        )
    return site


def _rent(cluster: Cluster, price: Price | None) -> tuple[SourcedUsdPerHour | None, str]:
    if price is None:
        rent = cluster.price_per_gpu_hour
        if rent is None:
            return (
                None,
                f"no price: cluster {cluster.name!r} has no price_per_gpu_hour, and run.price is not set",
            )
        return rent, f"rented at {rent.text} ({rent.date}, {rent.source})"
    offer = price.offer
    if price.rent is not None:
        offer = load_prices(cluster.accelerator.name).choose(price.rent)
    assert offer is not None
    return (
        offer,
        f"rented at {offer.text} ({offer.date}, {offer.terms}, region {offer.region}, {offer.source})",
    )
