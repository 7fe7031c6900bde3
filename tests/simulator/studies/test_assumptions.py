"""The table of assumptions: written, edited, read back; what it does not know is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from moesim.hwmodels.errors import InputError
from moesim.simulator.predict.plan_checks import check_ranges
from moesim.simulator.scenario import Scenario, load_scenario
from moesim.simulator.studies.whole_run import (
    assumptions,
    with_assumptions,
    with_default_stops,
    write_assumptions,
)

SPOT = 'run.price={"rent":{"term":"spot"},"discount":"5%"}'


def scenario(*overrides: str) -> Scenario:
    return load_scenario("deepseek-v3-2048xh100", ["cluster.energy=usa", *overrides])


@pytest.mark.parametrize("name", ["t.csv", "t.yaml"])
def test_an_unchanged_table_changes_nothing_and_an_edited_row_is_assumed(tmp_path: Path, name: str) -> None:
    own, path = scenario(SPOT), tmp_path / name
    assert write_assumptions(own, path) == len(assumptions(own))
    same, changed = with_assumptions(own, path)
    assert changed == [] and same.model_dump() == own.model_dump()
    path.write_text(path.read_text().replace("1.56", "1.2").replace("$2.6/h", "$1.8/h"))
    other, changed = with_assumptions(own, path)
    assert changed == ["cluster.energy.pue", "run.price.offer"]
    site, price = other.machine.energy, other.run.price
    assert site is not None and price is not None and price.offer is not None and price.discount is not None
    assert (site.pue.value, site.pue.kind) == (1.2, "assumed") and "before: 1.56" in site.pue.source
    assert (price.offer.value, price.offer.term, price.discount.value) == (1.8, "spot", 0.05)
    assert price.offer.date == "2026-11-20" and price.rent is None


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            "cluster.energy.pue",
            "cluster.energy.pui",
            r"row 4: cluster.energy.pui is no assumption.*'cluster.ene",
        ),
        (",1.56,", ",0.9,", "pue: 0.9 is outside 1 to 10; nearest: 1"),
        ("cluster.node.power", "cluster.energy.pue", "cluster.energy.pue stands there twice"),
        ("key,value", "key,wert", "columns value are missing"),
        ("$2.35/h", "2.35 CHF/h", "prices are in US dollars"),
    ],
)
def test_bad_tables_are_refused(tmp_path: Path, old: str, new: str, words: str) -> None:
    path = tmp_path / "t.csv"
    write_assumptions(scenario(), path)
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(InputError, match=words):
        with_assumptions(scenario(), path)


def test_a_run_on_spot_is_preempted_by_rule_and_checked() -> None:
    stops, chosen = with_default_stops(scenario(SPOT))
    assert stops.run.preemption is not None and "run.preemption" in [one.key for one in chosen]
    check_ranges(stops)
    own = scenario('run.price={"offer":{"value":"$2/h","kind":"assumed","source":"a quote","date":"2026-05",'
                   '"term":"spot"}}')  # fmt: skip
    assert with_default_stops(own)[0].run.preemption is not None
