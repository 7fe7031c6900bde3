"""The scenario in the URL: compact overrides, links both ways, nothing that names a file of the server."""

from __future__ import annotations

import json
import re
from pathlib import Path
from urllib.parse import parse_qs

import pytest

pytest.importorskip("streamlit", reason="streamlit is not installed")

import moesim
from moesim.app import pages, scenario_links, state
from moesim.hwmodels.errors import InputError
from moesim.simulator.scenario import Scenario, load_scenario

ROOT = Path(__file__).resolve().parents[2]


def plain(scenario: Scenario) -> dict[str, object]:
    return scenario.model_dump(mode="json")


@pytest.mark.parametrize(
    "texts",
    [
        ("parallel.ep=32",),
        ("communication.sms=0", "schedule=1f1b"),
        ('cluster.price_per_gpu_hour="$3/h"', "cluster.nodes=128", "batch.sequences=7680"),
        ("routing.load={kind: zipf, exponent: 0.3}", "routing.expert_load_cv=0.4"),
        ("run=deepseek-v3",),
        ("resolution=full", "faults=[{kind: slow-gpu, gpu: 17, speed: 0.8}]"),
    ],
)
def test_any_scenario_is_a_link_and_a_link_is_that_scenario(texts: tuple[str, ...]) -> None:
    wanted = moesim.load(pages.HOME, *texts)
    texts = state.overrides_of(wanted)
    assert plain(state.build(pages.HOME, texts)) == plain(wanted)
    query = parse_qs(scenario_links.link(pages.HOME, texts)[1:])
    assert tuple(query["set"]) == texts
    assert query["preset"] == [pages.HOME]


def test_one_changed_figure_of_the_cluster_is_one_short_override() -> None:
    wanted = moesim.load(pages.HOME, "cluster.node.nic_bandwidth=100 GB/s", "cluster.nodes=128")
    assert set(state.overrides_of(wanted)) == {"cluster.node.nic_bandwidth=100 GB/s", "cluster.nodes=128"}


@pytest.mark.parametrize("name", moesim.presets())
def test_every_preset_can_be_written_as_overrides_of_the_home_case(name: str) -> None:
    wanted = moesim.load(name)
    if wanted.schedule.endswith(".csv"):
        with pytest.raises(InputError, match="file"):
            state.build(pages.HOME, state.overrides_of(wanted))
        return
    assert plain(state.build(pages.HOME, state.overrides_of(wanted))) == plain(wanted)


def test_a_scenario_file_becomes_overrides() -> None:
    wanted = load_scenario(str(ROOT / "examples" / "mixtral-on-h200.yaml"))
    again = state.build(pages.HOME, state.overrides_of(wanted))
    # What differs is where a figure was stated: in the file, or in the link.
    told = [json.dumps(plain(scenario)) for scenario in (wanted, again)]
    assert re.sub(r'"stated (in|by) [^"]*"', '""', told[0]) == re.sub(
        r'"stated (in|by) [^"]*"', '""', told[1]
    )


def test_a_link_says_where_it_works() -> None:
    assert scenario_links.only_here(pages.HOME, ("parallel.ep=32", "profile=h800-trace")) is None
    told = scenario_links.only_here(pages.HOME, ("parallel.ep=32", f"profile=upload-{'0' * 32}.yaml"))
    assert told is not None
    assert "profile" in told
    assert "this server only" in told


def test_the_home_case_is_named_in_the_address() -> None:
    """An empty address is that of a page just chosen: Back to the home case could not be told from it."""
    assert scenario_links.parameters(pages.HOME, ()) == {"preset": pages.HOME}


def test_keys_of_the_cache_ignore_prices_and_nothing_else() -> None:
    from moesim.simulator.studies.reprice import without_prices

    def key(*overrides: str) -> str:
        return state.cache_key(without_prices(moesim.load(pages.HOME, *overrides)))

    assert key() == key("cluster.price_per_gpu_hour=$9/h")
    assert len({key(), key("communication.sms=16"), key("profile=h800-published"), key("seed=1")}) == 4


@pytest.mark.parametrize(
    "text", ["", "[", "[]", "{}", "3", '"x"', "[1]", '["a", 2]', "null", "[" * 16_000, "9" * 15_000]
)
def test_a_link_of_compare_that_is_none(text: str) -> None:
    with pytest.raises(InputError, match="not a list of a preset and overrides"):
        scenario_links.read(text)


def test_a_link_of_compare() -> None:
    assert scenario_links.read('["home", "seed=1", "parallel.ep=32"]') == (
        "home",
        ("seed=1", "parallel.ep=32"),
    )
