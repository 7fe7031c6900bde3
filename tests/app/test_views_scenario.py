"""The page Scenario: sizes of the cluster, and the repair of plans that are illegal or do not fit."""

from __future__ import annotations

import pytest

pytest.importorskip("streamlit", reason="streamlit is not installed")

from app_sessions import metrics, session, until

SMALL = ("batch.sequences=4096",)
"""The home case with fewer micro-batches: quicker, and legal."""


def test_an_illegal_plan_offers_its_nearest_legal_values() -> None:
    app = session("scenario", *SMALL, "parallel.ep=48")
    assert not app.exception
    assert "does not divide" in app.error[0].value
    assert not app.metric
    offered = [button for button in app.button if button.label.startswith("Set parallel.ep")]
    assert [button.label for button in offered] == ["Set parallel.ep = 32", "Set parallel.ep = 64"]
    offered[0].click().run()
    assert not app.error
    assert app.number_input(key="input parallel.ep").value == 32
    assert "Step time" in metrics(app)


def test_a_batch_that_no_schedule_runs_offers_batches() -> None:
    app = session("scenario", "batch.sequences=2048")
    labels = [button.label for button in app.button]
    assert "Set batch.sequences = 4096" in labels


def test_a_plan_that_does_not_fit_says_what_takes_the_memory() -> None:
    app = session("scenario", *SMALL, "recompute=none")
    assert not app.exception
    assert "does not fit" in app.error[0].value
    assert "activations" in app.error[0].value


def test_another_number_of_nodes_is_another_cluster_and_back() -> None:
    app = session("scenario", *SMALL)
    days = metrics(app)["Duration"]
    app.number_input(key="input cluster.nodes").set_value(128).run()
    assert not app.exception
    assert "cluster.nodes=128" in app.query_params["set"]
    assert metrics(app)["Duration"] != days
    app.number_input(key="input cluster.nodes").set_value(256).run()
    assert metrics(app)["Duration"] == days
    assert app.query_params["set"] == SMALL[0]


# -- repair ------------------------------------------------------------------------------------------


def test_the_nearest_plans_that_fit_are_offered_and_used_with_one_click() -> None:
    app = session("scenario", *SMALL, "recompute=none")
    assert "does not fit" in app.error[0].value
    app.button(key="start repair").click().run()
    until(app, lambda page: any(str(b.key).startswith("repair ") for b in page.button), errors=1)
    offered = [button for button in app.button if str(button.key).startswith("repair ")]
    assert 1 <= len(offered) <= 3 and all("->" in button.label for button in offered)
    app.button(key="repair 0").click().run()
    assert not app.exception and not app.error
    assert any("Legal and fits" in done.value for done in app.success)


def test_a_repair_of_an_illegal_degree_keeps_the_form_and_marks_the_field() -> None:
    app = session("scenario", *SMALL, "parallel.ep=48")
    assert app.number_input(key="input parallel.ep").value == 48, "the form shows what was asked for"
    marked = [html.proto.body for html in app.get("html") if "not possible here" in html.proto.body]
    assert len(marked) == 1 and "st-key-input-parallel-ep" in marked[0]
    app.button(key="start repair").click().run()
    until(app, lambda page: any(str(b.key).startswith("repair ") for b in page.button), errors=1)
    first = next(button for button in app.button if button.key == "repair 0")
    assert first.label.startswith("ep 48")
    first.click().run()
    assert not app.error and app.number_input(key="input parallel.ep").value != 48


def test_a_fleet_says_where_its_inputs_are_and_is_checked_all_the_same() -> None:
    pools = 'fleet={"pools":[{"cluster":"deepseek-h800-2048"},{"cluster":"h100-1024"}]}'
    plan = ("parallel.pp=12", "schedule=dualpipev", "parallel.ep=32", "stages={}")
    app = session("scenario", "cluster=null", pools, "profile=null", *plan)
    assert not app.exception and not app.error
    assert any("page Fleet" in info.value for info in app.info)
    assert "Step time" in metrics(app)
    assert not app.selectbox, "inputs of one cluster would show values that the fleet does not have"
