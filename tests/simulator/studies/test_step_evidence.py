"""Residuals of an interval are weighed by what a step runs, not by how the code came to its prices."""

from __future__ import annotations

from math import fsum
from pathlib import Path

import pytest

from moesim.simulator.engine.program import Program
from moesim.simulator.predict.step import prepare
from moesim.simulator.scenario import Scenario, load_scenario
from moesim.simulator.studies.sources import step_evidence
from moesim.simulator.studies.uncertainty import with_uncertainty


def compute_s(program: Program) -> float:
    """Seconds of all compute of a program at even load, and of its optimizers."""
    phases = [
        task.price.fixed_s + task.price.row_s - task.price.exposed_s - task.price.host_s
        for steps in program.ranks
        for step in steps
        for task in step.code.tasks
    ]
    return fsum(phases) + fsum(sync.optimizer_s for sync in program.costs.sync)


def test_the_readings_of_a_step_are_all_of_its_compute(small: Scenario) -> None:
    program = prepare(small).program
    readings = step_evidence(program).readings
    assert fsum(reading.seconds for reading in readings) == pytest.approx(compute_s(program), rel=1e-12)


def test_twice_the_micro_batches_read_twice_the_seconds(small: Scenario) -> None:
    """In a schedule without pairs: in one with them more micro-batches also mean a larger share of pairs."""
    small = small.replace(schedule="1f1b")
    twice = small.replace(**{"batch.sequences": 2 * small.batch.sequences})
    one, two = (
        {reading.entry: reading.seconds for reading in step_evidence(prepare(scenario).program).readings}
        for scenario in (small, twice)
    )
    grown = {entry: two[entry] / one[entry] for entry in one}
    assert max(grown.values()) == pytest.approx(2.0) and list(one) == list(two)
    assert sorted(grown.values())[3] > 1.9  # all but the optimizer's entries: norm, AdamW, and a prior


def test_layers_written_out_have_the_interval_of_automatic_ones() -> None:
    """Automatic placement prices every block once more than written-out layers do; the step is the same."""
    automatic = load_scenario(str(Path(__file__).parents[2] / "golden" / "scenario-small.yaml"))
    layers = prepare(automatic).stages.layers_per_stage
    written = automatic.replace(**{"stages.layers": list(layers)})
    one, two = (with_uncertainty(scenario) for scenario in (automatic, written))
    assert one.uncertainty is not None and two.uncertainty is not None
    assert one.step.time_s == two.step.time_s
    assert one.uncertainty.bands == two.uncertainty.bands
    assert one.uncertainty.sources == two.uncertainty.sources
