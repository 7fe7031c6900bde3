"""A plan for torchtitan: TOML for the release that reads it, a configuration function for newer ones."""

from __future__ import annotations

from moesim.simulator.scenario import Scenario
from moesim.simulator.trainers.export import ConfigurationFile
from moesim.simulator.trainers.torchtitan.releases import WITH_TOML
from moesim.simulator.trainers.torchtitan.snippet import torchtitan_snippet
from moesim.simulator.trainers.torchtitan.subject import titan_plan
from moesim.simulator.trainers.torchtitan.toml import torchtitan_command, torchtitan_toml


def torchtitan_export(scenario: Scenario, version: str) -> ConfigurationFile:
    """The configuration of a release of torchtitan for a scenario's plan.

    Raises InputError for a model or cluster that cannot be loaded, and for a fleet.
    """
    label = f"torchtitan {version}"
    if version == WITH_TOML:
        configuration = torchtitan_toml(scenario)
        words = torchtitan_command("${PLAN_FILE}")
        return ConfigurationFile(label, configuration.text, configuration.unspelled, words)
    text = torchtitan_snippet(scenario)
    return ConfigurationFile(label, text, titan_plan(scenario, version).missing)
