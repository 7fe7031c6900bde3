"""trtllm-1.2: habits and times."""

from __future__ import annotations

from moesim.simulator.serving.engines.registry import Engine, Sourced

ENGINE = Engine(
    name="trtllm-1.2",
    mixed=True,
    chunked=True,
    block_tokens=16,
    graph_buckets=(1, 2, 4, *range(8, 513, 8)),
    step_host_s=Sourced(0.0, "assumed", 0.0, 1e-3),
    launch_s=Sourced(4e-6, "assumed", 2e-6, 8e-6),
    source="to be read",
)
