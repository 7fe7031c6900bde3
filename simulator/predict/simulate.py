"""One prediction: scenario in, result out."""

from __future__ import annotations

from moesim.simulator.engine.simpy.execute import execute_all
from moesim.simulator.predict.compile import prepare
from moesim.simulator.predict.fleet_simulate import simulate_fleet
from moesim.simulator.predict.result import Result
from moesim.simulator.predict.summarise import summarise
from moesim.simulator.scenario import Scenario


def simulate(scenario: Scenario) -> Result:
    """Predict one training step and the run made of it.

    Raises InputError for an illegal scenario. A plan that does not fit into memory is predicted all the
    same, with `memory.fits` false.
    """
    if scenario.fleet is not None:
        return simulate_fleet(scenario)
    prepared = prepare(scenario)
    return summarise(prepared, execute_all(prepared.programs))
