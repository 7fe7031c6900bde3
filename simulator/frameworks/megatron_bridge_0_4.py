"""Megatron-Bridge 0.4 with its own recipes, on Megatron core 0.17 (its submodule 3rdparty/Megatron-LM)."""

from __future__ import annotations

from moesim.simulator.frameworks.megatron_core_0_16 import LIMITS, answers, dispatcher
from moesim.simulator.frameworks.registry import Answer, Release


def release(version: str, revision: str, fusions: int) -> Release:
    """A release of Megatron-Bridge on a revision of Megatron core; `fusions`: the line of its fused loss."""
    bridge = f"NVIDIA-NeMo/Megatron-Bridge@v{version}.0 src/megatron/bridge"
    recipes, model = f"{bridge}/recipes/common.py", f"{bridge}/models/gpt_provider.py"
    return Release(
        f"Megatron-Bridge {version}",
        answers(revision)
        | {
            "loss": Answer("compiled", f"{model}:{fusions}: cross_entropy_loss_fusion"),
            "weight_gradients": Answer("accumulated", f"{model}:{fusions + 1}: gradient_accumulation_fusion"),
            "step_kernels": Answer(
                "megatron-ddp-checked", f"{recipes}:81, 85: check_for_nan_in_grad and average_in_collective"
            ),
            "overlap_data_parallel": Answer(True, f"{recipes}: overlap_grad_reduce and overlap_param_gather"),
            "garbage_collection": Answer("fixed", f"{recipes}:68: manual_gc"),
        },
        LIMITS,
        dispatcher(revision),
    )


RELEASE = release("0.4", "core_r0.17.0 (d7288711b)", 196)
