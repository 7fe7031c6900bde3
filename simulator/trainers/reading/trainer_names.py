"""Tells which training framework a launch belongs to, from its program and its arguments."""

from __future__ import annotations

import re
from collections.abc import Sequence

from moesim.simulator.trainers.launch import Argument

_MEGATRON_FLAGS = frozenset(
    "--" + flag
    for flag in [
        "tensor-model-parallel-size",
        "pipeline-model-parallel-size",
        "num-layers",
        "micro-batch-size",
        "seq-length",
        "expert-model-parallel-size",
        "model-parallel-size",
        "num-attention-heads",
        "global-batch-size",
        "num-experts",
        "context-parallel-size",
        "sequence-parallel",
        "use-distributed-optimizer",
        "recompute-granularity",
        "recompute-modules",
        "pipeline-model-parallel-layout",
        "mtp-num-layers",
        "moe-router-topk",
        "moe-token-dispatcher-type",
        "moe-flex-dispatcher-backend",
    ]
)
_NEMO_PROGRAM = re.compile(
    r"nemo_launcher|launcher_scripts/main\.py|/nemo/|megatron_gpt_|megatron_\w+_pretraining", re.IGNORECASE
)


def trainer_of(program: str, arguments: Sequence[Argument], launcher: str | None = None) -> str | None:
    """The registered name of the training framework, or None where the launch does not tell."""
    names = {argument.name for argument in arguments}
    if (
        "torchtitan" in program
        or "--job.config_file" in names
        or any(name.startswith("--parallelism.") for name in names)
    ):
        return "torchtitan"
    if len(names & _MEGATRON_FLAGS) >= 2 and not any(
        "." in name.lstrip("-") and "_" in name for name in names
    ):
        return "megatron-lm"
    if (
        re.search(r"megatron.?bridge", program, re.IGNORECASE)
        or {"--model_recipe_name", "--model_family_name"} & names
    ):
        return "megatron-bridge"
    if any(
        name.startswith(("trainer.", "training.trainer", "training.model")) for name in names
    ) or _NEMO_PROGRAM.search(program):
        return "nemo"
    if launcher == "deepspeed" or {"--deepspeed", "--deepspeed_config", "zero_optimization.stage"} & names:
        return "deepspeed"
    return None


def trainer_of_keys(names: Sequence[str], text: str) -> str | None:
    """The training framework of a configuration file, from its dotted names and its text."""
    every = set(names)
    if (
        any(name.startswith("zero_optimization") for name in every)
        or "train_micro_batch_size_per_gpu" in every
    ):
        return "deepspeed"
    if any(
        name.startswith(("training.trainer.", "trainer.", "training.model.", "strategy.")) for name in every
    ):
        return "nemo"
    if re.search(r"nemo\.collections|\bnemo_run\b|import nemo", text):
        return "nemo"
    if "torchtitan" in text:
        return "torchtitan"
    if re.search(r"megatron\.bridge", text) or any(
        re.match(
            r"(model|ddp|train|dist|mixed_precision|optimizer)\.\w*(parallel|global_batch|micro_batch)",
            name,
        )
        for name in every
    ):
        return "megatron-bridge"
    if any(
        name.startswith(("parallelism.", "activation_checkpoint.", "training.data_parallel", "experimental."))
        for name in every
    ):
        return "torchtitan"
    return None
