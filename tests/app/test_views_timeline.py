"""The page Timeline in a simulated session: what it hands to the component, what a link may ask."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

pytest.importorskip("streamlit", reason="the dashboard extra is not installed")

from app_sessions import HOME, metrics, session
from streamlit.testing import v1 as testing

import moesim
from moesim.app import state
from moesim.app.components.timeline import packing
from moesim.simulator.predict.step_events import StepEvents, step_events
from moesim.simulator.predict.timeline import zoomed_action

SMALL = ("batch.sequences=1024", "cluster.nodes=64", "parallel.ep=32")


@lru_cache(maxsize=1)
def step() -> StepEvents:
    return step_events(moesim.load(HOME, *SMALL))


def opened(form: str | None = None) -> tuple[testing.AppTest, dict[str, Any]]:
    """A visitor with a link, and what the component was told besides the bytes."""
    app = session("timeline", *SMALL, fields=[] if form is None else [form])
    told = app.get("component_instance")
    assert len(told) == 1
    return app, json.loads(told[0].proto.json_args)


def test_the_trace_can_be_saved_at_once_and_bubble_and_exposed_communication_are_told() -> None:
    app, _ = opened()
    waits = [rank.exposed_communication for rank in moesim.simulate(HOME, *SMALL).breakdown_by_rank_s]
    assert metrics(app)["Longest wait for communication"] == f"{max(waits):.3f} s"
    assert any(f"pipeline rank {waits.index(max(waits))}; " in caption.value for caption in app.caption)
    assert "cannot run as it is" in app.error[0].value, "the plan does not fit, and that comes first"
    (button,) = app.get("download_button")
    assert "Perfetto" in button.proto.label and not button.proto.disabled and button.proto.deferred_file_id


def test_a_link_opens_its_action() -> None:
    last = len(step().actions.kind) - 1
    assert opened(f"timeline.action={last}")[1]["opened"] == last


@pytest.mark.parametrize("asked", ["1000000", "-3", "1.5", "{"])
def test_a_link_with_another_action_opens_the_default(asked: str) -> None:
    assert opened(f"timeline.action={asked}")[1]["opened"] == zoomed_action(step().actions, 0)


def test_a_step_with_more_events_than_a_browser_holds_shows_one_rank_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packing, "MOST_EVENTS", len(step().events) - 1)
    monkeypatch.setattr(state, "compute", lambda key, label, function, *given: function(*given))
    chosen = int(np.flatnonzero(step().actions.rank == 2)[4])
    app, told = opened(f"timeline.action={chosen}")
    assert told["opened"] == chosen
    assert any("the phases of pipeline rank 2" in caption.value for caption in app.caption)
