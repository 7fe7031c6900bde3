"""Environment variables that Megatron-LM demands for a plan."""

from __future__ import annotations

from moesim.hwmodels.accelerator import Accelerator
from moesim.simulator.trainers.facts import PlanFacts

FREE_ARCHITECTURES = frozenset({"Blackwell", "Blackwell Ultra", "Rubin"})
"""Architectures on which Megatron-LM asks for no single hardware queue (compute capability from 10 on)."""


def megatron_environment(plan: PlanFacts, accelerator: Accelerator) -> dict[str, str]:
    """Variables without which Megatron-LM stops at its own checks.

    With tensor or context parallelism it demands CUDA_DEVICE_MAX_CONNECTIONS=1 before Blackwell, and with
    FSDP (ZeRO stages 2 and 3) any other value (NVIDIA/Megatron-LM@d98e8a6 megatron/training/arguments.py).
    """
    split = plan.parallel.tp > 1 or plan.parallel.cp > 1
    if split and plan.parallel.zero_stage < 2 and accelerator.architecture not in FREE_ARCHITECTURES:
        return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    return {}
