"""One way to pay for any cluster: its own price, a rent by term, or a purchase."""

from __future__ import annotations

from typing import Literal, get_args

from moesim.hwmodels.cluster import Cluster
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.price import RentChoice, Term, list_prices, list_purchases, load_prices, load_purchase
from moesim.hwmodels.provenance import SourcedUsdPerHour
from moesim.simulator.run.money import rates
from moesim.simulator.scenario import Scenario
from moesim.simulator.scenario.defaults import paid_share
from moesim.simulator.scenario.run_plan import Price

Payment = Literal["as stated", "on-demand", "reserved", "spot", "capacity-block", "purchase"]
PAYMENTS: tuple[Payment, ...] = get_args(Payment)
"""Ways to pay: each cluster's own price, one of the terms of rent, or buying the hardware."""


def price_under(cluster: Cluster, payment: Payment) -> SourcedUsdPerHour | None:
    """Price of one GPU for one hour, with its source; None where the cluster states no price of its own.

    A rent is the latest shipped offer of its term, the cheapest of one date, as in `run.price.rent`; GPUs of
    a node that are paid but not used are in it. A purchase is all that an hour of owned hardware costs,
    divided by the GPUs (docs/model.md, eq. J7). Raises InputError where nothing is known for a payment.
    """
    if payment == "as stated":
        return cluster.price_per_gpu_hour
    chip = cluster.accelerator.name
    if payment == "purchase":
        return _bought(cluster)
    known = {offer.term for offer in load_prices(chip).offers} if chip in list_prices() else set()
    term: Term = payment
    if term not in known:
        told = f"; offers: {', '.join(sorted(known))}" if known else ""
        raise InputError(f"no {payment} price of {chip} is known{told}")
    offer = load_prices(chip).choose(RentChoice(term=term))
    share = paid_share(cluster.node)
    if share == 1.0:
        return offer
    source = f"{offer.source}; times {share:g}: spare GPUs are paid"
    return offer.model_copy(update={"value": offer.value * share, "kind": "derived", "source": source})


def paid(scenario: Scenario, payment: Payment) -> Scenario:
    """The scenario with the price of a payment as its cluster's price; raises InputError as `price_under`."""
    if payment == "as stated":
        return scenario
    price = price_under(scenario.machine, payment)
    assert price is not None
    plain = SourcedUsdPerHour(**{name: getattr(price, name) for name in SourcedUsdPerHour.model_fields})
    cluster = scenario.machine.model_copy(update={"price_per_gpu_hour": plain})
    return scenario.model_copy(update={"cluster": cluster})


def _bought(cluster: Cluster) -> SourcedUsdPerHour:
    names = list_purchases(cluster.accelerator.name)
    if not names:
        raise InputError(f"no purchase of {cluster.accelerator.name} is known")
    buy = load_purchase(names[0])
    bill = rates(cluster, Price(buy=buy), 0)
    usd_per_hour = bill.usd(1.0)
    assert usd_per_hour is not None
    return SourcedUsdPerHour(
        value=usd_per_hour / bill.gpus,
        kind="derived",
        source=f"{bill.described}: hardware, building, upkeep and electricity for each hour of use",
        date=buy.system_per_gpu.date,
    )
