"""Launch files that set variables such as TP=2 and start another script, which is not read."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from moesim.hwmodels.errors import InputError
from moesim.simulator.scenario import Scenario
from moesim.simulator.trainers.launch import LaunchFile, Machine, Unknown
from moesim.simulator.trainers.meaning.given import StatedArgument, row_of, shown_value
from moesim.simulator.trainers.meaning.rows import MeaningRow
from moesim.simulator.trainers.meaning.table import Table

SHORTHAND = {
    "TP": "tensor-model-parallel-size",
    "PP": "pipeline-model-parallel-size",
    "EP": "expert-model-parallel-size",
    "CP": "context-parallel-size",
    "ETP": "expert-tensor-parallel-size",
    "VPP": "num-virtual-stages-per-pipeline-rank",
    "MBS": "micro-batch-size",
    "GBS": "global-batch-size",
    "SEQ_LEN": "seq-length",
}
"""Variables that users of Megatron-LM give to their scripts (yanring/Megatron-MoE-ModelZoo@e8650517)."""

NODES = "NNODES"

HOSTS_OF_FOUR = "GB200_CLUSTER"
"""Variable whose value 1 says that a node has four GPUs."""

IN_A_NODE = ("GPUS_PER_NODE", "NPROC_PER_NODE", "GPU_PER_NODE", "NUM_GPUS_PER_NODE", "NGPUS_PER_NODE")
"""Variables that hold the GPUs of a node."""

_FP8 = {
    "fp8-format": "e4m3", "fp8-param-gather": True, "use-precision-aware-optimizer": True,
    "exp-avg-dtype": "bf16", "exp-avg-sq-dtype": "bf16",
}  # fmt: skip
_FLEX = {"moe-token-dispatcher-type": "flex"}

CHOICES: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "PR": {
        "bf16": {"bf16": True},
        "fp8": {**_FP8, "fp8-recipe": "blockwise"},
        "mxfp8": {**_FP8, "fp8-recipe": "mxfp8", "overlap-grad-reduce": True, "overlap-param-gather": True},
    },
    "A2A_OVERLAP": {"0": {}, "1": {"overlap-moe-expert-parallel-comm": True, "delay-wgrad-compute": True}},
    "DISPATCHER": {
        "alltoall": {"moe-token-dispatcher-type": "alltoall"},
        "deepep": {**_FLEX, "moe-flex-dispatcher-backend": "deepep"},
        "hybridep": {**_FLEX, "moe-flex-dispatcher-backend": "hybridep", "moe-hybridep-num-sms": 32},
    },
    "OPTIMIZER_OFFLOAD": {"0": {}, "1": {"optimizer-cpu-offload": True}},
    "MOE_GROUPED_GEMM": {"true": {"moe-grouped-gemm": True}},
}
"""Arguments that the values of a variable stand for, in sbatch_benchmarking.sh of the same commit."""

_UNDECIDING = re.compile(
    r"MODEL|COMMENT|CLUSTER|ACCOUNT|PARTITION|SEGMENT|PROFILE|PRETRAIN|DRY_RUN|DATASET|MCORE_RELEASE_VERSION"
    r"|USE_MNNVL|(WANDB|HF|SLURM|NCCL|CUDA|TORCH|TORCHINDUCTOR|PYTORCH|NVTE|OMP|UB|UCX|NVSHMEM|NVLINK|TRITON|PYTHON"
    r"|LD|GLOO|NUM_OF_HYBRID_EP|MASTER|RANK|NODE_RANK|TOKENIZERS)(_.*)?"
    r"|PYTHON.*|(.*_)?(PATH|DIR|FOLDER|ROOT|FILE|IMAGE|MOUNTS|PROJECT|TOKEN|KEY|HOME|NAME|LOGS?|CACHE|ADDR|PORT"
    r"|SCRIPT|TIME|URL|USER|HOSTS?|HOSTFILE|STEPS?|ITERS?|SEED|LR|TOKENIZER(_MODEL)?|ID)"
)
"""Variables that name things, or settings of libraries: they decide nothing of the plan."""

_SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch", ".sub")
_OFF = ("", "false", "none")


def starts_another_script(launch: LaunchFile) -> bool:
    """Whether the file starts a script instead of a training program, so that it holds a part only."""
    return launch.program is not None and launch.program.lower().endswith(_SCRIPTS)


def with_nodes(launch: LaunchFile) -> LaunchFile:
    """The launch with the nodes of its variable NNODES, where it names no machine itself."""
    nodes = _count(launch, NODES)
    if launch.machine.nodes is not None or nodes is None:
        return launch
    stated = (_count(launch, name) for name in IN_A_NODE)
    four = 4 if launch.environment.get(HOSTS_OF_FOUR) == "1" else None
    gpus = launch.machine.gpus_per_node or next((n for n in stated if n is not None), four)
    shown = shown_value(launch.environment[NODES])
    return replace(launch, machine=Machine(nodes, gpus, {"nodes": f"the variable {NODES}={shown}"}))


def _count(launch: LaunchFile, name: str) -> int | Unknown | None:
    """The number that a variable holds; None where it is not set."""
    value = launch.environment.get(name)
    if value is None or isinstance(value, Unknown):
        return value
    if value.isascii() and value.isdigit() and len(value) < 8:
        return int(value)
    return Unknown(value, "it is no whole number") if value else None


def read_variables(
    launch: LaunchFile,
    stated: dict[str, StatedArgument],
    table: Table,
    base: Scenario,
    ignore: Collection[str] = (),
) -> list[MeaningRow]:
    """Add the arguments that variables stand for to `stated`, and return rows on all other variables.

    Raises InputError for a variable of which it is not known what it decides, unless `ignore` names it.
    """
    rows = []
    for name, value in launch.environment.items():
        text = shown_value(value)
        if name in ignore:
            rows.append(MeaningRow(name, text, "ignored", "you said so", "environment"))
            continue
        if text.lower() in _OFF or name in (NODES, *IN_A_NODE, HOSTS_OF_FOUR):
            continue
        if name in SHORTHAND:
            _state(stated, SHORTHAND[name], name, value, table)
        elif name in CHOICES:
            rows += _chosen(launch, stated, table, base, name, text)
        elif _UNDECIDING.fullmatch(name):
            meaning = f"the direction is unknown: a variable for {launch.program}, which is not read"
            rows.append(MeaningRow(name, text, "not priced", meaning, "environment"))
        else:
            raise InputError(
                f"environment: {name}={text[:60]} is for {launch.program}, which is not read, and what it "
                f"decides is not known; give arguments in its place, and --ignore {name}"
            )
    return rows


def _chosen(
    launch: LaunchFile,
    stated: dict[str, StatedArgument],
    table: Table,
    base: Scenario,
    name: str,
    text: str,
) -> list[MeaningRow]:
    """State the arguments of a variable with few values; a row where they change nothing."""
    if text not in CHOICES[name]:
        raise InputError(
            f"environment: {name}={text[:60]} is not known; known: {', '.join(CHOICES[name])}; correct it, "
            f"or give --ignore {name} if it changes neither time nor memory"
        )
    arguments = CHOICES[name][text]
    if name == "PR" and text == base.recipe.linear == "bf16":
        return [MeaningRow(name, text, "base", "the precision is BF16, as the base's", "environment")]
    for argument, value in arguments.items():
        _state(stated, argument, name, value, table, text)
    if not arguments:
        return [MeaningRow(name, text, "irrelevant", "adds no argument with this value", "environment")]
    return [row for argument in arguments for row in row_of(stated[argument], table)]


def _state(
    stated: dict[str, StatedArgument],
    argument: str,
    name: str,
    value: Any,
    table: Table,
    text: str | None = None,
) -> None:
    """State an argument that a variable stands for, unless the file gives it itself."""
    if argument not in stated:
        stated[argument] = StatedArgument(name, value, "environment", table.entries[argument], text)
