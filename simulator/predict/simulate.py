"""One prediction: scenario in, result out."""

from __future__ import annotations

from moesim.simulator.predict.driver import predict
from moesim.simulator.predict.result import Result
from moesim.simulator.scenario import Scenario


def simulate(scenario: Scenario) -> Result:
    """Predict one training step and the run made of it; see `predict.driver.predict`.

    Raises InputError for an illegal scenario. A plan that does not fit into memory is predicted all the
    same, with `memory.fits` false.
    """
    return predict(scenario).result
