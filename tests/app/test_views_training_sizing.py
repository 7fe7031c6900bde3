"""The page Training sizing: sizes within a deadline, the frontier and the scaling curve."""

from __future__ import annotations

import pytest

pytest.importorskip("streamlit", reason="the dashboard extra is not installed")

from app_sessions import JOB, press, session, table, until

FAR = "training_sizing.days=36000.0"
SIZES = 'training_sizing.gpus="8,16"'


def test_a_size_that_is_none_is_said_before_anything_is_priced() -> None:
    app = session("training_sizing", *JOB, fields=['training_sizing.gpus="0..8"'])
    assert any("is no size" in str(error.value) for error in app.error)
    assert not app.button


@pytest.mark.long
def test_sizes_win_within_the_deadline_and_bend_by_a_cause() -> None:
    app = session("training_sizing", *JOB, fields=[FAR, SIZES, 'training_sizing.curve="strong"'])
    assert not app.metric, "nothing is computed before it is asked for"
    press(app, "start training sizing")
    until(app, lambda drawn: bool(drawn.metric))
    assert [tile.label for tile in app.metric] == ["Fewest GPUs", "Cheapest", "Fastest"]
    assert app.metric[0].value == "8 x h100-sxm"
    sizes = table(app, "days, 80 %")
    assert "31." not in sizes["M$, 80 %"][0] and float(sizes["days, 80 %"][0].split("-")[0]) > 1.0
    assert any("which keeps the deadline; no size misses" in caption.value for caption in app.caption)
    assert any("8 to 16 GPUs" in caption.value for caption in app.caption)
    assert not app.exception
