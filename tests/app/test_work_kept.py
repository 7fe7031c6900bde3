"""Nothing of a visitor is lost: illegal values stay in the form, links stay short, forms stand in them."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("streamlit", reason="the dashboard extra is not installed")

from app_sessions import HOME, JOB, address, press, session, until
from streamlit.testing import v1 as testing

import moesim
from moesim.app import forms, scenario_links, state, visitors
from moesim.app.views import planner
from moesim.simulator.planner.goal import equal_part

# -- illegal values ---------------------------------------------------------------------------------


@pytest.mark.long
def test_nodes_that_a_network_does_not_join_keep_the_form_and_offer_what_is_legal() -> None:
    texts = ["cluster=h100-1024", "profile=h100-layers", "cluster.nodes=512", "parallel.pp=8"]
    app = session("scenario", preset=[HOME], set=texts)
    assert not app.exception
    (error,) = (error.value for error in app.error)
    assert "ft3-ib-400g" in error
    assert app.number_input(key="input cluster.nodes").value == 512
    assert app.selectbox(key="input cluster").value == "h100-1024"
    assert app.number_input(key="input parallel.pp").value == 8
    assert "Set cluster.nodes = 256" in [button.label for button in app.button]
    # Another network joins them: 4,096 H100.
    app.selectbox(key="input cluster.network").set_value("ft3-ib-400g").run()
    assert not any("network" in error.value for error in app.error)
    assert app.number_input(key="input cluster.nodes").value == 512
    scenario = state.build(HOME, tuple(address(app)["set"]))
    assert (scenario.machine.n_gpus, scenario.machine.network.name) == (4096, "ft3-ib-400g")


@pytest.mark.parametrize(
    ("texts", "kept"),
    [
        (("parallel.pp=8", "model=unheard-of"), "unheard-of"),
        (("parallel.pp=8", "model=unheard-of", "routing.expert_load_cv=many", "seed=[[["), "unheard-of"),
    ],
)
def test_refused_changes_stay_in_their_widgets(texts: tuple[str, ...], kept: str) -> None:
    app = session("scenario", preset=[HOME], set=list(texts))
    assert not app.exception
    assert len(app.error) == 1
    assert app.number_input(key="input parallel.pp").value == 8
    assert app.selectbox(key="input model").value == kept
    press(app, "reset")
    assert not app.error
    assert app.selectbox(key="input model").value == "deepseek-v3"


def test_the_last_change_can_be_undone_alone() -> None:
    app = session("scenario", preset=[HOME], set=["parallel.pp=8", "model=unheard-of"])
    press(app, "undo")
    assert address(app)["set"] == ["parallel.pp=8"]


# -- links ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change", ["cluster.node.nic_bandwidth=100 GB/s", "cluster.node.accelerator.hbm=96 GB"]
)
def test_adopting_on_another_cluster_is_a_short_link(change: str) -> None:
    wanted = moesim.load(HOME, "cluster=h100-1024", "profile=h100-layers", "cluster.nodes=64", change)
    texts = state.overrides_of(wanted)
    assert set(texts) == {"cluster=h100-1024", "profile=h100-layers", "cluster.nodes=64", change}
    assert len(scenario_links.link(HOME, texts)) < 250
    assert state.build(HOME, texts).to_dict() == wanted.to_dict()


def test_a_link_to_another_accelerator_has_the_keys_that_a_move_would_drop() -> None:
    kept = ("communication.sms=20", "name=deepseek-v3-2048xh800")
    wanted = moesim.load(HOME, "cluster=h100-1024", "profile=h100-layers", *kept)
    texts = state.overrides_of(wanted)
    assert set(texts) == {"cluster=h100-1024", "profile=h100-layers", *kept}
    assert state.build(HOME, texts).to_dict() == wanted.to_dict()


def test_a_network_that_was_chosen_is_named_in_the_link() -> None:
    wanted = moesim.load(HOME, "cluster.nodes=512", "cluster.network=ft3-ib-400g")
    assert set(state.overrides_of(wanted)) == {"cluster.nodes=512", "cluster.network=ft3-ib-400g"}


def test_what_no_short_link_holds_becomes_an_upload() -> None:
    wanted = moesim.load(HOME).replace(
        model=moesim.load(HOME).shape.model_dump(mode="json", exclude_none=True),
        profile=moesim.load(HOME).calibration.model_dump(mode="json", exclude_none=True),
    )
    script = f"""
