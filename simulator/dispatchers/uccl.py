"""UCCL-EP: DeepEP's kernels with proxies on the host for the NIC; its figures are of EFA."""

from __future__ import annotations

from dataclasses import replace

from moesim.simulator.dispatchers.deepep import DEEPEP_2025_04, DEEPEP_LOW_LATENCY
from moesim.simulator.dispatchers.protocol import EFA, PublishedSms, published

_SOURCE = "uccl-project/uccl@da914a2054c2 ep/"

UCCL_EP = replace(
    DEEPEP_2025_04,
    name="uccl-ep",
    adapters=EFA,
    host_threads=4,  # _SOURCE include/common.hpp: kNumProxyThs 4, each pinned to a core, src/proxy.cpp
    domain_ranks=published(8, f"{_SOURCE}include/ep_configs.cuh: NUM_MAX_NVL_PEERS 8", "2026-08"),
    domains=published(20, f"{_SOURCE}include/ep_configs.cuh: NUM_MAX_RDMA_PEERS 20", "2026-08"),
    sms=PublishedSms(
        published(20, f"{_SOURCE}bench/buffer.py: Buffer.num_sms = 20", "2026-08"),
        published(24, f"{_SOURCE}bench/test_internode.py: num_sms = 24 with CUDA", "2026-08"),
    ),
)

UCCL_EP_LOW_LATENCY = replace(
    DEEPEP_LOW_LATENCY, name="uccl-ep-low-latency", curves="uccl-ep-low-latency", adapters=EFA
)
