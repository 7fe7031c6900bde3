"""Scenarios as objects: names, undo and redo, the list of a visitor, pins, and the head of every page."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("streamlit", reason="streamlit is not installed")

from app_sessions import figures
from streamlit.testing import v1 as testing

import moesim
from moesim.app import pages, scenario_links, scenario_store
from moesim.app.texts import money

HEAD = """
from moesim.app import scenario_store, state
from moesim.app.views import scenario_header
state.synchronise()
scenario_store.synchronise()
place = scenario_header.show()
scenario_header.show_pins()
scenario_header.show_facts(place)
state.publish()
scenario_store.remember()
"""


@pytest.fixture(autouse=True)
def _own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOESIM_CACHE", str(tmp_path))


def head(*changes: str, preset: str = pages.HOME) -> testing.AppTest:
    app = testing.AppTest.from_string(HEAD, default_timeout=120)
    app.query_params["preset"], app.query_params["set"] = preset, list(changes)
    app.run()
    assert not app.exception
    return app


def changes(app: testing.AppTest) -> tuple[str, ...]:
    found: tuple[str, ...] = app.session_state["overrides"]
    return found


def keys(app: testing.AppTest) -> list[str]:
    return [str(button.key) for button in app.button]


@pytest.mark.long
def test_each_change_is_a_chip_that_takes_it_back_and_undo_brings_it_again() -> None:
    app = head("communication.sms=8", "parallel.ep=32")
    assert {"chip communication.sms", "chip parallel.ep"} <= set(keys(app))
    app.button(key="chip communication.sms").click().run()
    assert changes(app) == ("parallel.ep=32",)
    app.button(key="undo change").click().run()
    assert set(changes(app)) == {"communication.sms=8", "parallel.ep=32"}
    app.button(key="redo change").click().run()
    assert changes(app) == ("parallel.ep=32",)
    assert app.button(key="redo change").disabled


@pytest.mark.long
def test_what_was_undone_is_forgotten_once_something_else_is_changed() -> None:
    app = head("communication.sms=8", "parallel.ep=32")
    app.button(key="chip communication.sms").click().run()
    app.button(key="undo change").click().run()
    app.button(key="chip parallel.ep").click().run()
    assert changes(app) == ("communication.sms=8",)
    assert app.button(key="redo change").disabled
    app.button(key="undo change").click().run()
    assert set(changes(app)) == {"communication.sms=8", "parallel.ep=32"}


def test_the_bar_says_model_gpus_tokens_fit_confidence_and_profile() -> None:
    text = " ".join(mark.value for mark in head("batch.sequences=4096").markdown)
    for part in ("deepseek-v3", "2,048 x h800-sxm", "14.8 T tokens", "at risk, ", "measured", "h800-trace"):
        assert part in text, part


def test_the_bar_of_a_scenario_that_is_refused_says_so_and_stays() -> None:
    app = head("cluster.nodes=7777777")
    assert any("refused" in mark.value for mark in app.markdown)
    assert "chip cluster.nodes" in keys(app)


@pytest.mark.parametrize(
    ("texts", "name"),
    [
        ((), pages.HOME),
        (("cluster.node.accelerator.scale_up_bandwidth=400 GB/s", "communication.sms=8"), "NVLink x2, 8 SMs"),
        (("cluster.node.nic_bandwidth=25 GB/s", "cluster.network.fabric.link_bandwidth=25 GB/s"), "NIC x0.5"),
        (("name=mine", "communication.sms=8"), "mine"),
        (
            ("name=m-16xh100-sxm", "description=m on 16 h100-sxm", "model=m", "cluster=c", "parallel.ep=8"),
            "m-16xh100-sxm, EP8",
        ),
        (
            ("routing.load={kind: zipf, exponent: 0.5}", 'run.price={"rent": {"term": "spot"}}'),
            "Zipf 0.5, rent spot",
        ),
        (
            ("a{b}c.d{units}=1", "parallel={tp: 1}", "seed=null", "precision=bf16", "schedule=1f1b", "x=2"),
            "dSMs 1, parallel changed, seed none, bf16, 2 more",
        ),
    ],
)
def test_a_scenario_is_called_by_its_differences(texts: tuple[str, ...], name: str) -> None:
    assert scenario_links.named(pages.HOME, texts, moesim.load(pages.HOME)) == name


def test_what_one_action_changed_is_one_chip() -> None:
    app = testing.AppTest.from_string(
        "import streamlit as st\nfrom moesim.app import state\n"
        "more = lambda: state.adopt(state.current().overridden('parallel.ep=32', 'parallel.microbatch=1', "
        "'communication.sms=12', 'batch.sequences=7680'))\n"
        "st.button('go', key='go', on_click=more)\n" + HEAD,
        default_timeout=120,
    )
    app.query_params["preset"], app.query_params["set"] = pages.HOME, ["seed=3"]
    app.run()
    app.button(key="go").click().run()
    chips = {str(b.key): b.label for b in app.button if str(b.key).startswith("chip")}
    assert len(chips) == 2 and "seed 3 ✕" in chips.values(), chips
    (other,) = (key for key, label in chips.items() if label != "seed 3 ✕")
    app.button(key=other).click().run()
    assert changes(app) == ("seed=3",)


def test_recent_scenarios_say_step_and_cost() -> None:
    app = head("communication.sms=8")
    kept = scenario_store.recent(app.session_state["visitor"])
    result = moesim.simulate(pages.HOME, "communication.sms=8")
    assert result.run.cost_usd is not None
    assert [entry.title for entry in kept] == ["8 SMs"]
    assert kept[0].figures == f"{result.step.time_s:.3f} s a step, {money(result.run.cost_usd)}"


def test_a_short_link_opens_what_it_stands_for() -> None:
    app = testing.AppTest.from_string(
        HEAD.replace("state.synchronise()", "scenario_store.open_short_link()\nstate.synchronise()"),
        default_timeout=120,
    )
    code = scenario_store.short_link(f"preset={pages.HOME}&set=communication.sms%3D8")
    assert code is not None and code == scenario_store.short_link(
        f"preset={pages.HOME}&set=communication.sms%3D8"
    )
    app.query_params["link"] = code
    app.run()
    assert not app.exception and changes(app) == ("communication.sms=8",)
    assert "link" not in app.query_params
    app.query_params["link"] = "unknown"
    app.run()
    assert any("no longer knows it" in error.value for error in app.error)


@pytest.mark.parametrize("name", ["**bold** [x](http://host)", "1.5e3", '"quoted"', "ü" * 300])
def test_any_text_is_a_name_and_no_markup(name: str) -> None:
    app = head("batch.sequences=4096")
    app.text_input(key="scenario name").set_value(name).run()
    assert not app.exception
    assert app.text_input(key="scenario name").value == name[:80]
    assert not any("](http" in mark.value.replace("\\[", "").replace("\\(", "") for mark in app.markdown)
    text = next(text for text in changes(app) if text.startswith("name="))
    from moesim.app import state

    assert state.build(pages.HOME, (text,)).name == name[:80]


def test_a_copy_is_another_object_and_both_are_in_the_list() -> None:
    app = head("communication.sms=8")
    first = app.session_state["scenario id"]
    next(button for button in app.button if button.label == "Duplicate").click().run()
    assert app.session_state["scenario id"] != first
    assert f"recent {first}" in keys(app)
    app.button(key=f"recent {first}").click().run()
    assert app.session_state["scenario id"] == first
    assert changes(app) == ("communication.sms=8",)


def test_the_list_is_bounded_and_each_visitor_has_their_own() -> None:
    for number in range(scenario_store.MOST_PER_OWNER + 5):
        scenario_store.put("one", str(number), f"scenario {number}", "[]")
    scenario_store.put("other", "1", "mine", "[]")
    kept = [entry.number for entry in scenario_store.recent("one")]
    assert len(kept) == scenario_store.MOST_PER_OWNER and "0" not in kept
    assert kept[0] == str(scenario_store.MOST_PER_OWNER + 4)
    scenario_store.remove("one", "1")
    assert [entry.name for entry in scenario_store.recent("other")] == ["mine"]


def test_an_entry_that_cannot_be_read_any_more_is_said_and_forgotten() -> None:
    app = head("communication.sms=8")
    owner = app.session_state["visitor"]
    scenario_store.put(owner, "broken", "an old one", "packed:damaged")
    app.run()
    app.button(key="recent broken").click().run()
    assert not app.exception
    assert any("an old one cannot be opened any more" in error.value for error in app.error)
    assert "recent broken" not in keys(app)
    assert changes(app) == ("communication.sms=8",)


def test_a_pinned_scenario_stands_beside_the_current_one_with_their_difference() -> None:
    app = head("batch.sequences=4096")
    app.button(key="pin").click().run()
    assert app.button(key="pin").disabled, "the same scenario can be pinned once"
    app.button(key="chip batch.sequences").click().run()
    rows = figures(app)
    assert list(rows)[1:4] == ["A 4,096 sequences", f"B {pages.HOME}", "B - A"]
    assert " s" in rows["B - A"][0] and "$" in rows["B - A"][1]
    assert any("B differs in batch.sequences=15360" in caption.value for caption in app.caption)
    app.button(key="show A").click().run()
    assert changes(app) == ("batch.sequences=4096",)
    app.button(key="unpin 0").click().run()
    assert "B - A" not in figures(app)


def test_why_the_last_click_started_nothing_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moesim.app.tray.MOST_RUNNING", 0)
    again = testing.AppTest.from_string(
        "import streamlit as st\nfrom moesim.app import long_work\n"
        "st.button('go', key='go', on_click=long_work.start_on_click, args=('plan', 'plan/x', abs, -1))\n"
        + HEAD,
        default_timeout=120,
    ).run()
    again.button(key="go").click().run()
    assert not again.exception
    assert any("may: stop one" in error.value for error in again.error)
    again.run()
    assert not again.error
