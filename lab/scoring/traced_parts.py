"""Steps and parts of three traced runs on two H100, as predicted by the shipped profile and by one calibrated on them.

    python -m lab.scoring.traced_parts FOLDER [PROFILE]

FOLDER holds the traces by their names below (PyTorch's profiler, one step of rank 0, recorded by others; scores only). The scenarios
are in `data/h100x2/`, the calibrations (`moesim calibrate --quick --model SCENARIO` on one H100, no trace seen) in `lab/results/`.
A part is a kind of operator; its kernels are counted beside its time. Communication of one rank holds its waits for the other.
"""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from lab import packed

from moesim.simulator.cost.data_parallel import gather_copies
from moesim.simulator.model.operator import Operator
from moesim.simulator.predict.driver import predict
from moesim.simulator.predict.step import ExecutedStep, run_step
from moesim.simulator.predict.trace import (
    COMMUNICATION,
    COMPUTE,
    INSIDE,
    SHARDING,
    ShownGpus,
    chrome_trace,
    trace_info,
)
from moesim.simulator.scenario import load_scenario
from moesim.simulator.trace import read
from moesim.simulator.trace.classes import CLASSES
from moesim.simulator.trace.events import MEMSET, PHASES
from moesim.simulator.trace.read import RankTrace

HERE = Path(__file__).parent / "data" / "h100x2"
PROFILE = "h100-from-h200"


class Run(NamedTuple):
    """Trace, hidden size, vocabulary and measured median step (s) of a run."""

    file: str
    hidden: int
    vocabulary: int
    measured_s: float


RUNS = {
    "q30": Run("trace_q30L6_fsdp2_ep2_sac.json.gz", 2048, 151_936, 0.4544179),
    "l8b": Run("trace_l8bL8_fsdp2_sac.json.gz", 4096, 128_256, 0.5447933),
    "ds16": Run("trace_ds16bL10_pp2_1f1b_bf16.json.gz", 2048, 102_400, 0.9822994),
}
MOE = (
    "routing",
    "expand",
    "reduce",
    "reduce backward",
    "expand backward",
    "grouped GEMM",
    "gate GEMM",
    "activation",
)
"""Parts of a layer with experts; the first five are what `permute` and `topk` stand for."""
PARTS = (
    *MOE, "attention", "GEMM of a layer", "GEMM of the head", "rope", "norm and residual", "norm backward", "joins of MLA",
    "gradient sums", "accumulated gradients", "embedding", "loss and its casts", "copies of FSDP", "optimizer and clipping",
    "all-to-all", "collectives of FSDP", "sends", "other",
)  # fmt: skip
COMMUNICATES = ("all-to-all", "collectives of FSDP", "sends", "other")
Parts = dict[str, tuple[float, float]]
"""Seconds and kernels by part."""

# -- predicted -----------------------------------------------------------------------------------------

_OF_CLASS = {
    "topk": "routing", "grouped_gemm": "grouped GEMM", "gate_gemm": "gate GEMM", "swiglu": "activation", "rope": "rope",
    "embedding": "embedding", "loss": "loss and its casts", "norm": "norm and residual",
}  # fmt: skip
_OF_NAME = {
    "experts.expand": "expand", "experts.reduce": "reduce", "experts.expand_gradient": "reduce backward",
    "experts.reduce_gradient": "expand backward", "gradients.accumulate": "accumulated gradients", "shared.add": "norm and residual",
    "logits.widen": "loss and its casts", "logits.narrow": "loss and its casts",
}  # fmt: skip


def part_of(op: Operator, head: bool) -> str:
    """Part of a predicted operator; `head` for those of the output head."""
    base = op.name.removesuffix(".recompute")
    if base in _OF_NAME:
        return _OF_NAME[base]
    if op.cls in ("gemm", "wgrad_gemm"):
        grouped = op.gemm is not None and op.gemm.groups > 1
        return "grouped GEMM" if grouped else "GEMM of the head" if head else "GEMM of a layer"
    if op.cls.startswith("attention"):
        return "attention"
    if op.name.startswith("fsdp."):
        return "copies of FSDP"
    if op.cls == "norm" and op.name.endswith(".backward"):
        return "norm backward"
    if op.cls == "permute":
        return "routing"
    if op.cls == "copy" or base in ("k_rope.sum_heads", "rope_positions"):
        return "joins of MLA"
    return _OF_CLASS.get(op.cls, "gradient sums" if op.variant == "add" else "other")


