"""Checks the Megatron-Bridge exports against its dataclasses and builds Megatron-Core's from them, on a CPU.

Run it in an environment of its own (lab/proofs/trainers/README.md), with checkouts of Megatron-Bridge and Megatron-LM:
`python read_bridge.py EXPORTS VERDICTS BRIDGE MEGATRON`. It imports nothing of moesim. Bridge itself needs a
GPU to be imported, so its names are read from the classes in its source, and what it hands to Megatron-Core
is built with Megatron-Core's own classes, which check how the values go together.
"""

from __future__ import annotations

import ast
import dataclasses
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from reader_verdicts import judge

CORE = {"ddp": DistributedDataParallelConfig, "optimizer": OptimizerConfig}
SOURCES = {"train": "TrainingConfig", "checkpoint": "CheckpointConfig", "dataset": "GPTDatasetConfig"}


class Recorder:
    """Stands for a ConfigContainer: remembers what is set, by dotted name."""

    def __init__(self, prefix: str = "", values: dict[str, Any] | None = None) -> None:
        self.__dict__.update(prefix=prefix, values={} if values is None else values)

    def __getattr__(self, name: str) -> Any:
        return Recorder(f"{self.prefix}{name}.", self.values)

    def __setattr__(self, name: str, value: Any) -> None:
        self.values[self.prefix + name] = value


def class_fields(folders: list[Path]) -> dict[str, set[str]]:
    """Annotated fields of every class in the source files, by the name of the class."""
    found: dict[str, set[str]] = {}
    for folder in folders:
        for path in folder.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    names = {ast.unparse(n.target) for n in node.body if isinstance(n, ast.AnnAssign)}
                    found[node.name] = found.get(node.name, set()) | names
    return found


def recipes(bridge: Path) -> set[str]:
    """Names of the mixed-precision recipes, which are functions with the decorator `register`."""
    tree = ast.parse((bridge / "src/megatron/bridge/training/mixed_precision.py").read_text())
    return {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and "register" in map(ast.unparse, node.decorator_list)
    }


def read(
    path: Path, expected: dict[str, Any], fields: dict[str, set[str]], precisions: set[str]
) -> dict[str, Any]:
    """Raise for a name that does not exist, or values that Megatron-Core refuses; return what it made."""
    module: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), module)
    recorder = Recorder()
    module["apply_plan"](recorder)
    values = recorder.__dict__["values"]
    assert values.pop("mixed_precision") in precisions, "unknown precision recipe"
    sections: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        section, _, key = name.partition(".")
        sections.setdefault(section, {})[key] = value
    for section, keys in sections.items():
        known = (
            {f.name for f in dataclasses.fields(CORE[section])}
            if section in CORE
            else fields[SOURCES[section]]
            if section in SOURCES
            else {f.name for f in dataclasses.fields(MLATransformerConfig)} | {"seq_length"}
        )
        assert set(keys) <= known, f"{section} has no {sorted(set(keys) - known)}"
    model = {k: v for k, v in sections["model"].items() if k != "seq_length"}
    size = expected["model"]
    kind = MLATransformerConfig if size.pop("latent") else TransformerConfig
    config = kind(**size, **model, bf16=True, params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16)
    DistributedDataParallelConfig(**sections["ddp"])
    OptimizerConfig(bf16=True, params_dtype=torch.bfloat16, **sections["optimizer"])
    layout = config.pipeline_model_parallel_layout
    stages = 0 if layout is None else sum(map(len, layout.layout))
    train = sections["train"]
    return {
        "tp": config.tensor_model_parallel_size,
        "cp": config.context_parallel_size,
        "pp": config.pipeline_model_parallel_size,
        "ep": config.expert_model_parallel_size,
        "stages": stages,
        "sequences": train["global_batch_size"],
        "microbatch": train["micro_batch_size"],
    }


def main(exports: Path, verdicts: Path, bridge: Path, megatron: Path) -> None:
    """Read every Bridge export of the index and write the verdicts."""
    fields = class_fields([bridge / "src/megatron/bridge/training", megatron / "megatron/training/config"])
    precisions = recipes(bridge)
    versions = {name: version(name) for name in ("megatron-core", "torch")}
    versions |= {"Megatron-Bridge": "067f987", "Megatron-LM": "d98e8a6"}
    judge(
        exports,
        verdicts,
        "Megatron-Bridge",
        versions,
        lambda file: file.startswith("bridge_"),
        lambda path, expected: read(path, expected, fields, precisions),
    )


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:5]))
