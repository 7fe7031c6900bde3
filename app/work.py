"""What job processes run: functions of plain arguments, found by name, over the public API."""

from __future__ import annotations

import moesim
import moesim.simulator.simulate  # noqa: F401 - loaded before processes are forked
from moesim.simulator.result import Result
from moesim.simulator.scenario import Scenario


def simulate(scenario: Scenario) -> Result:
    """One predicted step."""
    return moesim.simulate(scenario)
