"""Scenarios, which hold all inputs of a prediction: their sections, their defaults and the reader."""

from moesim.simulator.scenario.loading import AnyScenario, load_scenario, preset_names, with_overrides
from moesim.simulator.scenario.scenario import Scenario

__all__ = ["AnyScenario", "Scenario", "load_scenario", "preset_names", "with_overrides"]
