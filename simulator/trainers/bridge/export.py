"""A plan for Megatron-Bridge, as settings of its configuration."""

from __future__ import annotations

from moesim.simulator.scenario import Scenario
from moesim.simulator.trainers.bridge.overrides import bridge_overrides, problems
from moesim.simulator.trainers.export import ConfigurationFile
from moesim.simulator.trainers.facts import PlanFacts


def bridge_export(scenario: Scenario, version: str) -> ConfigurationFile:
    """The settings of a scenario's plan; raises InputError for a model or cluster that cannot be loaded."""
    settings = bridge_overrides(scenario)
    return ConfigurationFile(f"Megatron-Bridge {version}", settings.text(), settings.unspelled)


def bridge_problems(plan: PlanFacts, version: str) -> tuple[str, ...]:
    """Reasons why Megatron-Bridge cannot run a plan; there is one supported version."""
    return problems(plan)
