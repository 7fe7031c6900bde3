"""Lets torchtitan 0.2.2 read the TOML exports and build what they describe, on a CPU.

Run it in an environment of its own (lab/proofs/trainers/README.md): `python read_torchtitan_022.py EXPORTS VERDICTS`.
It imports nothing of moesim. For every export it lets torchtitan parse the file with its `ConfigManager`,
check the degrees with `ParallelDims` on a process group without members, build the flavor on the meta device,
apply the parallelisms and cut the stages with the flavor's own functions, and build the pipeline schedule.
"""

from __future__ import annotations

import os
import sys
import types
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

from reader_verdicts import judge

os.environ.setdefault("LOCAL_RANK", "0")

import torch
import torch._utils
import torch.distributed as dist

# The proof needs neither GPU nor DeepEP: groups of processes are on the CPU, and DeepEP is only imported.
torch._utils._get_available_device_type = lambda: "cpu"
sys.modules["deep_ep"] = cast(Any, types.SimpleNamespace(Buffer=object, ElasticBuffer=object))
_EVENTS = types.SimpleNamespace(EventHandle=object, EventOverlap=object)
sys.modules["deep_ep.utils"] = cast(Any, _EVENTS)

from torchtitan.config import ConfigManager
from torchtitan.distributed import ParallelDims
from torchtitan.protocols.train_spec import get_train_spec


def read(path: Path, expected: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """What torchtitan made of one file; raises whatever torchtitan raises."""
    config = ConfigManager().parse_args([f"--job.config_file={path}"])
    p, world = config.parallelism, expected["world_size"]
    dist.init_process_group("fake", rank=0, world_size=world, store=dist.HashStore())
    try:
        dims = ParallelDims(
            dp_replicate=p.data_parallel_replicate_degree,
            dp_shard=p.data_parallel_shard_degree,
            cp=p.context_parallel_degree,
            tp=p.tensor_parallel_degree,
            pp=p.pipeline_parallel_degree,
            ep=p.expert_parallel_degree,
            etp=p.expert_tensor_parallel_degree,
            world_size=world,
        )
        dims.build_mesh()
        found = {key: getattr(dims, key) for key in ("tp", "cp", "pp", "ep")}
        batch = dims.dp_replicate * dims.dp_shard
        accumulated = config.training.global_batch_size // (config.training.local_batch_size * batch)
        assert config.training.global_batch_size % (config.training.local_batch_size * batch) == 0
        spec = get_train_spec(config.model.name)
        args = spec.model_args[config.model.flavor]
        args.update_from_config(config)
        with torch.device("meta"):
            model = spec.model_cls(args)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        stages, schedule, microbatches = 0, "", accumulated
        if dims.pp_enabled:
            assert spec.pipelining_fn is not None, "the family has no pipelining function"
            built, _, first, _ = spec.pipelining_fn(
                model, dims, config, torch.device("meta"), args, spec.parallelize_fn, lambda *a: None
            )
            names = p.module_fqns_per_model_part
            covered = [name for part in names for name in part]
            assert len(covered) == len(set(covered)) == args.n_layers + 3, "a module is missing or twice"
            assert first, "rank 0 has no first stage"
            stages, schedule = len(names), type(built).__name__.removeprefix("Schedule")
            microbatches = accumulated * built._n_microbatches
        else:
            spec.parallelize_fn(model, dims, config)
        found |= {"world_size": world, "microbatches": microbatches, "schedule": schedule, "stages": stages}
        return found, parameters
    finally:
        dist.destroy_process_group()


def main(exports: Path, verdicts: Path) -> None:
    """Read every TOML file of the index and write the verdicts."""
    versions = {name: version(name) for name in ("torchtitan", "torch")}
    judge(exports, verdicts, "torchtitan 0.2.2", versions, lambda file: file.endswith(".toml"), understood)


def understood(path: Path, expected: dict[str, Any]) -> dict[str, Any]:
    """What torchtitan made of one file, with its number of parameters."""
    values, parameters = read(path, expected)
    return values | {"parameters": parameters}


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
