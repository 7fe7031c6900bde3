"""Tells which training framework a launch belongs to, from its program and its arguments."""

from __future__ import annotations

import re
from collections.abc import Sequence

from moesim.simulator.trainers.launch import Argument

_MEGATRON_FLAGS = {
    f"--{flag}"
    for flag in (
        "tensor-model-parallel-size", "pipeline-model-parallel-size", "num-layers", "micro-batch-size",
        "seq-length", "expert-model-parallel-size", "model-parallel-size", "num-attention-heads",
        "global-batch-size", "num-experts", "context-parallel-size", "sequence-parallel",
        "use-distributed-optimizer", "recompute-granularity", "recompute-modules",
        "pipeline-model-parallel-layout", "mtp-num-layers", "moe-router-topk", "moe-token-dispatcher-type",
        "moe-flex-dispatcher-backend",
    )
}  # fmt: skip
_NEMO_PROGRAM = re.compile(
    r"nemo_launcher|launcher_scripts/main\.py|/nemo/|megatron_gpt_|megatron_\w+_pretraining", re.IGNORECASE
)
_BRIDGE_KEY = re.compile(
    r"(model|ddp|train|dist|mixed_precision|optimizer)\.\w*(parallel|global_batch|micro_batch)"
)


def trainer_of(program: str, arguments: Sequence[Argument], launcher: str | None = None) -> str | None:
    """The registered name of the training framework, or None where the launch does not tell."""
    names = {argument.name for argument in arguments}

    def begins(*starts: str) -> bool:
        return any(name.startswith(starts) for name in names)

    if "torchtitan" in program or "--job.config_file" in names or begins("--parallelism."):
        return "torchtitan"
    dotted = any("." in name.lstrip("-") and "_" in name for name in names)
    if len(names & _MEGATRON_FLAGS) >= 2 and not dotted:
        return "megatron-lm"
    recipe = {"--model_recipe_name", "--model_family_name"} & names
    if recipe or re.search(r"megatron.?bridge", program, re.IGNORECASE):
        return "megatron-bridge"
    if begins("trainer.", "training.trainer", "training.model") or _NEMO_PROGRAM.search(program):
        return "nemo"
    if launcher == "deepspeed" or {"--deepspeed", "--deepspeed_config", "zero_optimization.stage"} & names:
        return "deepspeed"
    return None


def trainer_of_keys(names: Sequence[str], text: str) -> str | None:
    """The training framework of a configuration file, from its dotted names and its text."""

    def begins(*starts: str) -> bool:
        return any(name.startswith(starts) for name in names)

    if begins("zero_optimization") or "train_micro_batch_size_per_gpu" in names:
        return "deepspeed"
    nemo = begins("training.trainer.", "trainer.", "training.model.", "strategy.")
    if nemo or re.search(r"nemo\.collections|\bnemo_run\b|import nemo", text):
        return "nemo"
    if "torchtitan" in text:
        return "torchtitan"
    if re.search(r"megatron\.bridge", text) or any(_BRIDGE_KEY.match(name) for name in names):
        return "megatron-bridge"
    if begins("parallelism.", "activation_checkpoint.", "training.data_parallel", "experimental."):
        return "torchtitan"
    return None
