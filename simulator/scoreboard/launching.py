"""Who launches the kernels of a published run: its host, whose modules, and what replays from CUDA graphs.

By source and release, none by row. Graphs are those of the recipes that NVIDIA-NeMo/Megatron-Bridge ships
(`scripts/performance`, tags v0.1.0rc4, v0.2.2, v0.3.0, v0.4.0, v0.5.1, v0.6.0 for releases 25.09, 25.11,
26.02, 26.04, 26.06, 26.08). Hosts are those of the vendor's systems; where no time of such a host was
published, that of a DGX H100 stands for it (an assumption).
"""

from __future__ import annotations

import re
from typing import Any

from moesim.simulator.scoreboard.rows import OpenRow
from moesim.simulator.software import GraphPart

TORCH_MODULES = ("mpt-h100", "mpt-a100", "sc21-gpt-a100", "kort-gpt-a100", "bloom-a100")
"""Groups that ran PyTorch's own operators: llm-foundry, and Megatron-LM before Transformer Engine."""
ROUTER: tuple[GraphPart, ...] = ("router",)
WITH_ATTENTION: tuple[GraphPart, ...] = ("attention", "router")
WHOLE: tuple[GraphPart, ...] = ("all",)


def launching_of(row: OpenRow) -> dict[str, Any]:
    """The fields of `Software` that say who launches."""
    return {
        "host": "grace-gb200" if row.hardware.startswith("GB") else "xeon-8480c",
        "modules": "torch" if row.group in TORCH_MODULES else "transformer-engine",
        "cuda_graphs": graphs_of(row),
    }


def graphs_of(row: OpenRow) -> tuple[GraphPart, ...]:
    """What the recipe of a row's release replays from CUDA graphs."""
    if "MaxText" in row.notes:
        return WHOLE  # XLA runs a compiled step
    release, blackwell = _release(row), not row.hopper and row.hardware[0] in "BG"
    if not release:
        return ()
    if row.model == "llama3-8b":
        return WHOLE if blackwell else ()
    mx = "mx" in row.precision
    if row.model == "qwen3-30b-a3b":
        return _qwen(row, release, mx) if blackwell else ()
    if row.model == "gpt-oss-120b":
        if mx and row.hardware.startswith("GB"):
            return WHOLE
        return WITH_ATTENTION if row.hardware in ("GB300", "B300-SXM") else ()
    return ()


def _qwen(row: OpenRow, release: float, mx: bool) -> tuple[GraphPart, ...]:
    if release < 25.11 or (mx and release >= 26.06):
        return WHOLE
    if row.hardware == "B200-SXM":
        return WITH_ATTENTION if release >= 26.04 else ROUTER
    return WITH_ATTENTION if row.hardware == "GB200" and not mx else ROUTER


def _release(row: OpenRow) -> float:
    """Year and month of the container that a row's notes name, as 26.04; 0 without one."""
    found = re.search(r"NeMo (2\d\.\d\d)", row.notes)
    return float(found.group(1)) if found and row.id.startswith("mbridge") else 0.0
