"""trtllm-1.2: the PyTorch backend of TensorRT-LLM."""

from __future__ import annotations

from moesim.simulator.serving.engines.registry import Engine, Sourced
from moesim.simulator.serving.engines.vllm_0_19 import GAP

ENGINE = Engine(
    name="trtllm-1.2",
    mixed=True,
    chunked=False,
    block_tokens=32,
    memory="free",
    exchange="allgather",
    graph_buckets=(1, 2, 4, *range(8, 129, 8), 256, 512, 1024, 2048),
    graph_prefill=0,
    host_overlapped=True,
    host_s=Sourced(2e-3, "assumed: Python executor, as vLLM's", 0.5e-3, 5e-3),
    exposed_host_s=GAP,
    launch_s=Sourced(8e-6, "assumed: eager prefill through PyTorch custom operators", 4e-6, 15e-6),
    source="NVIDIA/TensorRT-LLM llmapi/llm_args.py (graphs of 1, 2, 4, multiples of 8 up to 128, then powers of 2; "
    "32 tokens a block, free_gpu_memory_fraction 0.9, chunked prefill off), docs: overlap scheduler on by default",
)  # fmt: skip
