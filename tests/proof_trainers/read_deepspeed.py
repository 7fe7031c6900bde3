"""Lets DeepSpeed read the JSON exports with its `DeepSpeedConfig`, on a CPU.

Run it in an environment of its own (docs/trainers.md): `python read_deepspeed.py EXPORTS VERDICTS`.
It imports nothing of moesim.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform
import sys
import types
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed.runtime.config as reader


def read(path: Path, expected: dict[str, Any]) -> dict[str, Any]:
    """What DeepSpeed made of one file; raises whatever DeepSpeed raises."""
    replicas = expected["world_size"] // (expected["tp"] * expected["cp"] * expected["pp"])
    # The group of processes does not exist here: DeepSpeed asks for its rank and its data-parallel size.
    reader.dist = types.SimpleNamespace(get_rank=lambda: 0, get_world_size=lambda: replicas)
    config = reader.DeepSpeedConfig(str(path))
    assert config.bfloat16_config.enabled
    return {
        "microbatches": config.gradient_accumulation_steps,
        "microbatch": config.train_micro_batch_size_per_gpu,
        "sequences": config.train_batch_size,
        "zero": int(config.zero_config.stage),
    }


def main(exports: Path, verdicts: Path) -> None:
    """Read every JSON file of the index and write the verdicts."""
    rows = []
    for entry in json.loads((exports / "index.json").read_text()):
        if not entry["file"].startswith("deepspeed_"):
            continue
        path, expected = exports / entry["file"], entry["expected"]
        row = {"file": entry["file"], "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        assert row["sha256"] == entry["sha256"], f"{path} is not the file of the index"
        try:
            found = read(path, expected)
            wrong = {key: value for key, value in found.items() if expected[key] != value}
            row |= {"verdict": "different", "found": wrong} if wrong else {"verdict": "accepted"}
        except Exception as error:
            row |= {"verdict": "refused", "reason": f"{type(error).__name__}: {error}"[:400]}
        print(row["file"], row["verdict"], row.get("reason", row.get("found", "")), flush=True)
        rows.append(row)
    versions = {name: version(name) for name in ("deepspeed", "torch")}
    python = platform.python_version()
    document = {
        "reader": "DeepSpeed",
        "date": datetime.date.today().isoformat(),
        "python": python,
        "versions": versions,
        "exports": rows,
    }
    verdicts.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
