"""Three clusters compared: how many clicks it takes from the start of the page."""

from __future__ import annotations

from urllib.parse import urlencode

import pytest

pytest.importorskip("streamlit", reason="the dashboard extra is not installed")

from e2e.visitor import Visit, until

MOST_CLICKS = 5
JOB = {
    "preset": "deepseek-v3-2048xh800",
    "set": [
        "model=olmoe-1b-7b",
        "cluster=h100-1024",
        "cluster.nodes=2",
        "profile=null",
        "parallel={tp: 1, pp: 1, ep: 8, cp: 1, microbatch: 1, zero_stage: 1}",
        "schedule=1f1b",
        "batch={sequences: 64, sequence_length: 4096}",
        "precision=bf16",
        "recompute=none",
        "communication={sms: 20}",
        "run={tokens: 1e12}",
        "routing=null",
        "variation=null",
    ],
}
"""OLMoE on 16 H100, whose quick searches take seconds; the clicks are those of any scenario."""


def test_three_clusters_are_compared_in_five_clicks(visit: Visit) -> None:
    visitor = visit()
    page = visitor.open(f"hardware?{urlencode(JOB, doseq=True)}")
    clicks = 0

    def click(place: object) -> None:
        nonlocal clicks
        clicks += 1
        place.click()  # type: ignore[attr-defined]

    main = page.get_by_test_id("stMain")
    click(main.get_by_test_id("stMultiSelect").locator("input"))  # the scenario's own cluster is there
    for name in ("h200-1024", "b200-1024"):
        page.keyboard.type(name)  # the list is long: typing finds it
        click(page.get_by_role("option", name=name, exact=True))
        main.get_by_test_id("stMultiSelect").get_by_text(name, exact=True).wait_for()
    page.keyboard.press("Escape")
    visitor.settled()
    click(main.get_by_role("button", name="Compare", exact=True))
    until(page, "document.querySelectorAll('.figures thead th').length === 4")
    until(page, "document.querySelectorAll('.figures tbody tr').length > 10")
    assert clicks <= MOST_CLICKS
    head = main.locator(".figures thead").inner_text()
    assert all(name in head for name in ("h100-1024", "h200-1024", "b200-1024"))
    cost = main.locator(".figures tbody tr").filter(has_text="Cost of the run").locator(".main")
    assert cost.count() == 3 and all(text.startswith("$") for text in cost.all_inner_texts())
    for button in ("h200-1024", "b200-1024"):
        main.get_by_role("button", name=button, exact=True).wait_for()
    # The choices are in the address: another session asks the same, and the plans are known already.
    other = visit()
    other.open("hardware?" + page.url.partition("?")[2])
    other.page.locator(".figures thead th").nth(3).wait_for()
    shown = other.page.locator(".figures tbody").inner_text()
    assert shown == main.locator(".figures tbody").inner_text()
    assert page.get_by_test_id("stException").count() == 0
    visitor.screenshot("hardware")
