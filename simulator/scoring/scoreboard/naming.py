"""Names rows of the open scoreboard for people: model, GPUs, framework and where they were published."""

from __future__ import annotations

from collections.abc import Mapping

from moesim.simulator.scoring.scoreboard.rows import OpenRow

FRAMEWORKS: Mapping[str, str] = {
    "sc21-a100": "Megatron-LM",
    "kort-a100": "Megatron-LM",
    "mtnlg-a100": "Megatron-DeepSpeed",
    "dsv3-h800": "DeepSeek's own",
    "mcoremoe": "Megatron Core",
    "mpf": "Megatron Core",
    "automodel": "NeMo Automodel",
    "dgxc": "NeMo",
    "nemo2407": "NeMo",
    "nemolong": "NeMo",
    "mbridge": "Megatron Bridge",
    "mpt": "LLM Foundry",
    "bloom": "Megatron-DeepSpeed",
    "mlperf": "MLPerf submission",
    "mlperf-v6": "MLPerf submission",
    "simumax": "Megatron-LM",
    "maxtext": "MaxText",
    "primus": "Primus",
}
"""Training framework by the letters of a row's id, as its source says."""

MOST_SOURCE_CHARACTERS = 60


def framework_of(row: OpenRow) -> str:
    """Framework that a row was measured with; raises KeyError for an id of an unknown source."""
    return "MaxText" if "/maxtext" in row.source else FRAMEWORKS[row.id.rpartition("-")[0]]


def title_of(row: OpenRow) -> str:
    """Model, GPUs and framework of a row, such as "llama3-70b on 64 H100-SXM, NeMo"."""
    return f"{row.model} on {row.n_gpus:,} {row.hardware}, {framework_of(row)}"


def publication_of(row: OpenRow) -> str:
    """The first publication that a row names, shortened."""
    first = row.source.partition(";")[0].strip()
    if len(first) <= MOST_SOURCE_CHARACTERS:
        return first
    return first[:MOST_SOURCE_CHARACTERS].rsplit(" ", 1)[0].rstrip(",") + " …"
