"""The page Scenario: sizes of the cluster, and the repair of plans that are illegal or do not fit."""

from __future__ import annotations

import pytest

pytest.importorskip("streamlit", reason="streamlit is not installed")

from app_sessions import JOB, metrics, press, session, until

SMALL = ("batch.sequences=4096",)
"""The home case with fewer micro-batches: quicker, and legal."""


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


def test_a_plan_that_does_not_fit_says_what_takes_the_memory_and_offers_a_search() -> None:
    app = session("scenario", *SMALL, "recompute=none")
    assert "does not fit" in app.error[0].value and "activations" in app.error[0].value
    assert app.button(key="start repair").label == "Find the nearest plan that fits"


@pytest.mark.long
def test_an_illegal_plan_marks_its_field_and_offers_legal_values_and_plans() -> None:
    app = session("scenario", *JOB, "parallel.ep=6")
    assert app.number_input(key="input parallel.ep").value == 6, "the form shows what was asked for"
    assert not app.metric
    marked = [html.proto.body for html in app.get("html") if "not possible here" in html.proto.body]
    assert len(marked) == 1 and "st-key-input-parallel-ep" in marked[0]
    offered = [button.label for button in app.button if button.label.startswith("Set parallel.ep")]
    assert offered == ["Set parallel.ep = 4", "Set parallel.ep = 8"]
    press(app, "start repair")
    until(app, lambda page: any(str(b.key).startswith("repair ") for b in page.button), errors=1)
    offered = [button.label for button in app.button if str(button.key).startswith("repair ")]
    assert 1 <= len(offered) <= 3 and offered[0].startswith("ep 6") and "->" in offered[0]
    press(app, "repair 0")
    assert not app.error and app.number_input(key="input parallel.ep").value != 6
    assert any("Legal and fits" in done.value for done in app.success)


@pytest.mark.long
def test_a_fleet_says_where_its_inputs_are_and_is_checked_all_the_same() -> None:
    pools = 'fleet={"pools":[{"cluster":"deepseek-h800-2048"},{"cluster":"h100-1024"}]}'
    plan = ("parallel.pp=12", "schedule=dualpipev", "parallel.ep=32", "stages={}")
    app = session("scenario", "cluster=null", pools, "profile=null", *plan)
    assert not app.exception and not app.error
    assert any("page Fleet" in info.value for info in app.info)
    assert "Step time" in metrics(app)
    assert not app.selectbox, "inputs of one cluster would show values that the fleet does not have"


def test_all_illegal_values_are_told_at_once_each_with_a_way_out() -> None:
    app = session("scenario", "parallel.ep=48", "communication.sms=999")
    told = " ".join(error.value for error in app.error)
    assert len(app.error) == 2 and "sms=999" in told and "48" in told, told
    buttons = {str(button.key): button.label for button in app.button}
    assert buttons["nearest communication.sms 24"] == "Set communication.sms = 24"
    assert {"take back communication.sms", "take back parallel.ep"} <= set(buttons)
    press(app, "take back communication.sms")
    assert len(app.error) == 1 and "communication.sms=999" not in app.query_params["set"]
