from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from moesim.hwmodels.cluster import Cluster, load_cluster
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.price import HourlyEnergy, Purchase, load_hourly, load_purchase, mixed_terms
from moesim.hwmodels.provenance import SourcedSeconds
from moesim.hwmodels.validation import validate_model
from moesim.simulator.run.bill import purchase_usd_per_hour, rates
from moesim.simulator.scenario.run_plan import Price

OFFER: dict[str, Any] = {"value": "$2/h", "kind": "assumed", "source": "a quote", "date": "2026-05"}
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


# -- terms -------------------------------------------------------------------------------------------


def test_a_term_that_nobody_offers_names_the_nearest() -> None:
    cluster = load_cluster("h100-1024")
    with pytest.raises(InputError, match=r"nearest that exists: reserved for 1 year at \$2\.35/h"):
        rates(cluster, price(rent={"term": "reserved", "years": 3}), 0)
    with pytest.raises(InputError, match="nearest that exists: price assumed, no offer at"):
        rates(load_cluster("deepseek-h800-2048"), price(rent={"term": "assumed", "region": "mars"}), 0)


def test_every_label_says_its_term_and_mixed_terms_are_said() -> None:
    own = rates(load_cluster("h100-1024"), None, 0)
    assert own.described.startswith("reserved for 1 year: rented at $2.5/h")
    spot = rates(load_cluster("h100-1024"), price(rent={"term": "spot"}), 0)
    assert spot.described.startswith("spot, may be taken away: rented at $2.6/h")
    assert mixed_terms({"a": "on demand", "b": "on demand"}) == ()
    assert "a: on demand; b: purchase" in mixed_terms({"a": "on demand", "b": "purchase"})[0]


def test_discount_and_what_is_reserved_but_idle() -> None:
    cluster = load_cluster("h100-1024")
    bill = rates(cluster, price(discount="20%", commitment="100 days"), 0)
    hourly = 1024 * 2.5 * 0.8
    assert bill.usd(1.0) == pytest.approx(hourly)
    assert bill.usd_of_run(600.0) == pytest.approx(2400 * hourly)
    parts = bill.parts_of_run(600.0)
    assert parts == pytest.approx({"rent": 600 * hourly, "reserved but idle": 1800 * hourly})
    assert bill.parts_of_run(3000.0) == pytest.approx({"rent": 3000 * hourly})
    with pytest.raises(InputError, match="commitment is of a rent"):
        price(buy="h100-bought", commitment="1 year")


def test_interest_residual_and_hosting_by_hand() -> None:
    site = load_cluster("deepseek-h800-2048").energy
    assert site is not None
    plain = load_purchase("h800-bought").model_dump(mode="json", exclude_none=True)
    stated = {"kind": "assumed", "source": "a quote", "date": "2026-05"}
    hosting = {"hosting": stated | {"value": "$1.5M/MW/year"}}
    more = hosting | {"interest": stated | {"value": 0.08}, "residual": stated | {"value": 0.1}}
    kept = {k: v for k, v in plain.items() if k not in ("building", "building_amortisation", "upkeep")}
    buy = validate_model(Purchase, kept | more, "p.yaml")
    parts = purchase_usd_per_hour(buy, gpus=8, power_w=10_200.0, site=site)
    hours, capital = 8766.0 * 0.84, 8 * 38_750.0
    growth = 1.08**4
    yearly = (capital - 0.1 * capital / growth) * 0.08 / (1 - 1 / growth)
    assert parts["hardware"] == pytest.approx(0.9 * capital / (4 * hours))
    assert parts["hardware"] + parts["interest"] == pytest.approx(yearly / hours)
    assert parts["hosting"] == pytest.approx(10_200 * 1.5 / hours)
    with pytest.raises(InputError, match="hosting is paid in place of building and upkeep"):
        validate_model(Purchase, plain | hosting, "p.yaml")


@pytest.mark.parametrize("value", ["€2/h", "2 EUR/h"])
def test_other_currencies_are_refused_with_what_to_do(value: str) -> None:
    with pytest.raises(InputError, match="prices are in US dollars: convert other currencies"):
        price(offer=OFFER | {"value": value})


# -- energy by the hour -------------------------------------------------------------------------------


def hourly(folder: Path, times: Sequence[str], zone: str | None = None) -> HourlyEnergy:
    path = folder / "h.csv"
    rows = [f"{time},{0.05 + 0.01 * n:.2f},0.{n % 9 + 1}" for n, time in enumerate(times)]
    path.write_text("\n".join(["time,usd_per_kwh,kg_per_kwh", *rows]))
    return load_hourly(path, zone)


def hours_of(day: str, *hours: int) -> list[str]:
    return [f"{day}T{hour:02}:00" for hour in hours]


def test_hours_are_weighted_by_their_share(tmp_path: Path) -> None:
    found = hourly(tmp_path, [f"{time}+00:00" for time in hours_of("2026-10-05", 0, 1, 2)])
    usd, kg = found.mean(found.start + timedelta(minutes=30), 2.0)
    assert (usd, kg) == pytest.approx(((0.025 + 0.06 + 0.035) / 2, (0.05 + 0.2 + 0.15) / 2))
    with pytest.raises(InputError, match="nearest start: 2026-10-05"):
        found.mean(found.start + timedelta(hours=2), 2.0)
    with pytest.raises(InputError, match="too few for any start"):
        found.mean(found.start, 4.0)


@pytest.mark.parametrize(
    ("times", "zone", "words"),
    [
        (hours_of("2026-10-05", 0, 1), None, "has no offset from UTC"),
        (hours_of("2026-10-25", 1, 2), "Europe/Berlin", "line 3: 2026-10-25T02:00 occurs twice in Europe"),
        (hours_of("2026-03-29", 1, 2), "Europe/Berlin", "line 3: 2026-03-29T02:00 does not exist in Europe"),
        (hours_of("2026-10-05", 0, 3), "Europe/Berlin", "a hole of 2 hours"),
        (hours_of("2026-10-05", 1, 1), "Europe/Berlin", "repeated or out of order"),
        (hours_of("2026-10-05", 1), "Europe/Berln", r"unknown \(nearest: 'Europe/Berlin'\)"),
        (["yesterday"], None, "is no ISO 8601 time"),
        ([], None, "no hours"),
    ],
)
def test_holes_and_clock_changes_are_refused(
    tmp_path: Path, times: list[str], zone: str | None, words: str
) -> None:
    with pytest.raises(InputError, match=words):
        hourly(tmp_path, times, zone)


def test_a_day_of_23_hours_has_no_hole(tmp_path: Path) -> None:
    found = hourly(tmp_path, hours_of("2026-03-29", 0, 1, 3, 4), "Europe/Berlin")
    assert len(found.usd_per_kwh) == 4
