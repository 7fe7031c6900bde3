"""Ranges of run-to-run noise and expert load as sources of an interval."""

from __future__ import annotations

import pytest

import moesim
from moesim.simulator.predict.driver import predict
from moesim.simulator.scenario import Scenario
from moesim.simulator.studies.effects import entry_effects
from moesim.simulator.studies.sources import JITTER
from moesim.simulator.studies.uncertainty import uncertainty


@pytest.mark.parametrize(
    ("key", "value", "between"),
    [(JITTER, 0.02, [0.01, 0.04]), ("routing.expert_load_cv", 0.16, [0.08, 0.32])],
)
def test_noise_and_load_to_first_order(small: Scenario, key: str, value: float, between: list[float]) -> None:
    """Against the engine with another spread, the same seeds; without a range there is no source."""
    assert key not in {e.source.id for e in entry_effects(*predict(small)[:2])}
    number = {"value": value, "between": between, "kind": "assumed", "source": "test", "date": "2026"}
    spread = small.replace(**{key: number})
    prepared, executions, result = predict(spread)
    effect = next(e for e in entry_effects(prepared, executions) if e.source.id == key)
    assert effect.seconds[0] < 0.0 < effect.seconds[1]
    other = spread.replace(**{key: value * (1 + effect.at[1])})
    exact = moesim.simulate(other).step.time_s - result.step.time_s
    assert effect.seconds[1] == pytest.approx(exact, rel=0.35)
    first = next(row for row in uncertainty(prepared, executions, result).sources if row.source == key)
    assert first.low_s < result.step.time_s < first.high_s
