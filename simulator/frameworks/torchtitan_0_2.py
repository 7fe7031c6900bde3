"""torchtitan 0.2 (read at 0.2.2) as its defaults run it: eager blocks under FSDP2, on torch 2.11."""

from __future__ import annotations

from moesim.simulator.frameworks.registry import Answer, Limits, Release, all_off

_TITAN = "torchtitan 0.2.2 torchtitan"
_PARALLEL = f"{_TITAN}/models/llama3/infra/parallelize.py"
_CONFIG = f"{_TITAN}/config/job_config.py"

RELEASE = Release(
    "torchtitan 0.2",
    {
        "attention": Answer("flash", f"{_TITAN}/models/attention.py: ScaledDotProductAttentionWrapper"),
        "op_keeps_transfers": Answer(
            True, f"{_TITAN}/models/deepseek_v3/infra/parallelize.py:41: all_to_all_single; qwen3 lacks it"
        ),
        "router": Answer("chain", f"{_TITAN}/models/moe/moe.py: TokenChoiceTopKRouter"),
        "expert_biases": Answer("fused", f"{_TITAN}/models/moe/moe.py: none but in gpt_oss (`repeated`)"),
        "scaled_rotary": Answer("fused", f"{_TITAN}/models/gpt_oss: halves, which `kernels: eager` counts"),
        "kernels": Answer("eager", f"{_CONFIG}: compile.enable is off"),
        "expert_rows": Answer("eager", f"{_TITAN}/models/llama4/infra/parallelize.py:613: apply_compile"),
        "padded_experts": Answer(True, f"{_TITAN}/models/moe/utils.py: TOKEN_GROUP_ALIGN_SIZE_M is 8"),
        "compiled_blocks": Answer(False, f"{_CONFIG}: compile.enable is off"),
        "gradient_sums": Answer(True, f"{_TITAN}/models/llama3/model/model.py: wq, wk, wv are three layers"),
        "parameters_copied": Answer(True, f"{_PARALLEL}: fully_shard of every block"),
        "shards_cast": Answer(True, "torch 2.11 _fsdp_collectives.py: _get_param_all_gather_inputs"),
        "single_groups_copied": Answer(True, f"{_TITAN}/models/llama4/infra/parallelize.py:404: the experts"),
        **all_off(f"{_PARALLEL}: FSDP2", "flat_parameters", "gradients_divided", "gradients_all_reduced"),
        "allocator": Answer("expandable", "pytorch/torchtitan run_train.sh: expandable_segments:True"),
        "layer_kernels": Answer("plain", f"{_TITAN}/models: what `kernels: eager` counts"),
        "step_kernels": Answer(
            "torch",
            f"{_TITAN}/distributed/utils.py: clip_grad_norm_; a pipeline has torch-fsdp2",
        ),
        "weight_gradients": Answer("written", f"{_PARALLEL}: fully_shard; autograd writes gradients"),
        "placeholder_gradients": Answer(False, f"{_TITAN}/models: no Transformer Engine"),
        "loss": Answer("eager", f"{_TITAN}/components/loss.py: cross_entropy of logits in FP32"),
        "overlap_tensor_parallel": Answer("none", f"{_CONFIG}: enable_async_tensor_parallel is off"),
        "ring_attention": Answer(
            "pieces",
            "torch 2.11 distributed/tensor/experimental/_attention.py: _templated_ring_attention",
        ),
        "overlap_data_parallel": Answer(True, f"{_PARALLEL}: fully_shard, which always overlaps"),
        "gradient_sync": Answer(None, f"{_TITAN}/train.py: reductions stay on between micro-batches"),
        "awaited_sends": Answer("schedule", "torch.distributed.pipelining: sends are posted"),
        "modules": Answer("torch", f"{_TITAN}/models: PyTorch's own"),
        "dtensor": Answer(True, f"{_PARALLEL}:173: parallelize_module"),
        "garbage_collection": Answer("fixed", f"{_TITAN}/tools/utils.py: GarbageCollection, by gc_freq"),
    },
    # distributed/pipeline_parallel.py (schedules of torch), parallelize.py (fully_shard or replicate),
    # components/quantization, distributed/activation_checkpoint.py, distributed/deepep
    Limits(
        schedules=(
            "gpipe",
            "1f1b",
            "interleaved-1f1b",
            "interleaved-zero-bubble",
            "zbv",
            "dualpipev",
        ),
        schedule_files=True,
        zero_stages=(3, 2, 0),
        formats=("bf16", "fp8 tensor", "fp8 mx"),
        policies=("none", "op", "full", "attention"),
        modules=False,
        dispatchers=("nccl", "deepep-2025-02", "deepep-2025-04", "uccl-ep"),
    ),
    Answer("nccl", f"{_CONFIG}: expert_parallel_comm_backend is standard, PyTorch's all-to-all"),
)