def predicted_parts(step: ExecutedStep) -> Parts:
    """Seconds and kernels of a step on the first pipeline rank, each operator as if it ran alone."""
    found: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    pricer, shape = step.prepared.pricer, step.prepared.shape
    for block in (
        step.prepared.stages.stages[0]
        if step.prepared.schedule.pp > 1
        else sum(step.prepared.stages.stages, ())
    ):
        copies = gather_copies(pricer, block.kind)
        copied = pricer.compute(copies, "alone").seconds * 2 * pricer.microbatches
        for part, value in (("copies of FSDP", copied), ("collectives of FSDP", -copied)):
            found[part][0] += value
        for phase, operators in pricer.operators(block.kind).items():
            costs = pricer.operator_costs(block.kind, phase, "alone")
            for op, cost in zip(operators, costs, strict=True):
                part = found[part_of(op, shape.block(block.kind).is_head)]
                part[0] += cost.seconds * pricer.microbatches
                part[1] += op.launches * pricer.microbatches
    for part, seconds in _other_streams(step):
        found[part][0] += seconds
    return {part: (seconds, kernels) for part, (seconds, kernels) in found.items()}


def _other_streams(step: ExecutedStep) -> list[tuple[str, float]]:
    execution, found = step.executions[0], []
    for event in chrome_trace([ShownGpus(execution, trace_info(step.prepared), ((0, 0),))])["traceEvents"]:
        if event["ph"] != "X":
            continue
        label, stream = str(event["name"]), event["tid"]
        part = "optimizer and clipping" if stream == COMPUTE and label == "optimizer" else ""
        if stream == INSIDE or (stream == COMMUNICATION and not ("notify" in label or "prepare" in label)):
            part = "all-to-all"
        elif stream == SHARDING:
            part = "collectives of FSDP"
        if part:
            found.append((part, float(event["dur"]) * 1e-6))
    return found


# -- traced ----------------------------------------------------------------------------------------------

_OF_TRACE = {
    "grouped_gemm": "grouped GEMM", "gate_gemm": "gate GEMM", "swiglu": "activation", "topk": "routing", "rope": "rope",
    "embedding": "embedding", "loss": "loss and its casts", "fsdp_copy": "copies of FSDP", "optimizer": "optimizer and clipping",
    "clip": "optimizer and clipping", "all_reduce": "optimizer and clipping", "all_to_all": "all-to-all", "send_recv": "sends",
    "all_gather": "collectives of FSDP", "reduce_scatter": "collectives of FSDP", "copy": "joins of MLA",
}  # fmt: skip
_ROWS = {
    "forward": {"index": "expand", "cat": "expand", "_index_put_impl_": "reduce", "fill_": "reduce", "bmm": "reduce", "copy_": "reduce"},
    "backward": {"_index_put_impl_": "expand backward", "index": "reduce backward", "bmm": "reduce backward", "copy_": "reduce backward"},
}  # fmt: skip
"""Parts of kernels that move routed rows, by operator."""
_SMALL_NS = 20_000
"""What a kernel over token numbers takes at most; one over rows takes longer at every size here."""


def input_sizes(file: Path) -> dict[int, str]:
    """Sizes of the inputs of every operator that a Kineto file names, by its external number."""
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    found = ((event.get("args", {}), event) for event in events if event.get("cat") == "cpu_op")
    return {
        int(args["External id"]): str(args.get("Input Dims", ""))
        for args, _ in found
        if "External id" in args
    }


def traced_parts(rank: RankTrace, dims: Mapping[int, str], run: Run) -> Parts:
    """Seconds and kernels of the traced step by part; `dims` are sizes of inputs by external number."""
    found: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    raw = rank.raw
    for event in rank.events[rank.events["activity"] != MEMSET]:
        op, scope, product = (
            raw.names[event[key]] if event[key] >= 0 else "" for key in ("op", "scope", "shape")
        )
        sizes, ns = dims.get(int(event["external"]), ""), int(event["end"] - event["start"])
        part = traced_part(CLASSES[event["cls"]], PHASES[event["phase"]], op, scope, sizes, product, ns, run)
        found[part][0] += float(event["end"] - event["start"]) * 1e-9
        found[part][1] += 1
    return {part: (seconds, kernels) for part, (seconds, kernels) in found.items()}


