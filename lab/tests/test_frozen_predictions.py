"""Frozen predictions that nobody rewrites: MLPerf's runs and our own."""

from __future__ import annotations

from typing import Any

import pytest

from lab.scoring import mlperf_frozen, own_runs
from lab.scoring.frozen_predictions import Freezes, StepInterval, digest
from moesim.simulator.scoring import mlperf

FILES: list[tuple[Freezes[Any], list[str]]] = [
    (mlperf_frozen.FREEZES, [run.name for run in mlperf.runs()]),
    (own_runs.FREEZES, [run.name for run in own_runs.file().runs]),
]


@pytest.mark.parametrize(("freezes", "names"), FILES)
def test_frozen_predictions_are_those_that_were_frozen(freezes: Freezes[Any], names: list[str]) -> None:
    """A changed line of the frozen file needs a changed digest in the code: nobody does both by accident."""
    lines = freezes.lines()
    assert freezes.changed(lines) == ()
    for date in freezes.digests:
        assert [line.name for line in lines if line.date == date] == names
    assert all(line.p10_s < line.p50_s < line.p90_s for line in lines)


@pytest.mark.parametrize(("freezes", "names"), FILES)
def test_a_rewritten_freeze_is_found(freezes: Freezes[Any], names: list[str]) -> None:
    first, *rest = freezes.lines()
    last = list(type(first).model_fields)[-1]
    for change in ({"step_s": first.step_s * 1.01}, {last: "no" if last == "fits" else 1.0}):
        assert freezes.changed((first.model_copy(update=change), *rest)) == (first.date,)
    unknown = first.model_copy(update={"date": "2026-12-01 00:00"})
    assert freezes.changed((first, *rest, unknown)) == (unknown.date,)


def test_a_new_block_is_written_as_it_is_read() -> None:
    freezes = own_runs.FREEZES
    block = [line for line in freezes.lines() if line.date == next(iter(freezes.digests))]
    head, *rows = freezes.as_csv(block, header=True).splitlines()
    assert head.split(",") == list(own_runs.FrozenRun.model_fields) and len(rows) == len(block)
    assert freezes.as_csv(block, header=False).splitlines() == rows
    assert digest(block) == next(iter(freezes.digests.values()))


def test_seconds_are_rounded_to_a_tenth_of_a_millisecond() -> None:
    assert StepInterval(1.23456, 1.0, 1.1, 1.3).rounded()["step_s"] == 1.2346
