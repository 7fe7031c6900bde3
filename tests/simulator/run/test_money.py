from __future__ import annotations

import re
from typing import Any

import pytest

from moesim.hwmodels.cluster import Cluster, load_cluster
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.price import Purchase, load_purchase
from moesim.hwmodels.provenance import SourcedSeconds
from moesim.hwmodels.validation import validate_model
from moesim.simulator.run.report import purchase_usd_per_hour, rates
from moesim.simulator.scenario.run_plan import Price

SMALL: dict[str, Any] = {"node": "hgx-h100", "nodes": 4, "network": "mrft-ib-400g"}


def price(**keys: Any) -> Price:
    return validate_model(Price, keys, "s.yaml")


def test_rent_and_energy_of_the_home_case_by_hand() -> None:
    bill = rates(load_cluster("deepseek-h800-2048"), None, spare_nodes=0)
    assert bill.usd(1.0) == 2 * 2048
    kwh = 256 * 10.2 * 1.56
    assert bill.kwh_per_hour == pytest.approx(kwh)
    assert bill.kg_co2_per_hour == pytest.approx(kwh * 0.5823)
    assert bill.electricity_usd_per_hour == pytest.approx(kwh * 0.107)


def test_spares_are_paid_and_powered() -> None:
    plain, more = (rates(load_cluster("deepseek-h800-2048"), None, n) for n in (0, 64))
    assert more.usd(1.0) == pytest.approx(1.25 * (plain.usd(1.0) or 0.0))
    assert more.kwh_per_hour == pytest.approx(1.25 * (plain.kwh_per_hour or 0.0))
    assert more.gpus == 2560


def test_a_shipped_offer_by_term_region_and_date() -> None:
    cluster = load_cluster("h200-1024")
    europe = rates(cluster, price(rent={"term": "on-demand", "region": "europe-west"}), 0)
    assert europe.usd(1.0) == pytest.approx(1024 * 11.4934)
    early = rates(cluster, price(rent={"term": "on-demand", "until": "2026-06"}), 0)
    assert early.usd(1.0) == pytest.approx(1024 * 2.25)
    with pytest.raises(
        InputError, match=r"no offer for h200-sxm with term=on-demand, region=mars.*the price list has"
    ):
        rates(cluster, price(rent={"term": "on-demand", "region": "mars"}), 0)


def test_a_purchase_by_hand() -> None:
    site = load_cluster("deepseek-h800-2048").energy
    assert site is not None
    buy = load_purchase("h800-bought")
    parts = purchase_usd_per_hour(buy, gpus=8, power_w=10_200.0, site=site)
    hours = 8766.0 * 0.84
    assert parts["hardware"] == pytest.approx(8 * 38_750 / (4 * hours))
    assert parts["building"] == pytest.approx(10_200 * 11.3 / (15 * hours))
    assert parts["upkeep"] == pytest.approx(10_200 * 0.94 / hours)
    assert parts["electricity"] == pytest.approx(10.2 * 1.56 * 0.107)


def test_network_and_storage_are_written_off_too() -> None:
    site = load_cluster("deepseek-h800-2048").energy
    assert site is not None
    buy = load_purchase("gb200-nvl72-bought")
    with_network = purchase_usd_per_hour(buy, 72, 120e3, site)["hardware"]
    assert with_network == pytest.approx(72 * (43_056 + 4_390) / (4 * 8766 * 0.84))
    stored = buy.model_copy(update={"storage": buy.system_per_gpu, "network_per_gpu": None})
    assert purchase_usd_per_hour(stored, 72, 120e3, site)["hardware"] == pytest.approx(
        73 * 43_056 / (4 * 8766 * 0.84)
    )


def test_what_is_unknown_is_said() -> None:
    cluster = validate_model(Cluster, SMALL, "s.yaml")
    bill = rates(cluster, None, 0)
    assert bill.usd(1.0) is None and bill.kwh_per_hour is None
    assert "no price" in bill.described and "energy site" in bill.notes[0]
    with pytest.raises(InputError, match=r"cluster\.energy=usa"):
        rates(cluster, price(buy="h100-bought"), 0)
    undated = validate_model(Cluster, SMALL | {"price_per_gpu_hour": "$3/h", "energy": "usa"}, "s.yaml")
    assert rates(undated, None, 0).notes == ("the cluster's price of $3/h has no date (stated in s.yaml)",)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"utilisation": 0.0}, "utilisation: 0 is outside 0.01 to 1"),
        ({"utilisation": 1.2}, "utilisation: 1.2 is outside 0.01 to 1"),
        ({"amortisation": "0 s"}, "amortisation: 0 ns is outside 86400 s to"),
        ({"building_amortisation": None}, "belong together"),
        ({"system_per_gpu": "-$1"}, "system_per_gpu"),
    ],
)
def test_bad_purchases(change: dict[str, Any], words: str) -> None:
    data = load_purchase("h100-bought").model_dump(mode="json")
    for key, value in change.items():
        data[key] = value if value is None else {**data[key], "value": value}
    with pytest.raises(InputError, match=re.escape(words)):
        validate_model(Purchase, data, "p.yaml")


def test_a_year_is_a_unit_of_time() -> None:
    life = load_purchase("h100-bought").amortisation
    assert isinstance(life, SourcedSeconds) and life.value == 4 * 8766 * 3600
