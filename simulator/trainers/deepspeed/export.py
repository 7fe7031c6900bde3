"""A plan for DeepSpeed, as its JSON configuration and the arguments of the script that it wraps."""

from __future__ import annotations

from moesim.simulator.scenario import Scenario
from moesim.simulator.trainers.deepspeed.configuration import deepspeed_plan, problems
from moesim.simulator.trainers.export import ConfigurationFile
from moesim.simulator.trainers.facts import PlanFacts


def deepspeed_export(scenario: Scenario, version: str) -> ConfigurationFile:
    """The configuration of a scenario's plan; raises InputError for what cannot be loaded, and a fleet."""
    plan, label = deepspeed_plan(scenario), f"DeepSpeed {version}"
    return ConfigurationFile(label, plan.script(label), plan.unspelled, arguments=plan.arguments)


def deepspeed_problems(plan: PlanFacts, version: str) -> tuple[str, ...]:
    """Reasons why DeepSpeed cannot run a plan; there is one supported version."""
    return problems(plan)
