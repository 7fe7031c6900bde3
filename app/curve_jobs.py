"""The function of plain arguments that job processes run for the page Curves."""

from __future__ import annotations

from moesim.app import budget
from moesim.simulator.scenario import Scenario
from moesim.simulator.studies.curves import AxisName, CurvePoint, curve_point


def points(scenario: Scenario, name: AxisName, values: tuple[float, ...]) -> tuple[CurvePoint, ...]:
    """Some points of one curve; what exceeds the dashboard's limits is a point with the reason."""
    return tuple(curve_point(scenario, name, value, budget.admit) for value in values)
