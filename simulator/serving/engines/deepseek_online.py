"""deepseek-online: DeepSeek's own service of early 2025, as far as it was published."""

from __future__ import annotations

from moesim.simulator.serving.engines.registry import Engine, Sourced
from moesim.simulator.serving.engines.vllm_0_19 import GAP

ENGINE = Engine(
    name="deepseek-online",
    mixed=False,
    chunked=True,
    block_tokens=64,
    memory="all",
    exchange="deepep",
    graph_buckets=(1, 2, 4, *range(8, 257, 8)),
    graph_prefill=0,
    host_overlapped=True,
    host_s=Sourced(2e-3, "assumed: as open engines'", 0.5e-3, 5e-3),
    exposed_host_s=GAP,
    launch_s=Sourced(5e-6, "assumed: eager prefill", 3e-6, 10e-6),
    source="deepseek-ai/open-infra-index@56d8685 day 6 (pools of prefill and decode, two micro-batches, DeepEP), "
    "deepseek-ai/FlashMLA (blocks of 64 tokens); the scheduler and its graphs were not published: assumed",
)  # fmt: skip
