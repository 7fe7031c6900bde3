"""What the published configurations behind a source say and its table leaves out, as data: one row a source.

A row of this table is found by source, architecture, hardware and model, never by a measurement.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from moesim.simulator.layout.activations import RecomputePolicy
from moesim.simulator.scoreboard.rows import OpenRow


class Recipe(NamedTuple):
    """What a source's own code fixes; None where it says nothing that the table does not say."""

    source: str
    """Beginning of the rows' source."""
    where: str
    """The published code that says so."""
    arch: str = ""
    hardware: str = ""
    model: str = ""
    recompute: RecomputePolicy | None = None
    zero_stage: int | None = None
    dispatcher: str | None = None
    expert_tp: int | None = None
    gradient_reduce: Literal["fp32", "bf16"] | None = None
    profile: str | None = None

    def holds(self, row: OpenRow) -> bool:
        """Whether a row comes from this source."""
        return (
            row.source.startswith(self.source)
            and row.arch.startswith(self.arch)
            and row.hardware.startswith(self.hardware)
            and row.model.startswith(self.model)
        )


RECIPES = (
    Recipe(
        "NVIDIA-NeMo/Automodel",
        "NVIDIA-NeMo/Automodel@2c236e081 (2025-10-08) examples/benchmark/configs/*_te_deepep.yaml: "
        "activation_checkpointing, reshard_after_forward: false; components/moe/fsdp_mixin.py: gradients "
        "are reduced after the last micro-batch and parameters kept until then",
        arch="moe",
        recompute="full",
        zero_stage=2,
    ),
    Recipe(
        "NVIDIA-NeMo/Automodel",
        "NVIDIA-NeMo/Automodel@36044ad3 examples/llm_benchmark/llama3_3/"
        "custom_llama3_1_70b_pretrain_benchmark_8nodes.yaml: activation_checkpointing, reshard_after_forward",
        arch="dense",
        recompute="full",
        zero_stage=3,
    ),
    Recipe(
        "NVIDIA-NeMo/Megatron-Bridge",
        "NVIDIA-NeMo/Megatron-Bridge@0aec3a7f8 scripts/performance/run_script.py: enable_deepep on H100, and "
        "@v0.2.0 scripts/performance/configs/deepseek: moe_flex_dispatcher_backend deepep",
        hardware="H100",
        model="deepseek-v3",
        dispatcher="deepep-2025-04",
    ),
    Recipe(
        "NVIDIA/dgxc-benchmarking@v25.02 grok1",
        "NVIDIA/dgxc-benchmarking@v25.02 grok1: no degree of expert tensor parallelism, which NeMo v2.1.0 "
        "(in its container 24.12; megatron_init.py line 361) sets to that of tensor parallelism; "
        "NVTE_FUSED_ATTN=0, so FlashAttention 2; grad_sync_dtype bf16; no activation checkpointing",
        recompute="none",
        expert_tp=4,
        gradient_reduce="bf16",
        profile="h100-flash2",
    ),
    Recipe(
        "NVIDIA/dgxc-benchmarking@v25.02 nemo_megatron",
        "NVIDIA/dgxc-benchmarking@v25.02 nemo_megatron/gpt3_175b_hydra.yaml: grad_sync_dtype bf16, "
        "activations_checkpoint_granularity null",
        recompute="none",
        gradient_reduce="bf16",
    ),
    Recipe(
        "NVIDIA/dgxc-benchmarking@v25.02 llama3.1",
        "NVIDIA/dgxc-benchmarking@v25.02 llama3.1/*.yaml: activations_checkpoint_granularity null",
        recompute="none",
    ),
    Recipe(
        "NVIDIA/dgxc-benchmarking@v25.04 llama3.1",
        "NVIDIA/NeMo@v2.3.0 scripts/performance/recommended_model_configs/model_configs_h100.csv, which the "
        "recipe runs: recompute_layers 0",
        recompute="none",
    ),
)
NOTHING = Recipe("", "")


def recipe_of(row: OpenRow) -> Recipe:
    """The published configuration behind a row, empty where none was found."""
    return next((recipe for recipe in RECIPES if recipe.holds(row)), NOTHING)
