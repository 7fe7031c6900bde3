"""A small job whose prediction takes a fraction of a second."""

from __future__ import annotations

import pytest

from moesim.simulator.scenario import Scenario, load_scenario

SMALL = [
    "cluster={node: hgx-h800, nodes: 8, network: mpft-ib-400g, name: 64xh800, price_per_gpu_hour: $2/h}",
    "parallel={tp: 1, pp: 4, ep: 16, cp: 1, microbatch: 1, zero_stage: 1}",
    "stages.blocks=[embedding moe*2, moe*2, moe*2, moe*2 head]",
    "batch.sequences=128",
]


@pytest.fixture(scope="session")
def small() -> Scenario:
    """Eight MoE blocks of DeepSeek-V3 on 64 H800: DualPipe over 4 ranks, 16-way expert parallelism."""
    return load_scenario("deepseek-v3-2048xh800", SMALL)
