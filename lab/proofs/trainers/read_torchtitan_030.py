"""Lets torchtitan 0.3.0 read the exported Python configurations and build their models, on a CPU.

Run it in an environment of its own (lab/proofs/trainers/README.md): `python read_torchtitan_030.py EXPORTS VERDICTS`.
It imports nothing of moesim. For every export it lets torchtitan load the function with its `ConfigManager`
(whose `Trainer.Config` checks itself), check the degrees with `ParallelDims`, build the model on the meta
device, and find the pipeline schedule by its name.
"""

from __future__ import annotations

import sys
import types
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import torch
import torch._utils
from reader_verdicts import judge

# The proof needs neither GPU nor DeepEP: meshes are of the CPU, and DeepEP is only imported.
torch._utils._get_available_device_type = lambda: "cpu"
sys.modules["deep_ep"] = cast(Any, types.SimpleNamespace(Buffer=object, ElasticBuffer=object))
_EVENTS = types.SimpleNamespace(EventHandle=object, EventOverlap=object)
sys.modules["deep_ep.utils"] = cast(Any, _EVENTS)

from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from torchtitan.config.manager import ConfigManager
from torchtitan.distributed.parallel_dims import ParallelDims


def read(module: str, expected: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """What torchtitan made of one file; raises whatever torchtitan raises."""
    config = ConfigManager().parse_args(["--module", module, "--config", "moesim_plan"])
    p, training = config.parallelism, config.training
    dims = ParallelDims.from_config(p, expected["world_size"])
    batch = dims.dp_replicate * dims.dp_shard
    assert training.global_batch_size % (training.local_batch_size * batch) == 0, "the batch does not divide"
    assert training.seq_len % dims.seq_len_divisor == 0, "the sequence does not divide"
    assert dims.dp_shard * dims.cp * dims.tp % dims.ep == 0, "expert parallelism does not divide"
    microbatches = training.global_batch_size // (training.local_batch_size * batch)
    config.model_spec.model.update_from_config(config=config)
    with torch.device("meta"):
        model = config.model_spec.model.build()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    stages, schedule = 0, ""
    if dims.pp_enabled:
        assert config.model_spec.pipelining_fn is not None, "the family has no pipelining function"
        modules = {name for part in p.module_fqns_per_model_part for name in part}
        assert sum(map(len, p.module_fqns_per_model_part)) == len(modules), "a module is on two stages"
        names = {name for name, _ in model.named_modules()}
        assert modules <= names, f"unknown modules {sorted(modules - names)[:3]}"
        children = {name if name != "layers" else "" for name, child in model.named_children()}
        assert children - {""} <= modules, f"modules on no stage: {sorted(children - modules)}"
        assert sum(name.startswith("layers.") for name in modules) == len(model.layers), "a layer is missing"
        stages, kind = len(p.module_fqns_per_model_part), get_schedule_class(p.pipeline_parallel_schedule)
        assert issubclass(kind, PipelineScheduleMulti) == (stages > dims.pp), (
            "stages do not go with the schedule"
        )
        schedule = kind.__name__.removeprefix("Schedule")
        microbatches *= training.local_batch_size // p.pipeline_parallel_microbatch_size
    found = {key: getattr(dims, key) for key in ("tp", "cp", "pp", "ep", "world_size")}
    return found | {"microbatches": microbatches, "schedule": schedule, "stages": stages}, parameters


def main(exports: Path, verdicts: Path) -> None:
    """Read every Python file of the index and write the verdicts."""
    sys.path.insert(0, str(exports))
    versions = {name: version(name) for name in ("torchtitan", "torch", "spmd_types")}
    judge(exports, verdicts, "torchtitan 0.3.0", versions, lambda file: file.startswith("plan_"), understood)


def understood(path: Path, expected: dict[str, Any]) -> dict[str, Any]:
    """What torchtitan made of one module, with its number of parameters."""
    values, parameters = read(path.stem, expected)
    return values | {"parameters": parameters}


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