def traced_part(cls: str, phase: str, op: str, scope: str, dims: str, product: str, ns: int, run: Run) -> str:
    """Part of a traced kernel by its class, phase, operator with the sizes of its inputs, and annotation."""
    name, again = op.removeprefix("aten::"), "forward" if phase == "recompute" else phase
    first = dims.replace(" ", "").removeprefix("[").split("]")[0].strip("[").split(",")
    if cls in _OF_TRACE:
        return _OF_TRACE[cls]
    if cls.startswith("attention"):
        return "attention"
    if cls in ("gemm", "wgrad_gemm"):
        return "GEMM of the head" if str(run.vocabulary) in product else "GEMM of a layer"
    if phase == "optimizer":
        return "optimizer and clipping"
    if cls == "norm":
        return (
            "joins of MLA"
            if name == "copy_"
            else "norm backward"
            if phase == "backward"
            else "norm and residual"
        )
    if cls == "permute" and again == "backward" and scope.startswith("IndexBackward"):
        return "expand backward"  # sums over indices, which are sorted first
    if cls == "permute" and ns > _SMALL_NS:
        return _moved(again, name)
    if cls == "elementwise":
        if "AccumulateGrad" in scope:
            return "accumulated gradients"
        if again == "forward":
            return "norm and residual" if name == "add" else "other"
        return "joins of MLA" if name == "sum" else "rope" if len(first) == 4 else "gradient sums"
    if cls == "cast":
        if str(run.vocabulary) in first:
            return "loss and its casts"
        if len(first) == 3 and first[-1] == str(run.hidden) and ns > _SMALL_NS:
            return "reduce" if again == "forward" else "reduce backward"
        return "rope" if len(first) in (4, 5) else "routing" if len(first) == 2 else "other"
    if cls == "memcpy_d2d" and ns > _SMALL_NS:
        return "reduce backward"
    return "routing" if cls == "permute" else "other"


def _moved(phase: str, name: str) -> str:
    return _ROWS.get(phase, {}).get(name, "reduce backward" if phase == "backward" else "routing")


# -- the table -------------------------------------------------------------------------------------------


def table(traced: Parts, predicted: Mapping[str, Parts]) -> list[str]:
    """Lines of a table: milliseconds and kernels of each part, traced and predicted, with the differences."""
    lines = [f"  {'part':24}{'traced':>9}{'kernels':>8}" + "".join(f"{name:>26}" for name in predicted)]
    total: dict[str, list[float]] = {name: [0.0, 0.0] for name in predicted}
    for part in PARTS:
        seconds, kernels = traced.get(part, (0.0, 0.0))
        own = {name: parts.get(part, (0.0, 0.0)) for name, parts in predicted.items()}
        if seconds < 1e-4 and not any(s > 1e-4 for s, _ in own.values()):
            continue
        shown = "".join(
            f"{s * 1e3:10.1f}{f'{s / seconds - 1:+.0%}' if seconds else 'new':>8}{k:8.0f}"
            for s, k in own.values()
        )
        lines.append(f"  {part:24}{seconds * 1e3:9.1f}{kernels:8.0f}{shown}")
        for name, (s, _) in own.items():
            if part not in COMMUNICATES:
                total[name][0] += s
                total[name][1] += seconds
    both = "".join(f"{own * 1e3:10.1f}{own / seconds - 1:+8.1%}{'':8}" for own, seconds in total.values())
    lines.append(f"  {'all compute':24}{next(iter(total.values()))[1] * 1e3:9.1f}{'':8}{both}")
    return lines


def main() -> None:
    """Print steps and parts of all runs."""
    shipped = sys.argv[2] if len(sys.argv) > 2 else PROFILE
    for name, run in RUNS.items():
        with tempfile.TemporaryDirectory() as folder:
            calibrated = Path(folder) / f"h100-{name}.yaml"
            calibrated.write_text(packed.text(f"lab/results/2026-11-26-h100-operators-{name}.yaml.xz"))
            profiles = {"shipped": shipped, "calibrated": str(calibrated)}
            scenarios = {
                key: load_scenario(str(HERE / f"{name}.yaml"), [f"profile={p}"])
                for key, p in profiles.items()
            }
            steps = {key: predict(scenario).result.step.time_s for key, scenario in scenarios.items()}
            shown = ", ".join(f"{key} {s:.4f} s ({s / run.measured_s - 1:+.1%})" for key, s in steps.items())
            print(f"{name}: measured {run.measured_s:.4f} s; {shown}")
            file = Path(sys.argv[1]) / run.file
            traced = traced_parts(read(file).ranks[0], input_sizes(file), run)
            parts = {key: predicted_parts(run_step(scenario)) for key, scenario in scenarios.items()}
            print("\n".join(table(traced, parts)))


if __name__ == "__main__":
    main()
