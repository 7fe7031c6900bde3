"""Predicted GPU time of our own runs by class of kernel, to be put beside a profile's."""

from __future__ import annotations

from collections import defaultdict

from moesim.simulator.model.operator import Operator
from moesim.simulator.predict.prepared import Prepared
from moesim.simulator.predict.step import run_step
from moesim.simulator.predict.trace import chrome_trace, trace_info
from moesim.simulator.predict.trace_events import COMMUNICATION, COMPUTE, SHARDING, ShownGpus
from moesim.simulator.scoring.own_runs import scenario_of

CLASSES = (
    "attention",
    "grouped GEMM",
    "GEMM of a layer",
    "GEMM of the head",
    "routing and rows",
    "activation, rope, residual, bias",
    "norm",
    "embedding, loss, logits",
    "copies of FSDP",
    "optimizer and clipping",
    "all-to-all",
    "collectives of FSDP",
)
"""Classes of kernels, in the order of the page."""

_BY_OPERATOR = {
    "attention_forward": "attention",
    "attention_backward": "attention",
    "attention_pre_post": "attention",
    "grouped_gemm": "grouped GEMM",
    "gate_gemm": "GEMM of a layer",
    "permute": "routing and rows",
    "topk": "routing and rows",
    "norm": "norm",
    "embedding": "embedding, loss, logits",
    "loss": "embedding, loss, logits",
    "copy": "embedding, loss, logits",
}


def class_of(op: Operator, head: bool) -> str:
    """Class of an operator; `head` for those of the output head."""
    if op.cls in ("gemm", "wgrad_gemm"):
        if op.gemm is not None and op.gemm.groups > 1:
            return "grouped GEMM"
        return "GEMM of the head" if head else "GEMM of a layer"
    if op.name.startswith("fsdp."):
        return "copies of FSDP"
    return _BY_OPERATOR.get(op.cls, "activation, rope, residual, bias")


def predicted_classes(name: str, *overrides: str) -> dict[str, float]:
    """Predicted seconds of a step by class of kernel on one GPU; kernels beside each other all count."""
    step = run_step(scenario_of(name, *overrides))
    found = _compute(step.prepared)
    execution, info = step.executions[0], trace_info(step.prepared)
    events = chrome_trace([ShownGpus(execution, info, ((0, 0),))])["traceEvents"]
    for event in events:
        if event["ph"] != "X":
            continue
        label, seconds = str(event["name"]), float(event["dur"]) * 1e-6
        if event["tid"] == COMMUNICATION and "notify" not in label and "prepare" not in label:
            found["all-to-all"] += seconds
        elif event["tid"] == SHARDING:
            found["collectives of FSDP"] += seconds
        elif event["tid"] == COMPUTE and label == "optimizer":
            found["optimizer and clipping"] += seconds
    return {kind: found.get(kind, 0.0) for kind in CLASSES}


def _compute(prepared: Prepared) -> defaultdict[str, float]:
    """Seconds of the operators of all blocks, each as if it ran alone."""
    pricer, shape = prepared.pricer, prepared.shape
    found: defaultdict[str, float] = defaultdict(float)
    for kind in shape.block_kinds:
        block, times = shape.block(kind), shape.layer_counts.get(kind, 1)
        for phase, operators in pricer.operators(kind).items():
            costs = pricer.operator_costs(kind, phase, "alone")
            for op, cost in zip(operators, costs, strict=True):
                found[class_of(op, block.is_head)] += times * cost.seconds
    return found
