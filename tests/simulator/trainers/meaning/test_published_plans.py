"""Plans with the values of published launch files, and the scenarios that they mean.

The command lines are our own; their values are those of the named sources. ModelZoo is
yanring/Megatron-MoE-ModelZoo@e8650517: model_configs/benchmarking, and runtime.conf or best_practice for
degrees.
"""

from __future__ import annotations

from typing import Any

import pytest
from megatron_launches import DEEPSEEK, MIXTRAL, read

MIXTRAL_BASE = "mixtral-8x7b-64xh100"
ZOO = "--bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --sequence-parallel\n"
ZOO += "--attention-dropout 0.0 --hidden-dropout 0.0 --disable-bias-linear --swiglu --normalization RMSNorm\n"
ZOO += "--position-embedding-type rope --untie-embeddings-and-output-weights --moe-grouped-gemm\n"
ZOO += "--expert-tensor-parallel-size 1 --micro-batch-size 1 --seq-length 4096 --use-flash-attn\n"
MLA = "--multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128\n"
MLA += (
    "--qk-pos-emb-head-dim 64 --v-head-dim 128 --qk-layernorm --kv-channels 128 --num-attention-heads 128\n"
)
V3 = ZOO + MLA + "--num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-experts 256\n"
V3 += (
    "--moe-layer-freq ([0]*3+[1]*58) --moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048\n"
)
V3 += "--moe-router-topk 8 --moe-router-group-topk 4 --moe-router-num-groups 8\n"
V3 += "--moe-router-score-function sigmoid --moe-router-enable-expert-bias\n"
V3 += "--make-vocab-size-divisible-by 3232\n"
V3 += "--cross-entropy-loss-fusion --cross-entropy-fusion-impl native\n"
DEEPEP = "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend deepep\n"
FP8 = "--fp8-recipe blockwise --fp8-format e4m3 --fp8-param-gather --use-precision-aware-optimizer\n"
FP8 += "--main-grads-dtype fp32 --main-params-dtype fp32 --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16\n"
MTP = "--mtp-num-layers 1 --mtp-loss-scaling-factor 0.1\n"
OVERLAP = "--delay-wgrad-compute --overlap-moe-expert-parallel-comm\n"
QWEN_235B = ZOO + "--num-layers 94 --hidden-size 4096 --ffn-hidden-size 12288 --num-attention-heads 64\n"
QWEN_235B += "--kv-channels 128 --group-query-attention --num-query-groups 4 --qk-layernorm\n"
QWEN_235B += (
    "--make-vocab-size-divisible-by 1187 --num-experts 128 --moe-ffn-hidden-size 1536 --moe-router-topk 8\n"
)
MIXTRAL_22B = ZOO + "--num-layers 56 --hidden-size 6144 --ffn-hidden-size 16384 --num-attention-heads 48\n"
MIXTRAL_22B += "--group-query-attention --num-query-groups 8 --num-experts 8 --moe-router-topk 2\n"
V2 = ZOO + MLA + "--num-layers 60 --hidden-size 5120 --ffn-hidden-size 12288 --num-experts 160\n"
V2 += "--moe-layer-freq ([0]+[1]*59) --moe-ffn-hidden-size 1536 --moe-shared-expert-intermediate-size 3072\n"
V2 += "--moe-router-topk 6 --moe-router-group-topk 3 --moe-router-num-groups 8 --moe-router-pre-softmax\n"
LLAMA = """
--use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
--group-query-attention --num-query-groups 8 --kv-channels 128 --seq-length 8192
--max-position-embeddings 8192
--position-embedding-type rope --rotary-base 1000000 --attention-dropout 0.0 --hidden-dropout 0.0 --swiglu
--normalization RMSNorm --attention-backend fused --apply-layernorm-1p --untie-embeddings-and-output-weights
--disable-bias-linear --micro-batch-size 1 --global-batch-size 128 --bf16 --grad-reduce-in-bf16
--cross-entropy-loss-fusion --calculate-per-token-loss --manual-gc --empty-unused-memory-level 1
--fp8-format hybrid --fp8-amax-history-len 1024 --fp8-amax-compute-algo max --fp8-param-gather
--tensor-model-parallel-size 1 --context-parallel-size 1 --sequence-parallel --use-distributed-optimizer
--overlap-grad-reduce --overlap-param-gather --mock-data --tokenizer-type NullTokenizer --vocab-size 128256
"""
GPT3 = """
--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --max-position-embeddings 2048
--attention-backend auto --micro-batch-size 1 --global-batch-size 1536 --train-iters 500000 --fp16
--step-batch-size-schedule "0:16 2.4B:320" --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16
"""


def degrees(tp: int, pp: int, ep: int, batch: int, cp: int = 1) -> str:
    """The command line of a plan's degrees and batch."""
    return (
        f"--tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp}\n"
        f"--expert-model-parallel-size {ep} --context-parallel-size {cp} --global-batch-size {batch}\n"
    )


