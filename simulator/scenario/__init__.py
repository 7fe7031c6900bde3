"""Scenarios, which hold all inputs of a prediction: their sections, their defaults and the reader."""

from moesim.simulator.scenario.scenario import Scenario, load_scenario, preset_names, with_overrides

__all__ = ["Scenario", "load_scenario", "preset_names", "with_overrides"]
