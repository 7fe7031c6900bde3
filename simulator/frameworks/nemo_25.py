"""NeMo 25 (NeMo 2, read at 25.04) with its recipes and MegatronCommOverlapCallback, on Megatron core 0.12."""

from __future__ import annotations

from moesim.simulator.frameworks.megatron_core_0_16 import LIMITS, answers, dispatcher
from moesim.simulator.frameworks.registry import Answer, Release

_NEMO = "NVIDIA/NeMo@d2b21556f nemo"
_OVERLAP = f"{_NEMO}/lightning/pytorch/callbacks/megatron_comm_overlap.py"
_RECIPE = f"{_NEMO}/collections/llm/recipes/llama3_70b.py"
_LATER = ("expert_biases", "gradient_sync", "pad_expert_rows", "placeholder_gradients", "scaled_rotary")
"""Answers of later releases of Megatron core whose code 0.12 does not have."""

RELEASE = Release(
    "NeMo 25",
    {switch: one for switch, one in answers("core_v0.12.0").items() if switch not in _LATER}
    | {
        "router": Answer("chain", "NVIDIA/Megatron-LM@core_v0.12.0 megatron/core/transformer/moe/router.py"),
        "loss": Answer("compiled", f"{_NEMO}/collections/llm/gpt/model/base.py:268"),
        "weight_gradients": Answer("accumulated", f"{_NEMO}/collections/llm/gpt/model/base.py:269"),
        "step_kernels": Answer(
            "megatron-ddp-checked", f"{_RECIPE}:117, 121: check_for_nan_in_grad and average_in_collective"
        ),
        "overlap_data_parallel": Answer(True, f"{_OVERLAP}:187: overlap_grad_reduce"),
        "bucket_parameters": Answer(128 * 1024 * 1024, f"{_OVERLAP}:186: bucket_size"),
        "garbage_collection": Answer("fixed", f"{_RECIPE}:226: GarbageCollectionCallback"),
    },
    LIMITS._replace(
        schedules=("1f1b", "interleaved-1f1b"),
        dispatchers=("nccl", "nccl-allgather", "deepep-2025-02", "deepep-2025-04"),
    ),
    dispatcher("core_v0.12.0"),
)
