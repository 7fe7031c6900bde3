"""A short run of the fuzzing harness, and the harness itself: it tells what is wrong."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fuzz
import pytest
from fuzz_base import Target
from fuzz_mutator import Mutator, values_of
from fuzz_targets import TARGETS

from moesim.hwmodels.errors import InfeasibleError, InputError

CASES = 200
"""`make proof` runs tens of thousands; these see that every kind of reader still stands."""


def test_some_hundred_cases_are_understood_or_refused() -> None:
    whole = fuzz.Report()
    for report in fuzz.run(1, 0, CASES):
        whole.add(report)
    assert whole.cases == CASES
    assert not whole.findings, "\n".join(f"case {f.number}: {f}" for f in whole.findings)
    assert sum(n for (_, outcome), n in whole.outcomes.items() if outcome == "legal") > CASES / 20


def test_every_reader_is_drawn() -> None:
    drawn = {fuzz.case(3, number)[0].name for number in range(1000)}
    assert {target.name for target in TARGETS if target.weight > 1} <= drawn


def test_a_case_is_always_the_same() -> None:
    assert [fuzz.case(4, n)[1] for n in range(50)] == [fuzz.case(4, n)[1] for n in range(50)]


@pytest.fixture
def timer() -> Iterator[None]:
    old = signal.signal(signal.SIGPROF, fuzz._too_slow)
    yield
    signal.signal(signal.SIGPROF, old)


def outcome_of(
    read: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[set[str], list[fuzz.Finding]]:
    target = Target("a reader", 1, lambda mutator: None, read)
    monkeypatch.setattr(fuzz, "case", lambda seed, number: (target, None, random.Random(0)))
    report = fuzz.run_here(0, [7], tmp_path)
    return {outcome for _, outcome in report.outcomes}, report.findings


@pytest.mark.parametrize(
    "error", [InputError("no"), InfeasibleError("no"), OSError("no"), MemoryError(), RecursionError()]
)
def test_a_refusal_is_right_and_any_other_exception_wrong(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: object) -> None:
        raise error

    outcomes, findings = outcome_of(read, tmp_path, monkeypatch)
    if isinstance(error, InputError | InfeasibleError):
        assert (outcomes, findings) == ({"refused"}, [])
    else:
        assert outcomes == {"wrong"}
        assert findings[0].number == 7 and findings[0].what.startswith(type(error).__name__)


def test_a_case_that_does_not_end_is_wrong(
    timer: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: object) -> None:
        while True:
            pass

    monkeypatch.setattr(fuzz, "MOST_S", 0.05)
    outcomes, findings = outcome_of(read, tmp_path, monkeypatch)
    assert outcomes == {"wrong"} and findings[0].what.startswith("TooSlowError")


def test_changed_data_differs_and_the_original_stays() -> None:
    data = {"a": [1, 2.5, {"b": "50 GB/s"}], "c": None, "d": True}
    before = repr(data)
    texts = {(m := Mutator(random.Random(n), values_of(data))).text_of(m.data(data)) for n in range(200)}
    assert repr(data) == before and len(texts) > 100
