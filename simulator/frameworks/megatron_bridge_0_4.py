"""Megatron-Bridge 0.4 with its own recipes, on Megatron core 0.17 (its submodule 3rdparty/Megatron-LM)."""

from __future__ import annotations

from moesim.simulator.frameworks.megatron_core_0_16 import LIMITS, answers, dispatcher
from moesim.simulator.frameworks.registry import Answer, Release

_BRIDGE = "NVIDIA-NeMo/Megatron-Bridge@v0.4.0 src/megatron/bridge"
_RECIPES, _MODEL = f"{_BRIDGE}/recipes/common.py", f"{_BRIDGE}/models/gpt_provider.py"

REVISION = "core_r0.17.0 (d7288711b)"

RELEASE = Release(
    "Megatron-Bridge 0.4",
    answers(REVISION)
    | {
        "loss": Answer("compiled", f"{_MODEL}:196: cross_entropy_loss_fusion"),
        "weight_gradients": Answer("accumulated", f"{_MODEL}:197: gradient_accumulation_fusion"),
        "step_kernels": Answer(
            "megatron-ddp-checked", f"{_RECIPES}:81, 85: check_for_nan_in_grad and average_in_collective"
        ),
        "overlap_data_parallel": Answer(True, f"{_RECIPES}: overlap_grad_reduce and overlap_param_gather"),
        "garbage_collection": Answer("fixed", f"{_RECIPES}:68: manual_gc"),
    },
    LIMITS,
    dispatcher(REVISION),
)
