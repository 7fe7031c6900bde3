"""What the supported releases of torchtitan can run, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.validation import nearest


@dataclass(frozen=True, slots=True)
class TitanRelease:
    """Abilities of one release; families are torchtitan's model packages (`llama3`, `deepseek_v3`)."""

    version: str
    pipelined: frozenset[str]
    """Families that can be cut into pipeline stages."""
    context_parallel: frozenset[str]
    """Families whose shipped flavors attend with a kernel that context parallelism supports."""
    deepep: frozenset[str]
    """Families whose experts can exchange tokens with DeepEP."""
    mtp: frozenset[str]
    """Families that have multi-token-prediction modules."""
    expert_tensor_parallel: bool
    """Experts may be split over the tensor-parallel group beside expert parallelism."""
    sequence_parallel_optional: bool
    """Tensor parallelism can run without sequence parallelism."""
    replicates_with_tensor_parallel: bool
    """Parameters may be replicated over data parallelism where tensor or pipeline parallelism is on."""
    experts_need_shards: bool
    """Expert parallelism needs at least two ranks that parameters are sharded over."""
    overlapped_pairs: bool
    """DualPipeV overlaps the exchange of tokens of one micro-batch with the compute of another."""
    fp8_scales: frozenset[str]
    """Values of `precision.scaling` that its FP8 linear layers have."""
    output_module: str
    """Name of the output head in lists of modules."""


# Read in torchtitan 0.2.2: models/*/__init__.py (pipelining_fn), models/*/infra/parallelize.py (attn_type,
# DeepEP, DDP), distributed/parallel_dims.py, distributed/dual_pipe_v.py, config/job_config.py.
_V0_2_2 = TitanRelease(
    version="0.2.2",
    pipelined=frozenset({"llama3", "llama4", "deepseek_v3"}),
    context_parallel=frozenset({"llama3", "llama4", "qwen3"}),
    deepep=frozenset({"llama4", "deepseek_v3"}),
    mtp=frozenset(),
    expert_tensor_parallel=True,
    sequence_parallel_optional=False,
    replicates_with_tensor_parallel=False,
    experts_need_shards=True,
    overlapped_pairs=True,
    fp8_scales=frozenset({"tensor"}),
    output_module="output",
)
# Read in torchtitan 0.3.0: models/*/__init__.py (model_registry), trainer.py, config/configs.py,
# distributed/parallel_dims.py, distributed/pipeline_parallel.py, components/quantization/float8.py.
_V0_3_0 = TitanRelease(
    version="0.3.0",
    pipelined=frozenset({"llama3", "deepseek_v3", "qwen3"}),
    context_parallel=frozenset({"llama3", "deepseek_v3", "qwen3"}),
    deepep=frozenset({"deepseek_v3", "qwen3"}),
    mtp=frozenset({"deepseek_v3"}),
    expert_tensor_parallel=False,
    sequence_parallel_optional=True,
    replicates_with_tensor_parallel=True,
    experts_need_shards=False,
    overlapped_pairs=False,
    fp8_scales=frozenset(),
    output_module="lm_head",
)

RELEASES: Mapping[str, TitanRelease] = {release.version: release for release in (_V0_2_2, _V0_3_0)}
"""Supported releases, oldest first."""
WITH_TOML = "0.2.2"
"""The last release that reads TOML files."""
NEWEST = "0.3.0"
"""The newest supported release, whose configurations are Python functions."""


def release_of(version: str) -> TitanRelease:
    """The release of this version; raises InputError, with the supported ones, for any other."""
    release = RELEASES.get(version)
    if release is None:
        hint = nearest(version, list(RELEASES))
        raise InputError(f"torchtitan {version!r} is not supported{hint}; supported: {', '.join(RELEASES)}")
    return release
