"""Kernel launches of a published run: its host, its module library and its CUDA graphs.

Hosts are those of the vendor's systems; a host without published launch times is assumed to be as fast as
that of a DGX H100. Modules and graphs come from the configurations behind the row.
"""

from __future__ import annotations

from typing import Any

from moesim.simulator.scoring.scoreboard.configurations import published_of
from moesim.simulator.scoring.scoreboard.rows import OpenRow

HOSTS = {"GB": "grace-gb200", "A100": "epyc-7742", "MI": "epyc-9004"}
"""Hosts by the beginning of an accelerator's name: of an NVL72 tray, a DGX A100 and an Instinct node."""
OTHER_HOST = "xeon-8480c"
MEGATRON_SOURCES = ("MoE Parallel Folding", "NVIDIA/NeMo")
"""Beginnings of sources whose runs are Megatron core's, where no configuration says so."""


def launching_of(row: OpenRow) -> dict[str, Any]:
    """The fields of `Software` that describe kernel launches."""
    published = published_of(row)
    megatron = published.layer_kernels == "megatron-te" or row.source.startswith(MEGATRON_SOURCES)
    return {
        "host": next((host for begin, host in HOSTS.items() if row.hardware.startswith(begin)), OTHER_HOST),
        "modules": published.modules or ("megatron-core" if megatron else "transformer-engine"),
        "cuda_graphs": published.cuda_graphs or (),
    }
