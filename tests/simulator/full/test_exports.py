"""What full resolution exports: traces of chosen GPUs, pictures, text."""

from __future__ import annotations

from typing import Any

import pytest

HOME = "deepseek-v3-2048xh800"
SMALL = [
    "--set", "cluster={node: hgx-h800, nodes: 16, network: mpft-ib-400g, name: 128xh800}",
    "--set", "parallel={tp: 1, pp: 4, ep: 16, cp: 1, microbatch: 1, zero_stage: 1}",
    "--set", "batch.sequences=256",
    "--resolution", "full",
]  # fmt: skip


@pytest.fixture
def run(moesim: Any) -> Any:
    return lambda *more: moesim("simulate", HOME, *SMALL, *more)
