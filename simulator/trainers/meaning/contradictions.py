"""Refuses arguments that contradict each other, naming both with their places."""

from __future__ import annotations

from moesim.hwmodels.errors import InputError
from moesim.simulator.trainers.meaning.given import Given

LAYOUT = "pipeline-model-parallel-layout"
LAYERS = "num-layers-per-virtual-pipeline-stage"
STAGES = "num-virtual-stages-per-pipeline-rank"
FIRST = "decoder-first-pipeline-num-layers"
LAST = "decoder-last-pipeline-num-layers"

EXCLUSIVE = (
    (LAYERS, STAGES, "both say how many virtual stages there are"),
    (LAYERS, LAYOUT, "the layout has the virtual stages already"),
    (STAGES, LAYOUT, "the layout has the virtual stages already"),
    (LAYERS, FIRST, "uneven stages need --num-virtual-stages-per-pipeline-rank"),
    (LAYERS, LAST, "uneven stages need --num-virtual-stages-per-pipeline-rank"),
    (FIRST, LAYOUT, "the layout has the layers of every stage already"),
    (LAST, LAYOUT, "the layout has the layers of every stage already"),
    ("account-for-embedding-in-pipeline-split", LAYOUT, "the layout has the layers of every stage already"),
    ("account-for-loss-in-pipeline-split", LAYOUT, "the layout has the layers of every stage already"),
    ("account-for-embedding-in-pipeline-split", FIRST, "both say how many layers the first stage has"),
    ("account-for-loss-in-pipeline-split", LAST, "both say how many layers the last stage has"),
    ("bf16", "fp16", "there is one format of parameters"),
    ("num-layers", "encoder-num-layers", "both say how many layers there are"),
    ("seq-length", "encoder-seq-length", "both say how long a sequence is"),
    ("use-torch-fsdp2", "use-distributed-optimizer", "both shard the optimizer states"),
    ("use-torch-fsdp2", "use-megatron-fsdp", "both shard the parameters"),
    ("accumulate-allreduce-grads-in-fp32", "grad-reduce-in-bf16", "both name the format of gradients"),
    ("enable-cuda-graph", "external-cuda-graph", "both name the kind of CUDA graphs"),
    ("moe-expert-capacity-factor", "moe-expert-rank-capacity-factor", "both name the rows that are kept"),
)
"""Pairs of arguments that exclude each other in Megatron-LM, with the reason."""


def check_contradictions(given: Given) -> None:
    """Raise InputError for arguments that contradict each other, and for ones that need another."""
    for one, other, reason in EXCLUSIVE:
        if given.in_part and (one, other) == (STAGES, LAYOUT):
            continue  # Megatron-Bridge states both
        if _on(given, one) and _on(given, other):
            raise _both(given, one, other, reason)
    if (
        _on(given, "recompute-activations")
        and given.text("recompute-granularity", "selective") != "selective"
    ):
        raise _both(
            given, "recompute-activations", "recompute-granularity", "the former means selective granularity"
        )
    if given.has("recompute-method") and given.text("recompute-granularity", "none") != "full":
        raise InputError(
            f"{given.place('recompute-method')}: the method belongs to --recompute-granularity full; "
            "state it, or leave the method out"
        )
    for flag in ("overlap-param-gather", "tp-comm-overlap"):
        needed = {"overlap-param-gather": "overlap-grad-reduce", "tp-comm-overlap": "sequence-parallel"}[flag]
        if given.flag(flag) and not given.flag(needed) and not given.in_part:
            raise InputError(f"{given.place(flag)}: needs --{needed} too; add it")


def _on(given: Given, name: str) -> bool:
    return given.has(name) and given.stated[name].value is not False


def _both(given: Given, one: str, other: str, reason: str) -> InputError:
    return InputError(
        f"{given.place(one)} and {given.place(other)} contradict each other: {reason}; keep one of them"
    )
