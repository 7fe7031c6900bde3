from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesim.hwmodels.errors import InputError
from moesim.simulator.schedules import (
    SCHEDULES,
    Schedule,
    build,
    from_csv,
    from_json,
    to_csv,
    to_json,
    validate,
)

GOLDEN = Path(__file__).parents[2] / "golden" / "schedules"


def is_legal(name: str, pp: int, microbatches: int, vpp: int) -> bool:
    """The rules as published, stated once more and apart from the code under test."""
    if name in ("interleaved-1f1b", "interleaved-1f1b-overlapped", "interleaved-zero-bubble"):
        return microbatches < pp or microbatches % (microbatches // pp) == 0
    if name == "dualpipe":
        return vpp == 1 and pp % 2 == 0 and microbatches % 2 == 0 and microbatches >= 2 * pp
    if name == "dualpipev":
        return vpp in (1, 2) and microbatches >= 2 * pp
    return vpp in (1, 2) if name == "zbv" else vpp == 1


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    pp = draw(st.integers(1, 9)) if name != "dualpipe" else 2 * draw(st.integers(1, 4))
    vpp = draw(st.integers(1, 4)) if name.startswith("interleaved") else 1
    legal = [m for m in range(1, 40) if is_legal(name, pp, m, vpp)]
    return build(name, pp, draw(st.sampled_from(legal)), vpp)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_small_size_is_valid_or_refused_with_legal_values(name: str) -> None:
    for pp in range(1, 6):
        for microbatches in range(1, 14):
            for vpp in range(1, 4):
                if is_legal(name, pp, microbatches, vpp):
                    schedule = build(name, pp, microbatches, vpp)
                    validate(schedule)
                    assert (schedule.name, schedule.pp) == (name, pp)
                    assert schedule.microbatches == microbatches
                    continue
                with pytest.raises(InputError, match=r"nearest legal") as error:
                    build(name, pp, microbatches, vpp)
                text = str(error.value)
                if "microbatches=" in text:
                    nearest = [int(m) for m in re.findall(r"\d+", text.split("nearest legal:")[1])]
                    assert nearest and all(is_legal(name, pp, m, vpp) for m in nearest)
                    between = range(min(microbatches, *nearest) + 1, max(microbatches, *nearest))
                    assert not any(is_legal(name, pp, m, vpp) for m in between if m not in nearest)


@settings(max_examples=25, deadline=None)
@given(schedules())
def test_random_sizes_are_valid_and_survive_both_text_forms(schedule: Schedule) -> None:
    report = validate(schedule)
    assert max(report.peak_in_flight) <= schedule.microbatches * schedule.n_stages
    assert from_json(to_json(schedule)) == schedule
    assert from_csv(to_csv(schedule), name=schedule.name) == schedule


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.csv")), ids=lambda path: path.stem)
def test_golden_schedules(path: Path) -> None:
    match = re.fullmatch(r"(.+)-pp(\d+)-mb(\d+)(?:-vpp(\d+))?", path.stem)
    assert match is not None
    schedule = build(match[1], int(match[2]), int(match[3]), int(match[4] or 1))
    assert to_csv(schedule) == path.read_text()
    assert from_csv(path.read_text(), name=match[1]) == schedule


@pytest.mark.parametrize(("name", "digest"), json.loads((GOLDEN / "digests.json").read_text()).items())
def test_orders_of_all_small_sizes_are_those_once_compared(name: str, digest: str) -> None:
    # lab/tests/test_schedules_against_pytorch.py computes them from the published implementations.
    orders = hashlib.sha256()
    for pp in range(2, 7):
        for microbatches in range(1, 25):
            for vpp in range(1, 4) if name.startswith("interleaved") else (1,):
                if is_legal(name, pp, microbatches, vpp):
                    schedule = build(name, pp, microbatches, vpp)
                    orders.update(f"{pp} {microbatches} {vpp}\n{to_csv(schedule)}".encode())
    assert orders.hexdigest() == digest


def test_every_schedule_has_a_golden_file() -> None:
    assert {re.sub(r"-pp\d.*", "", path.stem) for path in GOLDEN.glob("*.csv")} == set(SCHEDULES)


@pytest.mark.parametrize(
    ("name", "vpp", "placement", "stages"),
    [
        ("1f1b", 1, "loop", (1,)),
        ("interleaved-1f1b", 3, "loop", (1, 5, 9)),
        ("zbv", 1, "v", (1, 6)),
        ("dualpipev", 2, "v", (1, 6)),
        ("dualpipe", 1, "bidirectional", (1, 2)),
    ],
)
def test_placement_of_stages(name: str, vpp: int, placement: str, stages: tuple[int, ...]) -> None:
    schedule = build(name, 4, 8, vpp)
    assert schedule.placement == placement
    assert schedule.stages_on_rank(1) == stages
    assert schedule.vpp == (2 if placement == "v" else vpp)


def test_dualpipe_action_counts_of_the_home_case() -> None:
    # The eight steps at PP 16, 120 micro-batches: rank h and its mirror, counted by hand.
    report = validate(build("dualpipe", 16, 120))
    for rank in range(16):
        h = min(rank, 15 - rank)
        expected = {"F": 23 - h, "B": 8, "I": 15 - h, "W": 15 - h, "overlap": 97 + h}
        if h == 7:  # the first pair of the middle ranks runs as separate F and B
            expected = {"F": 17, "B": 9, "I": 8, "W": 8, "overlap": 103}
        assert report.ranks[rank].counts == expected


def test_unknown_name_lists_the_valid_ones() -> None:
    with pytest.raises(InputError, match=r"'gpip' is unknown.*gpipe, 1f1b, .*dualpipev"):
        build("gpip", 4, 8)


@pytest.mark.parametrize(
    "sizes", [(0, 8, 1), (4, 0, 1), (4, 8, 0), (-1, 8, 1), (4, 10**9, 1), (10**12, 10**12, 1)]
)
@pytest.mark.parametrize("name", SCHEDULES)
def test_absurd_sizes_are_refused_at_once(name: str, sizes: tuple[int, int, int]) -> None:
    with pytest.raises(InputError, match=r"legal|limit"):
        build(name, *sizes)
