"""The page Fleet: what it begins with, what each pool does, what it refuses, and opening it."""

from __future__ import annotations

import pytest

pytest.importorskip("streamlit", reason="the dashboard extra is not installed")

from app_sessions import HOME, metrics, press, session

import moesim
from moesim.app import state
from moesim.hwmodels import load_cluster
from moesim.simulator.layout.job import legal_pipelines
from moesim.simulator.studies.reprice import fleet_shares, repriced, unpriced, without_prices

TEXTS = (
    'fleet.pools=[{"cluster":"deepseek-h800-2048","profile":"h800-trace"},'
    '{"cluster":"h100-1024","profile":"h100-layers"}]',
    "parallel.pp=12",
    "schedule=dualpipev",
)


def test_pipelines_give_every_rank_the_same_gpus_of_one_pool() -> None:
    clusters = [load_cluster("deepseek-h800-2048"), load_cluster("h100-1024")]
    found = legal_pipelines(clusters, 62)
    assert found == (3, 6, 12, 24, 48)
    for pp in found:
        assert all((cluster.n_gpus * pp) % 3072 == 0 for cluster in clusters)
        assert 3072 % pp == 0
    assert legal_pipelines(clusters, 2) == ()


def test_shares_add_up_and_the_bottleneck_idles_least() -> None:
    scenario = moesim.load(HOME, *TEXTS)
    result = moesim.simulate(scenario)
    shares = fleet_shares(scenario, result)
    assert sum(share.gpu_share for share in shares) == pytest.approx(1.0)
    assert sum(share.layer_share for share in shares) == pytest.approx(1.0)
    assert sum(share.usd or 0.0 for share in shares) == pytest.approx(result.run.cost_usd)
    (slowest,) = (share for share in shares if share.is_bottleneck)
    assert slowest.idle_s == min(share.idle_s for share in shares)
    assert all(share.busy_s + share.idle_s == pytest.approx(result.step.time_s) for share in shares)
    assert fleet_shares(moesim.load(HOME), moesim.simulate(HOME)) == ()


def test_a_fleet_keeps_its_prices() -> None:
    scenario = moesim.load(HOME, *TEXTS)
    result = moesim.simulate(scenario)
    assert without_prices(scenario) == scenario
    assert repriced(result, scenario) == result == unpriced(result, scenario)


def test_the_page_begins_with_a_legal_fleet_that_opens_as_the_scenario() -> None:
    app = session("fleet")
    assert not app.error
    before = metrics(app)
    expected = moesim.simulate(moesim.load(HOME, *TEXTS)).step.time_s
    assert before["Step time"] == f"{expected:.3f} s"
    assert list(app.dataframe[0].value["ranks"]) == ["0 to 7", "8 to 11"]
    assert any("Bottleneck" in text.value and "h100-sxm" in text.value for text in app.markdown)
    press(app, "open fleet")
    assert metrics(app) == before
    scenario = state.build(HOME, tuple(app.query_params["set"]))
    assert scenario.fleet is not None and len(scenario.fleet.pools) == 2
    assert scenario.name == "deepseek-v3-2048xh800-sxm+1024xh100-sxm"
    assert scenario.parallel.pp == 12
    app.number_input(key="fleet nodes 2 h100-1024").set_value(127).run()  # which no pipeline divides
    assert not app.exception and (app.error or app.warning)
    assert app.number_input(key="fleet nodes 2 h100-1024").value == 127


@pytest.mark.long
def test_older_gpus_are_refused_with_what_would_make_them_legal() -> None:
    app = session("fleet", "communication.kernels=deepep-2025-04")
    app.selectbox(key="fleet cluster 2").set_value("a100-512").run()
    assert not app.exception
    assert any("no peak.fp8" in error.value for error in app.error)
    app.selectbox(key="fleet precision").set_value("bf16").run()
    assert any("communication.kernels" in error.value for error in app.error)
    app.button(key="fleet nearest communication.kernels nccl").click().run()
    assert app.button(key="fleet change communication.kernels=nccl")
    assert not any("communication.kernels" in error.value for error in app.error)
    app.button(key="fleet change communication.kernels=nccl").click().run()
    assert any("communication.kernels" in error.value for error in app.error)


@pytest.mark.parametrize(
    "fields",
    [
        ['fleet.changes=["x"]', 'fleet.cluster1="../x"', "fleet.count=99", "fleet.pp=1000000"],
        ['fleet.changes=["routing.load={file: /etc/passwd}"]'],
        ['fleet.changes=["cluster.nodes=9e99"]'],
    ],
)
def test_a_hostile_form_is_ignored_or_said(fields: list[str]) -> None:
    app = session("fleet", fields=fields)
    assert app.selectbox(key="fleet cluster 1").value == "deepseek-h800-2048"
