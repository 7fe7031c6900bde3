"""The text with which a scenario prints itself (pure; loads nothing)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moesim.simulator.common.summary_text import count, titled

if TYPE_CHECKING:
    from moesim.simulator.scenario.scenario import Scenario


def scenario_text(scenario: Scenario) -> str:
    """The main keys of a scenario, in about ten lines; an inline description is named, not printed."""
    plan, batch = scenario.parallel, scenario.batch
    degrees = [(name, getattr(plan, name)) for name in ("tp", "cp", "pp", "vpp", "ep", "expert_tp")]
    shown = " ".join(f"{name}={degree}" for name, degree in degrees if degree > 1)
    chosen = len(scenario._defaults)
    return titled(
        f"Scenario {scenario.name}",
        {
            "model": _name(scenario.model),
            "machines": _machines(scenario),
            "plan": f"{shown or 'no parallelism'} microbatch={plan.microbatch} zero_stage={plan.zero_stage}",
            "schedule": f"{scenario.schedule}, recompute={scenario.recompute}",
            "batch": f"{count(batch.sequences, 'sequence')} of {batch.sequence_length:,} tokens",
            "profile": f"{_name(scenario.profile)}, precision {_name(scenario.precision)}",
            "kernels": f"{scenario.communication.kernels}, {count(scenario.communication.sms, 'SM')}",
            "resolution": f"{scenario.resolution}, seed {scenario.seed}"
            + (f", {count(len(scenario.faults), 'fault')}" if scenario.faults else ""),
            "defaults": f"{count(chosen, 'key')} chosen by rule: .defaults" if chosen else "",
            "more": ".to_dict(), .resolved(), .replace(...)",
        },
    )


def _machines(scenario: Scenario) -> str:
    if scenario.fleet is None:
        return _name(scenario.cluster)
    return "fleet of " + ", ".join(_name(pool.cluster) for pool in scenario.fleet.pools)


def _name(value: object) -> str:
    """A name as stated, or that of an inline description, or its accelerator or node with the count."""
    if isinstance(value, str):
        return value or "chosen by rule"
    name = getattr(value, "name", None)
    if isinstance(name, str):
        return name
    machine = getattr(value, "accelerator", None) or _name(getattr(value, "node", None))
    nodes = getattr(value, "nodes", None)
    return f"{count(nodes, 'node')} of {machine}" if isinstance(nodes, int) else "stated inline"
