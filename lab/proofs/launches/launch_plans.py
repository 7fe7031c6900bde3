"""The plan of an imported launch file as plain data, to be compared with one written down by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moesim.simulator.scenario import Scenario


def plan_of(scenario: Scenario) -> dict[str, Any]:
    """Degrees, batch, sharding, recomputation, formats, overlap and sizes of the model, under short names.

    `overlap` says whether data-parallel communication is hidden, `attention` which kernel computes it.
    """
    parallel, shape = scenario.parallel, scenario.shape
    attention = shape.attention
    moe = shape.moe
    return {
        "gpus": sum(machine.nodes * machine.node.n_gpus for machine in scenario.machines),
        "tp": parallel.tp,
        "pp": parallel.pp,
        "cp": parallel.cp,
        "ep": parallel.ep,
        "etp": parallel.expert_tp,
        "vpp": parallel.vpp,
        "sp": parallel.sequence_parallel,
        "mbs": parallel.microbatch,
        "gbs": scenario.batch.sequences,
        "seq": scenario.batch.sequence_length,
        "zero": parallel.zero_stage,
        "recompute": scenario.recompute if isinstance(scenario.recompute, str) else list(scenario.recompute),
        "linear": scenario.recipe.linear,
        "overlap": scenario.software.overlap_data_parallel,
        "attention": scenario.software.attention,
        "layers": shape.n_layers,
        "hidden": shape.hidden,
        "ffn": shape.dense_ffn,
        "heads": getattr(attention, "heads", None),
        "kv_heads": getattr(attention, "kv_heads", None),
        "vocab": shape.vocab,
        "gated": shape.ffn_gated,
        "tied": shape.tied_embeddings,
        "mtp": shape.mtp_layers,
        "experts": 0 if moe is None else moe.experts,
        "top_k": 0 if moe is None else moe.top_k,
        "expert_ffn": 0 if moe is None else moe.expert_ffn,
        "shared_ffn": 0 if moe is None else moe.shared_experts * moe.shared_ffn,
        "stages": None
        if scenario.stages is None or not scenario.stages.layers
        else list(scenario.stages.layers),
        "kernels": scenario.communication.kernels,
    }


def differences(expected: Mapping[str, Any], plan: Mapping[str, Any]) -> list[str]:
    """Sentences on the expected values that a plan does not have; an unknown name is one as well."""
    return [
        f"{name} is {plan.get(name)!r} and should be {value!r}"
        for name, value in expected.items()
        if name not in plan or plan[name] != value
    ]


def summary(plan: Mapping[str, Any]) -> str:
    """One line on a plan."""
    recompute = plan["recompute"] if isinstance(plan["recompute"], str) else "+".join(plan["recompute"])
    return (
        f"{plan['gpus']} GPUs, TP{plan['tp']} PP{plan['pp']} EP{plan['ep']} CP{plan['cp']} VPP{plan['vpp']}, "
        f"MBS {plan['mbs']}, GBS {plan['gbs']}, ZeRO {plan['zero']}, {recompute}, {plan['linear']}"
    )
