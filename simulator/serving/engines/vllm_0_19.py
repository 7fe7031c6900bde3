"""vllm-0.19: habits and times."""

from __future__ import annotations

from moesim.simulator.serving.engines.registry import Engine, Sourced

ENGINE = Engine(
    name="vllm-0.19",
    mixed=True,
    chunked=True,
    block_tokens=16,
    memory="all",
    graph_buckets=(1, 2, 4, *range(8, 513, 8)),
    graph_prefill=512,
    host_overlapped=True,
    host_s=Sourced(2e-3, "assumed", 0.5e-3, 4e-3),
    exposed_host_s=Sourced(0.2e-3, "assumed", 0.0, 0.5e-3),
    launch_s=Sourced(4e-6, "assumed", 2e-6, 8e-6),
    source="to be read",
)
