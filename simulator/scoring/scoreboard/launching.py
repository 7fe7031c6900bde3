"""Who launches the kernels of a published run: its host, whose modules, and what replays from CUDA graphs.

Hosts are those of the vendor's systems; where no time of such a host was published, that of a DGX H100
stands for it (an assumption). Modules and graphs are those of the configurations behind the row.
"""

from __future__ import annotations

from typing import Any

from moesim.simulator.scoring.scoreboard.configurations import published_of
from moesim.simulator.scoring.scoreboard.rows import OpenRow


def launching_of(row: OpenRow) -> dict[str, Any]:
    """The fields of `Software` that say who launches."""
    published = published_of(row)
    return {
        "host": "grace-gb200" if row.hardware.startswith("GB") else "xeon-8480c",
        "modules": published.modules or "transformer-engine",
        "cuda_graphs": published.cuda_graphs or (),
    }
