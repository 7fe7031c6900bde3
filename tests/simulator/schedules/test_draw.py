from __future__ import annotations

import pytest

from moesim.simulator.schedules import SCHEDULES, Durations, actions_of, build, draw


def test_small_picture() -> None:
    assert draw(build("1f1b", 2, 2)).splitlines() == [
        "1f1b: 2 ranks, 2 stages (loop), 2 micro-batches; length 9, idle 33.3%",
        "",
        "rank 0 F0 F1 ......B0    ...B1",
        "rank 1 ...F0 B0    F1 B1    ......",
        "",
        "F forward, I input gradient, W weight gradient, B both, & overlapped pair, . idle",
    ]


@pytest.mark.parametrize("width", [30, 100])
@pytest.mark.parametrize("name", SCHEDULES)
def test_no_line_of_the_grid_is_wider_than_asked_and_no_label_is_cut(name: str, width: int) -> None:
    schedule = build(name, 4, 10 if name.startswith("dual") else 8)
    lines = [line for line in draw(schedule, width).splitlines() if line.startswith("rank")]
    assert all(len(line) <= width for line in lines)
    words = "\n".join(line[7:] for line in lines).replace(".", " ").replace("&", " ").split()
    with_stage = len(schedule.stages_on_rank(0)) > 1
    expected = sorted(
        str(action) if with_stage else str(action)[1:]
        for steps in schedule.ranks
        for step in steps
        for action in actions_of(step)
    )
    if width == 100:
        assert sorted(words) == expected


def test_a_long_schedule_is_squeezed_into_one_panel() -> None:
    picture = draw(build("dualpipe", 16, 120), width=100)
    rows = [line for line in picture.splitlines() if line.startswith("rank")]
    assert len(rows) == 16
    assert all(set(row[8:]) <= set("FIWBX.") for row in rows)
    assert rows[0].endswith("W") and max(map(len, rows)) <= 100


def test_zero_and_extreme_durations_still_draw() -> None:
    schedule = build("1f1b", 2, 2)
    assert "length 0" in draw(schedule, durations=Durations(0, 0, 0, 0, 0))
    assert "rank 1" in draw(schedule, width=1, durations=Durations(forward=1e-9, backward=1e3))
