"""A plan for DeepSpeed, as its JSON configuration."""

from __future__ import annotations

from moesim.simulator.scenario import Scenario
from moesim.simulator.trainers.deepspeed.configuration import deepspeed_plan, problems
from moesim.simulator.trainers.export import ConfigurationFile
from moesim.simulator.trainers.facts import PlanFacts


def deepspeed_export(scenario: Scenario, version: str) -> ConfigurationFile:
    """The configuration of a scenario's plan; raises InputError for what cannot be loaded, and a fleet."""
    plan = deepspeed_plan(scenario)
    return ConfigurationFile(f"DeepSpeed {version}", plan.text(), plan.unspelled)


def deepspeed_problems(plan: PlanFacts, version: str) -> tuple[str, ...]:
    """Reasons why DeepSpeed cannot run a plan; there is one supported version."""
    return problems(plan)
