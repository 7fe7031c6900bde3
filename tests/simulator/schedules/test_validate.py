from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesim.hwmodels.errors import InputError
from moesim.simulator.schedules import Schedule, Step, build, from_csv, validate

BASES = [
    build("1f1b", 3, 4),
    build("zbv", 2, 4),
    build("dualpipe", 4, 8),
    build("interleaved-zero-bubble", 2, 4, 2),
]


def with_rank(schedule: Schedule, rank: int, steps: list[Step]) -> Schedule:
    ranks = list(schedule.ranks)
    ranks[rank] = tuple(steps)
    return replace(schedule, ranks=tuple(ranks))


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(BASES), st.data())
def test_a_dropped_repeated_or_misplaced_step_is_found(schedule: Schedule, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, schedule.pp - 1))
    steps = list(schedule.ranks[rank])
    position = data.draw(st.integers(0, len(steps) - 1))
    step = steps[position]
    with pytest.raises(InputError, match=rf"rank {rank}, position {len(steps) - 1} .* is missing"):
        validate(with_rank(schedule, rank, steps[:position] + steps[position + 1 :]))
    with pytest.raises(InputError, match=rf"rank {rank}, position {len(steps)}: .* repeats"):
        validate(with_rank(schedule, rank, [*steps, step]))
    other = (rank + 1) % schedule.pp
    moved = with_rank(schedule, rank, steps[:position] + steps[position + 1 :])
    with pytest.raises(InputError, match=rf"rank {other}, position 0: .* wrong rank"):
        validate(with_rank(moved, other, [step, *schedule.ranks[other]]))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n1B0,1F0\n", r"rank 1 is stuck at position 0 \(1B0\), waiting for 1F0, .* at position 1"),
        ("0B0,0F0\n1F0,1B0\n", r"rank 0 is stuck at position 0 \(0B0\), waiting for 0F0, .* at position 1"),
        ("0F0,0W0,0I0\n", r"rank 0 is stuck at position 1 \(0W0\), waiting for 0I0, .* at position 2"),
        (
            "0F0,0B1,0F1,0B0\n1F0,1B0,1F1,1B1\n2F0,2B0,2F1,2B1\n",
            r"rank 0 is stuck at position 1 \(0B1\), waiting for 0F1, .* at position 2, after 0B1",
        ),
        ("(0F0;0B0)OVERLAP_F_B\n", r"stuck at position 0 .* waiting for 0F0, .* runs in the same step"),
        ("0F0,0I0\n", r"rank 0, position 2 \(its end\): 0W0 is missing"),
        ("0F0\n", r"rank 0, position 1 \(its end\): 0B0 is missing"),
        ("0F0,0B0,0W0\n", r"rank 0, position 2: 0W0 repeats work that position 1 of rank 0 does"),
        ("0F0,0I0,0B0\n", r"rank 0, position 2: 0B0 repeats"),
        ("0F0,0B0,1B0\n", r"rank 0, position 2: 1B0 is out of range"),
        ("0F0,0F1,0B0,0B1\n1F0,1B0\n1F1,1B1\n", r"rank 2, position 0: 1F1 is on the wrong rank: .* rank 1"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        from_csv(text)


def test_a_circle_across_ranks_is_found() -> None:
    # Each rank alone is in a sensible order; together each waits for the other.
    text = "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n"
    with pytest.raises(
        InputError, match=r"rank \d is stuck at position 1 \((0B0|1F1)\), waiting for (1B0|0F1)"
    ):
        from_csv(text)


def test_peak_in_flight_as_published() -> None:
    assert validate(build("gpipe", 4, 9)).peak_in_flight == (9, 9, 9, 9)
    assert validate(build("1f1b", 4, 9)).peak_in_flight == (4, 3, 2, 1)
    assert validate(build("1f1b", 8, 2)).peak_in_flight == (2, 2, 2, 2, 2, 2, 2, 1)
    assert max(validate(build("zb-h1", 8, 24)).peak_in_flight) == 8
    assert max(validate(build("zbv", 8, 24)).peak_in_flight) == 16  # halves of a 1F1B stage
    assert set(validate(build("dualpipe", 16, 120)).peak_in_flight) == {17}  # PP + 1
    assert set(validate(build("dualpipev", 8, 120)).peak_in_flight) == {17}


def test_peak_says_which_stages_hold_it_and_what_an_input_gradient_frees() -> None:
    report = validate(from_csv("0F0,0F1,0I0,0I1,0W0,0W1\n"))
    assert report.ranks[0].peak_stages == ((0, 2),)
    late = validate(from_csv("0F0,0I0,0F1,0I1,0W0,0W1\n")).ranks[0]
    assert (late.peak_in_flight, late.peak_until_input_gradient) == (2, 1)
    assert validate(build("dualpipe", 16, 120)).ranks[0].peak_stages == ((0, 16), (15, 1))
