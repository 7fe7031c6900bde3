"""Host time of whole blocks of torchtitan's models, on one GPU or on two, and what gathers around them.

    python -m lab.studies.host_blocks --one --out DIR --budget 120
    torchrun --nproc-per-node 2 -m lab.studies.host_blocks --two --out DIR --budget 100

The host's time of a block is the difference between a deep and a shallow model, divided by the blocks
between them, so embedding, head and the root's hooks are not in it. Tensors are tiny, so that the device
never limits; one case of a family has real sizes. The script writes host_blocks_one.json or
host_blocks_two.json after every case. A case that fails loses its own row. `--dry` runs every path on a CPU,
with few repeats.
"""

from __future__ import annotations

from typing import Any

from lab.studies import study_setup

if __name__ == "__main__":
    study_setup.prepare()
import torch

from lab.studies import host_blocks_models as models
from lab.studies import host_blocks_parts as parts
from lab.studies import host_blocks_two as two
from lab.studies.host_blocks_study import Study, conduct
from lab.studies.host_launch import machine


def main() -> None:
    """Measure and write the results."""
    parser = study_setup.parser(120.0)
    parser.add_argument("--one", action="store_true")
    parser.add_argument("--two", action="store_true")
    options = parser.parse_args()
    rank, world = models.start_group("cpu" if options.dry else "cuda")
    study = Study(options, "host_blocks_two.json" if options.two else "host_blocks_one.json", rank)
    describe(study, world)
    conduct(study, two.run_two if options.two else parts.run_one, short)


def describe(study: Study, world: int) -> None:
    """Load torchtitan's models and write the machine and the versions into the results."""
    study.result["world"] = world
    study.result["torchtitan"] = models.load_torchtitan()
    if study.dry:
        models.imitate_gpu_on_cpu()
        study.result["machine"] = {"torch": torch.__version__}
    else:
        study.result["machine"] = machine()
        models.use_untuned_flex_attention()


def short(row: dict[str, Any]) -> Any:
    """A block's two medians, or what became of it."""
    if "forward_us" not in row:
        return str(row)[-300:]
    return f"forward {row['forward_us']:.0f} us, backward {row['backward_us']:.0f} us"


if __name__ == "__main__":
    main()
