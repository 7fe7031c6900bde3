"""DeepSpeed 0.19 (read at 0.19.8) in a pipeline, with its BF16 optimizer and Megatron-DeepSpeed's model."""

from __future__ import annotations

from moesim.simulator.frameworks.registry import OF_FSDP, Answer, Limits, Release, all_off

_RUNTIME = "deepspeed 0.19.8 deepspeed/runtime"
_MODEL = "bigscience-workshop/Megatron-DeepSpeed@8387ae17 megatron"

RELEASE = Release(
    "DeepSpeed 0.19",
    {
        **all_off(f"{_RUNTIME}/zero: its own partitions", *OF_FSDP),
        "step_kernels": Answer("deepspeed-bf16", f"{_RUNTIME}/bf16_optimizer.py: step"),
        "gradients_all_reduced": Answer(True, f"{_RUNTIME}/pipe/engine.py:297: _bf16_reduce_grads"),
        "tied_tables_reduced": Answer(True, f"{_RUNTIME}/pipe/engine.py:269: _exec_reduce_tied_grads"),
        "weight_gradients": Answer("added-fp32", f"{_RUNTIME}/bf16_optimizer.py:508: _update_hp_grad"),
        "placeholder_gradients": Answer(False, f"{_MODEL}/model: no Transformer Engine"),
        "loss": Answer("chain", f"{_MODEL}/mpu/cross_entropy.py"),
        "end_collectives": Answer(True, f"{_MODEL}/mpu/layers.py"),
        "ring_attention": Answer("whole", f"{_RUNTIME}/pipe/engine.py: no context parallelism"),
        "overlap_data_parallel": Answer(
            False, f"{_RUNTIME}/zero/config.py:384: overlap_comm, on in ZeRO-3 only"
        ),
        "gradient_sync": Answer(None, f"{_RUNTIME}/zero: ZeRO-2 and 3 reduce in every backward"),
        "data_parallel_buckets": Answer("layer", f"{_RUNTIME}/zero: not Megatron core's buckets"),
        "awaited_sends": Answer("all", f"{_RUNTIME}/pipe/p2p.py:60: dist.send"),
        "modules": Answer("torch", f"{_MODEL}/model: PyTorch's own"),
        "compiled_blocks": Answer(False, f"{_RUNTIME}/engine.py: compile is a call of the user"),
        "dtensor": Answer(False, f"{_MODEL}/mpu/layers.py: its own"),
    },
    # runtime/pipe/engine.py (1F1B; ZeRO-2 and 3 are refused there), runtime/bf16_optimizer.py
    Limits(
        schedules=("1f1b",),
        zero_stages_in_pipelines=(1, 0),
        formats=("bf16",),
        policies=("none", "full", "attention"),
        modules=False,
        dispatchers=("nccl",),
    ),
    Answer("nccl", "deepspeed 0.19.8 deepspeed/moe/sharded_moe.py: _AllToAll"),
)
