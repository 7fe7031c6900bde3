"""sglang-0.5: read in the sources of sglang 0.5.9."""

from __future__ import annotations

from moesim.simulator.serving.engines.registry import Engine, Sourced
from moesim.simulator.serving.engines.vllm_0_19 import GAP

ENGINE = Engine(
    name="sglang-0.5",
    mixed=False,
    chunked=True,
    block_tokens=1,
    memory="static",
    exchange="allgather",
    graph_buckets=(1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 513, 16)),
    graph_prefill=0,
    host_overlapped=True,
    host_s=Sourced(2e-3, "assumed: Python scheduler and preparation of a batch, as vLLM's", 0.5e-3, 5e-3),
    exposed_host_s=GAP,
    launch_s=Sourced(
        12e-6, "assumed: eager prefill, Python between the kernels of a layer; 0.55 ms an MLA block of about 40 "
        "launches in ai-dynamo/aiconfigurator's table of H200 at 1 token", 6e-6, 20e-6,
    ),
    source="sglang 0.5.9 srt/server_args.py: mixed chunks off, overlap schedule on, page size 1, captured batches "
    "up to 256 or 512, chunked_prefill_size 8,192 on 60 to 160 GB and 16,384 above, prefill eager",
)  # fmt: skip
