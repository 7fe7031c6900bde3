"""Everything that a prediction depends on: the sections of a scenario, their defaults, and the reader."""

from moesim.simulator.scenario.scenario import Scenario, load_scenario, preset_names, with_overrides

__all__ = ["Scenario", "load_scenario", "preset_names", "with_overrides"]
