"""Prices, purchases, failure rates, restarts and storage as shipped, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from moesim.hwmodels import (
    InputError,
    list_failure_rates,
    list_prices,
    list_purchases,
    list_restarts,
    list_storage,
    load_failure_rate,
    load_prices,
    load_purchase,
    load_restart,
    load_storage,
    validate_model,
)
from moesim.hwmodels.price import PriceList, RentChoice

OFFER = {"value": "$2/h", "kind": "published", "source": "a page", "date": "2026-05", "term": "spot"}


def offers(*changes: dict[str, Any]) -> PriceList:
    return validate_model(PriceList, {"accelerator": "x", "offers": [OFFER | c for c in changes]}, "p.yaml")


def test_everything_shipped_loads() -> None:
    assert all(load_prices(name).offers for name in list_prices())
    assert all(load_purchase(name).system_per_gpu.value > 0 for name in list_purchases())
    assert all(load_restart(name).recovery_s(1, 8, 0.0, "requeued") > 0 for name in list_restarts())
    assert all(load_storage(name).write_bytes_per_s(1) > 0 for name in list_storage())
    assert all(load_failure_rate(name).counts for name in list_failure_rates())


def test_a_restart_by_parts_grows_with_the_job_and_leaves_out_what_is_there() -> None:
    """20 GB for each of 2,048 nodes at 100 GB/s, and 2.7 ms a GPU; hot spares need neither."""
    parts = load_restart("by-parts").parts
    assert parts is not None
    whole = parts.seconds(2048, 16384, 5.0, "requeued")
    assert (whole.image, whole.communicators, whole.load) == pytest.approx((409.6, 44.2368, 5.0))
    totals = [parts.seconds(2048, 16384, 5.0, how).total for how in ("requeued", "warm", "hot", "in place")]
    assert totals == sorted(totals, reverse=True) and totals[3] == pytest.approx(30 + 44.2368 + 5)
    assert parts.seconds(1, 8, 0.0, "requeued").image == 20.0  # one node's own rate


def test_llama3_table_5() -> None:
    rate = load_failure_rate("llama3-16k-h100")
    assert sum(c.count for c in rate.counts) == 419
    # 419 in 54 days, the published rate to its three digits.
    assert rate.mean_time_between_s(2048) == pytest.approx(54 * 86400 / 419, rel=1e-3)
    assert rate.mean_time_between_s(2048) / rate.mean_time_between_s(1024) == 0.5
    # The paper's 78 % of hardware: what takes a node, and the network, without host maintenance.
    hardware = sum(c.count for c in rate.counts if c.node or c.cause.startswith("network"))
    maintenance = next(c.count for c in rate.counts if c.cause == "host maintenance")
    assert (hardware - maintenance) / 419 == pytest.approx(0.78, abs=0.01)


def test_the_latest_fitting_offer_and_of_one_date_the_cheapest() -> None:
    listed = offers(
        {"value": "$1/h", "date": "2025-01"},
        {"value": "$3/h"},
        {"value": "$2/h"},
        {"term": "reserved", "value": "$1/h"},
        {"region": "mars", "value": "$9/h"},
    )
    assert listed.choose(RentChoice(term="spot")).value == 2.0
    assert listed.choose(RentChoice(term="spot", until="2025")).value == 1.0
    assert listed.choose(RentChoice(term="spot", region="Mars")).value == 9.0
    with pytest.raises(
        InputError, match=r"no offer for x with term=spot, until=2024; the price list has spot"
    ):
        listed.choose(RentChoice(term="spot", until="2024"))
    with pytest.raises(InputError, match=r"region=marz \(nearest: 'mars'\)"):
        listed.choose(RentChoice(term="spot", region="marz"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"date": "undated"}, "needs the date"),
        ({"date": "soon"}, "date='soon'"),
        ({"value": "-$2/h"}, "value"),
        ({"value": "$2"}, "a price per hour"),
        ({"term": "weekly"}, "term='weekly' is not one of"),
    ],
)
def test_bad_offers(change: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        offers(change)


def test_storage_is_as_fast_as_its_slower_side() -> None:
    system = load_storage("deepseek-3fs")
    assert system.write_bytes_per_s(1) == 10.74e9
    assert system.write_bytes_per_s(256) == 500e9
