"""Predicts a scenario and returns its result."""

from __future__ import annotations

from moesim.simulator.predict.driver import predict
from moesim.simulator.predict.result import Result
from moesim.simulator.scenario import Scenario


def simulate(scenario: Scenario) -> Result:
    """Predict one training step and the run that consists of such steps; see `predict.driver.predict`.

    Raises InputError for an illegal scenario. A plan that does not fit into memory is still predicted, with
    `memory.fits` false.
    """
    return predict(scenario).result
