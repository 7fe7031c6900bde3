from __future__ import annotations

from dataclasses import replace
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesim.hwmodels.errors import InputError
from moesim.simulator.schedules import (
    Durations,
    Step,
    actions_of,
    build,
    idle,
    longest_path,
    makespan,
    needs_of,
    provides_of,
    published_bubble,
    unit_times,
)

F_S, I_S, W_S = 0.0576, 0.1014, 0.0245
HOME = Durations(F_S, I_S, W_S, I_S + W_S, overlap=0.1390)
lengths = st.integers(1, 9).map(float)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(["gpipe", "1f1b", "interleaved-1f1b"]), st.integers(1, 8), st.integers(1, 4),
       st.integers(1, 3), lengths, lengths)  # fmt: skip
def test_bubbles_that_are_exact(name: str, pp: int, rounds: int, vpp: int, f: float, b: float) -> None:
    vpp = vpp if name.startswith("interleaved") else 1
    if pp == 1:
        vpp = 1
    durations = Durations(forward=f, backward=b)
    times = unit_times(build(name, pp, pp * rounds, vpp), durations)
    published = published_bubble(name, pp, durations, vpp)
    assert published is not None
    assert idle(times) == pytest.approx([published] * pp)


@pytest.mark.parametrize("pp", [2, 4, 8])
def test_zero_bubble_schedules_with_equal_parts(pp: int) -> None:
    durations = Durations()
    zb_h1 = unit_times(build("zb-h1", pp, 3 * pp), durations)
    assert idle(zb_h1) == pytest.approx([published_bubble("zb-h1", pp, durations)] * pp)
    zbv = unit_times(build("zbv", pp, 3 * pp), durations)
    # The paper counts a rank from its own first step to its own last one.
    for own in zbv:
        gaps = own[-1][1] - own[0][0] - sum(end - start for start, end in own)
        assert gaps == published_bubble("zbv", pp, durations) == 0


def test_uniform_dualpipe_of_the_home_case() -> None:
    # Table 4 of arXiv 2505.09343 read as the mean over ranks: 18.72 s without the optimizer, of which
    # 1.17 s are bubble; the formula of arXiv 2412.19437 gives 1.34 s.
    times = unit_times(build("dualpipe", 16, 120), HOME)
    assert makespan(times) == pytest.approx(18.72, abs=0.005)
    assert sum(idle(times)) / 16 == pytest.approx(1.17, abs=0.006)
    assert published_bubble("dualpipe", 16, HOME) == pytest.approx(1.34, abs=0.001)


def test_published_bubbles_by_hand() -> None:
    durations = Durations(forward=1, input_gradient=2, weight_gradient=1.5, backward=3.5, overlap=4)
    assert published_bubble("gpipe", 5, durations) == published_bubble("1f1b", 5, durations) == 18
    # Per-chunk times: two chunks a rank make the rank's times twice as long, and vpp halves the bubble.
    assert published_bubble("interleaved-1f1b", 5, durations, vpp=2) == 18
    assert (
        published_bubble("zb-h1", 5, durations)
        == published_bubble("interleaved-zero-bubble", 5, durations)
        == 6
    )
    assert published_bubble("interleaved-zero-bubble", 5, durations, vpp=2) is None
    assert published_bubble("zbv", 5, durations) is None
    assert published_bubble("dualpipe", 6, durations) == 6
    assert published_bubble("dualpipev", 3, durations) == 6
    assert published_bubble("mine", 3, durations) is None


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["1f1b", "zb-h1", "zbv", "dualpipe", "dualpipev", "interleaved-1f1b"]),
    st.integers(0, 2**32),
)
def test_longest_path_meets_every_dependency_and_wastes_nothing(name: str, seed: int) -> None:
    schedule = build(name, 4, 8, 2 if name == "interleaved-1f1b" else 1)

    def duration(rank: int, step: Step) -> float:
        return float(1 + crc32(f"{seed} {rank} {step}".encode()) % 7)

    times = longest_path(schedule, duration)
    end_of = {
        key: times[rank][position][1]
        for rank, steps in enumerate(schedule.ranks)
        for position, step in enumerate(steps)
        for action in actions_of(step)
        for key in provides_of(action)
    }
    for rank, steps in enumerate(schedule.ranks):
        free = 0.0
        for position, step in enumerate(steps):
            start, end = times[rank][position]
            needs = [end_of[n] for action in actions_of(step) for n in needs_of(action, schedule.n_stages)]
            assert start == max([free, *needs])
            assert end == start + duration(rank, step)
            free = end


def test_a_schedule_that_cannot_go_on_is_an_input_error() -> None:
    schedule = build("1f1b", 2, 2)
    with pytest.raises(
        InputError, match=r"rank 0 is stuck at position 1 \(0B0\), waiting for 0F0, which no rank"
    ):
        unit_times(replace(schedule, ranks=(schedule.ranks[0][1:], schedule.ranks[1])))


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_durations_must_be_durations(value: float) -> None:
    with pytest.raises(InputError, match="duration overlap"):
        Durations(overlap=value)