from moesim.app import state
from moesim.app.views import scenario_header
from moesim.simulator.scenario.scenario import Scenario
import json, streamlit as st
state.synchronise()
data = json.loads({json.dumps(json.dumps(wanted.to_dict()))})
st.button("adopt", key="adopt", on_click=state.adopt, args=(Scenario.model_validate(data),))
scenario_header.show()
state.publish()
"""
    app = testing.AppTest.from_string(script, default_timeout=60).run()
    app.button(key="adopt").click().run()
    assert not app.exception
    given = address(app)
    assert sum(map(len, (given["preset"][0], *given.get("set", [])))) < 100
    assert "{" not in "".join(code.value for code in app.code)
    assert any("this server only" in warning.value for warning in app.warning)
    assert state.build(given["preset"][0], ()).to_dict() == wanted.to_dict()
    # It is a preset like any other: changes go on top.
    assert state.build(given["preset"][0], ("parallel.pp=8",)).parallel.pp == 8


# -- forms ------------------------------------------------------------------------------------------


def bandwidth(app: testing.AppTest) -> Any:
    """The buttons of the first bandwidth."""
    return app.get("button_group")[0]


@pytest.mark.long
def test_sliders_of_what_if_stand_in_the_address() -> None:
    app = session("what_if", preset=[HOME], set=list(JOB))
    app.slider(key="what if sms 20").set_value(8).run()
    app.slider(key="what if price 2.5").set_value(4.0).run()
    bandwidth(app).set_value(2.0).run()
    other = session("what_if", **address(app))  # a reload, or somebody else
    assert other.slider(key="what if sms 20").value == 8
    assert other.slider(key="what if price 2.5").value == 4.0
    assert bandwidth(other).value == 2.0
    assert [m.value for m in other.metric] == [m.value for m in app.metric]
    other.slider(key="what if sms 20").set_value(20).run()
    other.button(key="adopt").click().run()
    assert "form" not in other.query_params


def test_faults_and_profiles_that_were_chosen_stand_in_the_address() -> None:
    app = session(
        "topology", preset=[HOME], set=["cluster.nodes=64", "batch.sequences=1024", "parallel.ep=32"]
    )
    app.selectbox(key="fault").set_value("a node is lost").run()
    app.number_input(key="fault node").set_value(63).run()
    again = session("topology", **address(app))
    assert again.selectbox(key="fault").value == "a node is lost"
    assert again.number_input(key="fault node").value == 63
    app = session("calibration", preset=[HOME])
    app.selectbox(key="profile shown").set_value("h200-8gpu").run()
    assert session("calibration", **address(app)).selectbox(key="profile shown").value == "h200-8gpu"


def test_another_page_keeps_the_form() -> None:
    app = session("planner", *JOB)
    app.selectbox(key="objective").set_value("deadline").run()
    app.number_input(key="deadline").set_value(33.0).run()
    app.multiselect(key="schedules").set_value(["1f1b"]).run()
    away = session("calibration", **address(app))
    back = session("planner", **address(away))
    assert back.selectbox(key="objective").value == "deadline"
    assert back.number_input(key="deadline").value == 33.0
    assert back.multiselect(key="schedules").value == ["1f1b"]


@pytest.mark.parametrize("objective", ['"x"', "[[", "{}"])
def test_a_form_in_a_hostile_link_has_its_defaults(objective: str) -> None:
    script = "from moesim.app import state, widgets\nfrom moesim.app.views import planner\n" + (
        "state.synchronise()\nwidgets.guard(lambda: planner._question(state.current()))\nstate.publish()"
    )
    app = testing.AppTest.from_string(script, default_timeout=60)
    texts = [f"plan.objective={objective}", "what-if.sms=1e999", "plan.keep=7", 'plan.schedules=["nope"]']
    texts += ["plan.schedules=[[1]]", 'plan.search="../x"', "=", "x" * 500, "plan.days=true"]
    app.query_params["preset"], app.query_params["form"] = HOME, texts
    app.run()
    assert not app.exception
    assert app.selectbox(key="objective").value == "time"
    assert app.multiselect(key="kept keys").value == ["precision", "sms"]


def test_fields_in_the_address_are_bounded() -> None:
    app = testing.AppTest.from_string(
        "from moesim.app import forms, state\nstate.synchronise()\n"
        "[forms.put(f'field {n}', 'x' * 150) for n in range(100)]\nforms.put('long', 'x' * 5000)\n"
        "state.publish()"
    ).run()
    texts = address(app)["form"]
    assert len(texts) == forms.MOST_FIELDS
    assert max(map(len, texts)) <= forms.MOST_CHARACTERS


def test_a_late_address_of_a_quick_visitor_is_no_link() -> None:
    """Two changes before the browser has heard of the first: the second comes with the old address."""
    script = (
        "import streamlit as st\nfrom moesim.app import state\nstate.synchronise()\n"
        "st.button('a', on_click=state.set_override, args=('communication.sms', 8))\n"
        "st.button('b', on_click=state.set_override, args=('parallel.ep', 32))\nstate.publish()"
    )
    app = testing.AppTest.from_string(script).run()
    old = address(app)
    app.button[0].click().run()
    app.query_params.clear()
    app.query_params.update(old)
    app.button[1].click().run()
    assert address(app)["set"] == ["communication.sms=8", "parallel.ep=32"]


# -- the search -------------------------------------------------------------------------------------


def test_parts_of_a_search_share_its_whole() -> None:
    told: list[float] = []
    say = equal_part(lambda share, text: told.append(share), 1, 2, 0.0, 0.5)
    for share in (0.0, 0.5, 1.0):
        say(share, "")
    assert told == [0.25, 0.375, 0.5]


@pytest.fixture
def one_browser(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every session of the test has the cookie of the same visitor, as after a reload."""
    token = visitors.issued()
    monkeypatch.setattr(visitors, "_cookies", lambda: [token])


@pytest.mark.long
def test_opening_a_plan_keeps_what_was_found_also_over_a_reload(
    one_browser: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "TOP", 1)
    app = session("planner", *JOB)
    app.multiselect(key="kept keys").set_value(["precision", "recompute", "microbatch", "zero_stage", "sms"])
    app.run()
    press(app, "start plan")
    reloaded = session("planner", **address(app))  # while it runs: the same work, not another one
    assert not any(button.key == "start plan" for button in reloaded.button)
    until(reloaded, lambda page: len(page.metric) > 0)
    until(app, lambda page: len(page.metric) > 0)
    figures = [metric.value for metric in app.metric]
    asked = address(app) | {"set": [*JOB, "parallel.ep=4"]}  # a plan was opened
    changed = session("planner", **asked)
    assert [metric.value for metric in changed.metric] == figures
    assert any("earlier" in info.value for info in changed.info)
    press(changed, "search anew")
    assert not changed.info and any(button.key == "stop job plan" for button in changed.button)
    press(changed, "stop job plan")
