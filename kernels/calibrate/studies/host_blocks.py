"""Host time of whole blocks of torchtitan's models, on one GPU or on two, and what gathers around them.

    python kernels/calibrate/studies/host_blocks.py --one --out DIR --budget 120
    torchrun --nproc-per-node 2 kernels/calibrate/studies/host_blocks.py --two --out DIR --budget 100

The host's time of a block is the difference between a deep and a shallow model, divided by the blocks
between them, so embedding, head and the root's hooks are not in it. Tensors are tiny, so that the device
never limits; one case of a family has real sizes. The script writes host_blocks_one.json or
host_blocks_two.json after every case. A case that fails loses its own row. `--dry` runs every path on a CPU,
with few repeats. As a script it needs PyTorch and torchtitan only.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
if __name__ == "__main__" and not __package__:  # run as a file: moesim's own imports are not needed
    HERE = Path(__file__).resolve().parent
    NAMES = ("moesim", "moesim.kernels", "moesim.kernels.calibrate", "moesim.kernels.calibrate.studies")
    for _name in NAMES:
        _package = types.ModuleType(_name)
        _package.__path__ = [str(HERE)]
        sys.modules[_name] = _package
import torch

from moesim.kernels.calibrate.studies import host_blocks_models as models
from moesim.kernels.calibrate.studies import host_blocks_parts as parts
from moesim.kernels.calibrate.studies import host_blocks_two as two
from moesim.kernels.calibrate.studies.host_blocks_study import Study, stop_late
from moesim.kernels.calibrate.studies.host_launch import machine


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--one", action="store_true")
    parser.add_argument("--two", action="store_true")
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--out", default=".")
    parser.add_argument("--budget", type=float, default=120.0)
    parser.add_argument("--only", default="", help="texts, one of which a case's name has, between commas")
    options = parser.parse_args()
    device = "cpu" if options.dry else "cuda"
    rank, world = models.start_group(device)
    study = Study(options, "host_blocks_two.json" if options.two else "host_blocks_one.json", rank)
    study.result["world"] = world
    study.result["torchtitan"] = models.load_torchtitan()
    if options.dry:
        models.imitate_gpu_on_cpu()
        study.result["machine"] = {"torch": torch.__version__}
    else:
        study.result["machine"] = machine()
        models.use_untuned_flex_attention()
    stop_late(study)
    (two.run_two if options.two else parts.run_one)(study)
    study.write()
    if rank == 0:
        print(json.dumps({k: short(v) for k, v in study.result["blocks"].items()}, indent=1)[-9000:])
        print("seconds", study.result["total_s"], study.result["seconds"])
    sys.stdout.flush()
    os._exit(0)  # no tear-down of groups, which can wait for a rank that ended early


def short(row: dict[str, Any]) -> Any:
    """A block's two medians, or what became of it."""
    if "forward_us" not in row:
        return str(row)[-300:]
    return f"forward {row['forward_us']:.0f} us, backward {row['backward_us']:.0f} us"


if __name__ == "__main__":
    main()
