"""The text with which a scenario prints itself (pure; loads nothing)."""

from __future__ import annotations

from collections.abc import Sequence

from moesim.hwmodels.frozen import count, titled
from moesim.simulator.scenario.parallel import ParallelPlan
from moesim.simulator.scenario.sections import Batch, Communication


def scenario_text(
    name: str,
    *,
    model: object,
    machines: Sequence[object],
    parallel: ParallelPlan,
    order: str,
    batch: Batch,
    rates: tuple[object, object],
    communication: Communication,
    mode: str,
    chosen: int,
) -> str:
    """The main keys of a scenario, in about ten lines; an inline description is named, not printed.

    `rates`: profile and precision. `chosen`: number of keys that rules chose.
    """
    degrees = [(key, getattr(parallel, key)) for key in ("tp", "cp", "pp", "vpp", "ep", "expert_tp")]
    shown = " ".join(f"{key}={degree}" for key, degree in degrees if degree > 1) or "no parallelism"
    joined = ", ".join(map(_name, machines))
    return titled(
        f"Scenario {name}",
        {
            "model": _name(model),
            "machines": joined if len(machines) == 1 else f"fleet of {joined}",
            "plan": f"{shown} microbatch={parallel.microbatch} zero_stage={parallel.zero_stage}",
            "schedule": order,
            "batch": f"{count(batch.sequences, 'sequence')} of {batch.sequence_length:,} tokens",
            "profile": f"{_name(rates[0])}, precision {_name(rates[1])}",
            "kernels": f"{communication.kernels}, {count(communication.sms, 'SM')}",
            "resolution": mode.removesuffix(", 0 faults"),
            "defaults": f"{count(chosen, 'key')} chosen by rule: .defaults" if chosen else "",
            "more": ".to_dict(), .resolved(), .replace(...)",
        },
    )


def _name(value: object) -> str:
    """A name as stated, or that of an inline description, or its accelerator or node with the count."""
    if isinstance(value, str):
        return value or "chosen by rule"
    name = getattr(value, "name", None)
    if isinstance(name, str):
        return name
    node = getattr(value, "node", None)
    machine = getattr(value, "accelerator", None) or (None if node is None else _name(node))
    nodes = getattr(value, "nodes", None)
    return f"{count(nodes, 'node')} of {machine}" if isinstance(nodes, int) else "stated inline"
