"""Predicted and measured GPU time of our own runs by class of kernel."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from lab.scoring.own_runs import scenario_of
from moesim.simulator.model.operator import Operator
from moesim.simulator.predict.step import Prepared
from moesim.simulator.predict.step import ExecutedStep, run_step
from moesim.simulator.predict.trace import chrome_trace, trace_info
from moesim.simulator.predict.trace import COMMUNICATION, COMPUTE, INSIDE, SHARDING, ShownGpus

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
    return classes_of(run_step(scenario_of(name, *overrides)))


def classes_of(step: ExecutedStep) -> dict[str, float]:
    """Seconds of an executed step by class of kernel on one GPU."""
    found = _compute(step.prepared)
    execution, info = step.executions[0], trace_info(step.prepared)
    events = chrome_trace([ShownGpus(execution, info, ((0, 0),))])["traceEvents"]
    for event in events:
        if event["ph"] != "X":
            continue
        label, seconds = str(event["name"]), float(event["dur"]) * 1e-6
        waits = "notify" in label or "prepare" in label
        if event["tid"] == INSIDE or (event["tid"] == COMMUNICATION and not waits):
            found["all-to-all"] += seconds  # inside a phase: those that recompute repeats
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


_OPERATORS: dict[str, tuple[str, ...]] = {
    "routing and rows": (
        "index", "index_select", "index_add_", "_index_put_impl_", "index_put", "sort", "topk", "histc",
        "cumsum", "gather", "scatter", "scatter_add_", "bmm", "arange", "floor_divide", "argsort",
    ),
    "optimizer and clipping": ("_fused_adamw_", "_foreach_norm", "_foreach_mul_", "linalg_vector_norm"),
    "copies of FSDP": ("_chunk_cat", "split_with_sizes_copy", "_foreach_copy_", "div"),
    "embedding, loss, logits": (
        "_log_softmax", "_log_softmax_backward_data", "nll_loss_forward", "nll_loss_backward", "embedding",
        "embedding_dense_backward",
    ),
}  # fmt: skip
_LARGE = 1_000_000


def measured_class(operator: str, shapes: str, kernel: str, vocabulary: int, hidden: int) -> str:
    """Class of a profiled kernel by its name, and by the operator that launched it with its input shapes."""
    name, low = operator.removeprefix("aten::"), kernel.lower()
    first = shapes.removeprefix("[").split("]")[0].strip("[")
    sizes = [int(part) for part in first.split(",") if part.strip().isdigit()]
    if "nccl" in low:
        kinds = {"sendrecv": "all-to-all", "allreduce": "optimizer and clipping"}
        return next((v for k, v in kinds.items() if k in low), "collectives of FSDP")
    if "attention" in low or "attention" in name or "cudnn::fusion" in low:
        return "attention"
    if name == "_grouped_mm":
        return "grouped GEMM"
    if name in ("mm", "addmm"):
        return "GEMM of the head" if str(vocabulary) in shapes else "GEMM of a layer"
    if name in _OPERATORS["optimizer and clipping"]:
        return "optimizer and clipping"
    if name in _OPERATORS["copies of FSDP"] or (len(sizes) == 1 and sizes[0] >= _LARGE):
        return "copies of FSDP"
    if name in _OPERATORS["embedding, loss, logits"] or str(vocabulary) in shapes:
        return "embedding, loss, logits"
    if "rms_norm" in name:
        return "norm"
    rows = len(sizes) == 2 and sizes[1] == hidden and name in ("fill_", "cat", "copy_", "zero_")
    weighted = len(sizes) == 3 and sizes[-1] == hidden and name == "copy_"
    if name in _OPERATORS["routing and rows"] or rows or weighted or "fill_indices" in low:
        return "routing and rows"
    return "activation, rope, residual, bias"


def measured_classes(
    rows: Sequence[Mapping[str, Any]], kernels: Sequence[Mapping[str, Any]], vocabulary: int, hidden: int
) -> dict[str, float]:
    """Measured seconds of a profiled step by class.

    `rows`: kernels with their operators. Collectives, whose kernels also wait, are taken from `kernels`, a
    step that was profiled without operators.
    """
    found: defaultdict[str, float] = defaultdict(float)
    for row in rows:
        if "nccl" not in row["kernel"].lower():
            kind = measured_class(row["operator"], row["shapes"], row["kernel"], vocabulary, hidden)
            found[kind] += row["seconds"]
    for row in kernels:
        if "nccl" in row["name"].lower():
            found[measured_class("", "", row["name"], vocabulary, hidden)] += row["seconds"]
    return {kind: found.get(kind, 0.0) for kind in CLASSES}