PLANS: dict[str, tuple[str, int, str, dict[str, Any]]] = {
    # NVIDIA/Megatron-LM@d98e8a64 examples/mixtral/train_mixtral_8x7b_distributed.sh, on 8 nodes
    "mixtral-8x7b example": (MIXTRAL, 64, MIXTRAL_BASE, {
        "model": "mixtral-8x7b", "pp": 4, "ep": 8, "vpp": 1, "sequence_parallel": False, "zero_stage": 1,
        "layers": (8,) * 4, "recompute": "none", "kernels": "nccl", "overlap_data_parallel": True, "dp": 16,
    }),
    # ModelZoo runtime.conf, Mixtral-8x7B
    "mixtral-8x7b zoo": (
        MIXTRAL + "--num-virtual-stages-per-pipeline-rank 8\n--sequence-parallel\n", 64, MIXTRAL_BASE,
        {"model": "mixtral-8x7b", "pp": 4, "ep": 8, "vpp": 8, "layers": (1,) * 32,
         "schedule": "interleaved-1f1b"},
    ),
    # ModelZoo runtime.conf, Mixtral-8x22B
    "mixtral-8x22b zoo": (
        MIXTRAL_22B + degrees(2, 8, 8, 256) + "--num-layers-per-virtual-pipeline-stage 1\n"
        "--moe-token-dispatcher-type alltoall --tp-comm-overlap --make-vocab-size-divisible-by 128\n",
        128, "mixtral-8x22b-128xh100",
        {"model": "mixtral-8x22b", "tp": 2, "pp": 8, "ep": 8, "vpp": 7, "expert_tp": 1, "layers": (1,) * 56,
         "sequence_parallel": True, "overlap_tensor_parallel": "userbuffers", "dp": 8},
    ),
    # ModelZoo runtime.conf, DeepSeek-V3: 128 nodes, 4 layers on the first stage and 1 on the last
    "deepseek-v3 zoo": (
        V3 + MTP + DEEPEP + degrees(1, 16, 64, 8192)
        + "--decoder-first-pipeline-num-layers 4 --decoder-last-pipeline-num-layers 1\n",
        1024, DEEPSEEK,
        {"model": "deepseek-v3", "pp": 16, "ep": 64, "vpp": 1, "layers": (4, *(4,) * 14, 1), "linear": "bf16",
         "kernels": "deepep-2025-02", "sms": 20, "loss": "compiled", "dp": 64, "nodes": 128},
    ),
    # ModelZoo best_practice/deepseek-v3/run_deepseek_v3_h100.sh, 1,024 H100
    "deepseek-v3 h100": (
        V3 + MTP + DEEPEP + FP8 + OVERLAP + degrees(2, 8, 64, 8192)
        + "--recompute-granularity selective --recompute-modules mla_up_proj mlp\n"
        "--pipeline-model-parallel-layout Et|(tt|)*30mL\n",
        1024, DEEPSEEK,
        {"tp": 2, "pp": 8, "ep": 64, "vpp": 4, "recompute": ("mla_up_proj", "mlp"),
         "layers": (1, *(2,) * 30, 0), "linear": "fp8", "scaling": "tile",
         "parameters": "fp8", "moments": "bf16", "sequence_parallel": True, "model": "deepseek-v3", "dp": 64},
    ),
    # the same file, 256 B200
    "deepseek-v3 b200": (
        V3 + MTP + DEEPEP + FP8.replace("blockwise", "mxfp8") + OVERLAP + degrees(1, 8, 32, 2048)
        + "--pipeline-model-parallel-layout Et|(tt|)*30mL\n",
        256, "deepseek-v3-256xb200",
        {"tp": 1, "pp": 8, "ep": 32, "vpp": 4, "linear": "fp8", "scaling": "mx", "dp": 32,
         "sequence_parallel": False},
    ),
    # the same file, 256 H100 with sequences of 16,384 tokens; its --optimizer-cpu-offload is refused
    "deepseek-v3 16k": (
        V3 + MTP + DEEPEP + FP8.replace("--fp8-param-gather", "")
        + degrees(4, 8, 32, 3840) + "--seq-length 16384\n--recompute-granularity selective\n"
        "--recompute-modules mla_up_proj moe mlp layernorm\n"
        "--pipeline-model-parallel-layout Et*2|(tt|)*22t|(tt|)*7mL\n",
        256, DEEPSEEK,
        {"tp": 4, "pp": 8, "ep": 32, "vpp": 4, "sequence_length": 16384, "sequences": 3840, "dp": 8,
         "layers": (2, *(2,) * 22, 1, *(2,) * 7, 0), "parameters": "bf16", "nodes": 32},
    ),
    # ModelZoo runtime.conf, Qwen3-235B-A22B: embedding and loss count as layers (96 / 8 / 4 = 3)
    "qwen3-235b zoo": (
        QWEN_235B + DEEPEP + degrees(2, 8, 32, 256) + "--num-layers-per-virtual-pipeline-stage 3\n"
        "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split\n",
        256, "qwen3-235b-a22b-256xh100",
        {"model": "qwen3-235b-a22b", "tp": 2, "pp": 8, "ep": 32, "vpp": 4, "layers": (2, *(3,) * 30, 2),
         "kernels": "deepep-2025-04", "dp": 16},
    ),
    # ModelZoo best_practice/qwen3/run_h100_235b.sh
    "qwen3-235b h100": (
        QWEN_235B + DEEPEP + OVERLAP + degrees(2, 8, 32, 2048) + "--num-layers-per-virtual-pipeline-stage 3\n"
        "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split\n"
        "--recompute-granularity selective --recompute-modules moe_act layernorm\n"
        "--moe-router-force-load-balancing --cuda-graph-impl transformer_engine\n"
        "--cuda-graph-scope moe_router moe_preprocess\n",
        256, "qwen3-235b-a22b-256xh100",
        {"recompute": ("layernorm", "moe_act"), "cuda_graphs": ("router",), "sequences": 2048,
         "expert_load_cv": 0.0},
    ),
    # ModelZoo runtime.conf, DeepSeek-V2: 2 layers on the first and on the last stage
    "deepseek-v2 zoo": (
        V2 + degrees(1, 16, 8, 1024) + "--num-virtual-stages-per-pipeline-rank 2\n--vocab-size 102400\n"
        "--decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 2\n"
        "--moe-token-dispatcher-type alltoall --moe-shared-expert-overlap\n",
        256, DEEPSEEK,
        {"pp": 16, "vpp": 2, "layers": (1, *(2,) * 14, 1) * 2, "n_layers": 60, "experts": 160,
         "shared_experts": 2,
         "group_score": "top2-sum", "dense_layers": (0,), "kernels": "nccl", "vocab": 102400},
    ),
    # ModelZoo model_configs/benchmarking/Qwen3-235B-A22B.yaml with PP32 and VPP3 on its 94 layers: 96 stages
    "qwen3-235b pp32": (
        QWEN_235B + DEEPEP + degrees(1, 32, 8, 256) + "--num-layers-per-virtual-pipeline-stage 1\n"
        "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split\n",
        256, "qwen3-235b-a22b-256xh100",
        {"model": "qwen3-235b-a22b", "pp": 32, "vpp": 3, "layers": (0, *(1,) * 94, 0)},
    ),
    # NVIDIA/Megatron-LM@d98e8a64 examples/llama/train_llama3_8b_h100_fp8.sh
    "llama-3-8b fp8": (LLAMA, 8, "llama-3-70b-64xh100", {
        "model": "llama-3-8b", "tp": 1, "dp": 8, "linear": "fp8", "scaling": "tensor", "gradients": "bf16",
        "loss": "compiled", "attention": "flash", "zero_stage": 1, "nodes": 1, "sequence_parallel": False,
    }),
    # NVIDIA/Megatron-LM@d98e8a64 examples/gpt3/train_gpt3_175b_distributed.sh, on 128 nodes
    "gpt-3 175b": (GPT3 + "--vocab-size 50257\n", 1024, DEEPSEEK, {
        "tp": 8, "pp": 16, "layers": (6,) * 16, "vocab": 51200, "hidden": 12288, "zero_stage": 0, "dp": 8,
        "dropout": True, "gradients": "bf16", "overlap_tensor_parallel": "weight-gradient",
        "dense_ffn": 49152,
        "sequence_parallel": False, "overlap_data_parallel": False, "tied_embeddings": True,
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", list(PLANS))
def test_a_published_plan_is_understood(name: str) -> None:
    text, gpus, base, expected = PLANS[name]
    scenario = read(text, gpus, base).scenario
    plan, shape, machine = scenario.parallel, scenario.shape, scenario.machine
    found: dict[str, Any] = {
        **shape.model_dump(), **({} if shape.moe is None else shape.moe.model_dump()),
        **scenario.recipe.model_dump(), **scenario.software.model_dump(), **plan.model_dump(),
        **scenario.batch.model_dump(), **scenario.communication.model_dump(),
        "model": scenario.model, "layers": scenario.stages.layers, "recompute": scenario.recompute,
        "schedule": scenario.schedule, "dp": machine.n_gpus // (plan.tp * plan.pp * plan.cp),
        "nodes": machine.nodes, "expert_load_cv": scenario.routing.expert_load_cv.value,
        "loss": scenario.software.loss,
    }  # fmt: skip
    assert machine.n_gpus == gpus
    assert {key: found[key] for key in expected} == expected
