"""Megatron core 0.16 as `pretrain_gpt.py` starts it with Transformer Engine and no further flag."""

from __future__ import annotations

from moesim.simulator.frameworks.registry import OF_FSDP, Answer, Limits, Release, all_off

LIMITS = Limits(
    schedules=("1f1b", "interleaved-1f1b", "interleaved-1f1b-overlapped"),
    policies=("none", "attention", "selective", "full", "deepseek-v3"),
    dispatchers=("nccl", "nccl-allgather", "deepep-2025-02", "deepep-2025-04", "hybridep", "uccl-ep"),
)
"""Plans that it runs (core/pipeline_parallel/schedules.py, transformer/moe/token_dispatcher.py): it repeats
modules or layers, not single operators; UCCL's library takes the place of DeepEP's."""


def answers(revision: str) -> dict[str, Answer]:
    """Answers of Megatron-LM's `revision`, whose code has all that the sources name."""
    core, training = (f"NVIDIA/Megatron-LM@{revision} megatron/{part}" for part in ("core", "training"))
    te = "NVIDIA/TransformerEngine@v2.11 transformer_engine/pytorch"
    config, parallel = f"{core}/transformer/transformer_config.py", f"{core}/model_parallel_config.py"
    reduction, moe = f"{core}/distributed", f"{core}/transformer/moe"
    arguments = f"{training}/arguments.py"
    return {
        "op_keeps_transfers": Answer(True, f"{config}: recompute_modules has no list of operators"),
        "attention": Answer("flash", f"{core}/extensions/transformer_engine.py: TEDotProductAttention"),
        "fp8_scales": Answer("delayed", f"{config}: fp8_recipe is delayed"),
        "amax_reduction": Answer("data-parallel", f"{core}/fp8_utils.py: get_amax_reduction_group"),
        "fp8_activations": Answer("separate", f"{core}/transformer/mlp.py: a kernel between both layers"),
        "router": Answer("chain", f"{config}: moe_router_fusion is off"),
        "pad_expert_rows": Answer(True, f"{config}: moe_router_padding_for_fp8 is off, so experts.py pads"),
        "padded_experts": Answer(False, f"{moe}/experts.py: it pads in FP8 only"),
        "expert_rows": Answer("fused", f"{moe}/moe_utils.py: permute, with moe_permute_fusion as exported"),
        "expert_reads": Answer("counts", f"{moe}/token_dispatcher.py: _maybe_dtoh_and_synchronize"),
        "expert_kernels": Answer("separate", f"{moe}/experts.py: TEGroupedMLP.forward"),
        "expert_biases": Answer(
            "split", f"{moe}/experts.py: _apply_bias; {core}/fusions/fused_bias_geglu.py"
        ),
        "scaled_rotary": Answer(
            "halves", f"{core}/models/common/embeddings/rope_utils.py: a scale is not in the fused kernel"
        ),
        "kernels": Answer("fused", f"{core}/fusions"),
        "gradient_sums": Answer(False, f"{core}/transformer/attention.py: linear_qkv is one layer"),
        **all_off(f"{reduction}/param_and_grad_buffer.py: its own buffers", *OF_FSDP),
        "layer_kernels": Answer("megatron-te", f"{core}/fusions/fused_bias_dropout.py: one kernel"),
        "step_kernels": Answer("megatron-ddp", f"{arguments}: check_for_nan_in_loss_and_grad is on"),
        "gradients_all_reduced": Answer(False, f"{reduction}/param_and_grad_buffer.py: start_grad_sync"),
        "tied_tables_reduced": Answer(
            True, f"{reduction}/finalize_model_grads.py: _allreduce_word_embedding_grads"
        ),
        "weight_gradients": Answer("accumulated", f"{arguments}: gradient_accumulation_fusion is on"),
        "placeholder_gradients": Answer(True, f"{te}/module/base.py: get_dummy_wgrad, since 2.3"),
        "loss": Answer("chain", f"{parallel}: cross_entropy_loss_fusion is off"),
        "overlap_tensor_parallel": Answer(
            "weight-gradient", f"{parallel}: tp_comm_overlap is off; {te}/module/linear.py"
        ),
        "end_collectives": Answer(True, f"{core}/tensor_parallel/layers.py: VocabParallelEmbedding"),
        "overlap_context_parallel": Answer(True, f"{arguments}: cp_comm_type is p2p"),
        "ring_attention": Answer(
            "pieces", f"{te}/attention/dot_product_attention/context_parallel.py: AttnFuncWithCPAndKVP2P"
        ),
        "overlap_data_parallel": Answer(False, f"{arguments}: overlap_grad_reduce is off"),
        "recompute_stops_early": Answer(False, f"{core}/tensor_parallel/random.py: CheckpointFunction"),
        "parameter_gathers": Answer("block", f"{reduction}: Megatron-FSDP prefetches whole modules"),
        "gradient_sync": Answer(None, f"{reduction}: Megatron-FSDP scatters in every backward"),
        "data_parallel_buckets": Answer("megatron", f"{reduction}/distributed_data_parallel.py: bucket_size"),
        "bucket_parameters": Answer(None, f"{reduction}/distributed_data_parallel.py: bucket_size"),
        "overlap_optimizer": Answer(False, f"{arguments}: it is a flag"),
        "awaited_sends": Answer("edges", f"{parallel}: overlap_p2p_comm_warmup_flush is off"),
        "modules": Answer("megatron-core", f"{core}/models/gpt/gpt_layer_specs.py"),
        "compiled_blocks": Answer(False, f"{core}/transformer/transformer_block.py: blocks are not compiled"),
        "dtensor": Answer(False, f"{core}/tensor_parallel/layers.py: its own linear layers"),
        "garbage_collection": Answer(
            "automatic", f"{training}/training.py: only manual_gc, a flag, stops it"
        ),
    }


def dispatcher(revision: str) -> Answer:
    """What its guide tells plans with expert parallelism to use."""
    place = f"NVIDIA/Megatron-LM@{revision} megatron/core/transformer/moe/README.md"
    return Answer("nccl", f"{place}: alltoall with expert parallelism; the flag's own default is allgather")


REVISION = "core_r0.16.0 (ddc0d6774)"
RELEASE = Release("Megatron core 0.16", answers(REVISION), LIMITS, dispatcher(REVISION))
