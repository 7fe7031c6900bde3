"""Lets DeepSpeed read the JSON exports with its `DeepSpeedConfig`, on a CPU.

Run it in an environment of its own (lab/proofs/trainers/README.md): `python read_deepspeed.py EXPORTS VERDICTS`.
It imports nothing of moesim.
"""

from __future__ import annotations

import json
import os
import sys
import types
from importlib.metadata import version
from pathlib import Path
from typing import Any

from reader_verdicts import judge

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed.runtime.config as reader


def read(path: Path, expected: dict[str, Any]) -> dict[str, Any]:
    """What DeepSpeed made of one file; raises whatever DeepSpeed raises."""
    replicas = expected["world_size"] // (expected["tp"] * expected["cp"] * expected["pp"])
    # The group of processes does not exist here: DeepSpeed asks for its rank and its data-parallel size.
    reader.dist = types.SimpleNamespace(get_rank=lambda: 0, get_world_size=lambda: replicas)
    config = reader.DeepSpeedConfig(str(path))
    assert config.bfloat16_config.enabled
    assert not config.activation_checkpointing_config.partition_activations
    return {
        "pp": 1 if config.pipeline["stages"] == "auto" else config.pipeline["stages"],
        "recomputed": "activation_checkpointing" in json.loads(path.read_text()),
        "interval": config.pipeline["activation_checkpoint_interval"],
        "microbatches": config.gradient_accumulation_steps,
        "microbatch": config.train_micro_batch_size_per_gpu,
        "sequences": config.train_batch_size,
        "zero": int(config.zero_config.stage),
    }


def main(exports: Path, verdicts: Path) -> None:
    """Read every JSON file of the index and write the verdicts."""
    versions = {name: version(name) for name in ("deepspeed", "torch")}
    judge(exports, verdicts, "DeepSpeed", versions, lambda file: file.startswith("deepspeed_"), read)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
