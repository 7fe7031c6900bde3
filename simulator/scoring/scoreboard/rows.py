"""Published measurements of training steps: one row for each with its plan, source, names; kept medians."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from functools import lru_cache
from importlib import resources
from typing import Annotated, Literal

from pydantic import BeforeValidator, PositiveInt

from moesim.hwmodels.frozen import Frozen
from moesim.hwmodels.validation import validate_model
from moesim.hwmodels.yaml_io import parse_mapping
from moesim.simulator.scoring import published_records

FILE, PEAKS = "open-rows.csv", "memory-peaks.csv"
BF16_HARDWARE_COEFFICIENT = 96.0
"""Coefficient of a GPT's FLOPs with full recompute, 96 B s l h^2 (1 + s/6h + V/16lh) (arXiv 2104.04473,
eq. 3)."""

HARDWARE_FLOPS = "hardware flops"

FAMILIES = {"H": "Hopper", "A": "Ampere", "B": "Blackwell", "G": "Blackwell", "T": "TPU", "M": "Instinct"}
"""Accelerator family by the first letter of a row's hardware."""

Metric = Literal["step_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu"]
Number = Annotated[int, BeforeValidator(lambda text: 0 if text == "" else int(float(text)))]
Degree = Annotated[PositiveInt, BeforeValidator(lambda text: 1 if text == "" else int(float(text)))]
"""Degree of parallelism; one that a table leaves out is 1."""


class OpenRow(Frozen):
    """One published measurement; the fields are the columns of `data/published/open-rows.csv`.

    0 stands for a number that the source does not give. `metric` and `value` are as published. `complete`
    says whether the source states everything that a prediction needs.
    """

    id: str
    source: str
    model: str
    arch: Literal["dense", "moe"]
    n_params_b: str = ""
    n_active_b: str = ""
    layers: Number
    hidden: Number
    ffn: Number
    heads: Number
    kv_heads: Number
    vocab: Number
    n_experts: Number
    topk: Number
    seq: Number
    hardware: str
    n_gpus: Number
    tp: Degree
    pp: Degree
    vpp: Degree
    cp: Degree
    ep: Number
    dp: Number = 0
    zero_or_fsdp: str
    gbs_seqs: Number
    mbs: Number
    precision: str
    recompute: str
    schedule: str
    metric: Metric
    value: float
    notes: str
    complete: Literal["yes", "partial", "no"] = "yes"
    group: str
    remarks: tuple[str, ...] = ()
    """Notes on how words of another's table were read (`tables.py`)."""
    unread: str = ""
    """Why a row of another's table cannot be read; empty where it can."""

    @property
    def family(self) -> str:
        """Family of the accelerator that the measurement was taken on."""
        return FAMILIES.get(self.hardware[:1], self.hardware)

    @property
    def published_step_s(self) -> float | None:
        """Seconds of the published step, by the row's own convention (docs/model.md, eq. V1).

        Only `tflops_per_gpu` needs a FLOP count: hardware FLOPs of a GPT with full recompute, where the notes
        say so. None if batch or sequence is missing, and for an MFU, whose FLOP convention is not stated.
        """
        if self.metric == "step_s" or self.unread:
            return None if self.unread else self.value
        tokens = self.gbs_seqs * self.seq
        if self.metric == "mfu" or not tokens or not self.n_gpus:
            return None
        if self.metric == "tokens_per_s_per_gpu":
            return tokens / (self.n_gpus * self.value)
        h, s, layers = self.hidden, self.seq, self.layers
        if HARDWARE_FLOPS not in self.notes.lower() or not h * layers:
            return None
        shape = 1.0 + s / (6.0 * h) + self.vocab / (16.0 * layers * h)
        return BF16_HARDWARE_COEFFICIENT * tokens * layers * h * h * shape / (self.n_gpus * self.value * 1e12)

    @property
    def published_memory_bytes(self) -> float | None:
        """Peak memory of a GPU that the row ("mem 53GB") or a table beside it states; else None."""
        if self.id in memory_peaks():
            return memory_peaks()[self.id]
        _, found, rest = self.notes.partition("mem ")
        figure = rest.partition("GB")[0]
        return float(figure) * 1e9 if found and figure.isdigit() else None


@lru_cache(maxsize=1)
def memory_peaks() -> dict[str, float]:
    """Published peaks of allocated bytes by row id, from tables beside the throughput."""
    return {row["id"]: float(row["gib"]) * 2.0**30 for row in published_records(PEAKS)}


@lru_cache(maxsize=1)
def open_rows() -> tuple[OpenRow, ...]:
    """Every shipped row. Raises InputError for a malformed one."""
    return tuple(
        validate_model(OpenRow, record, f"{FILE}:{record['id']}") for record in published_records(FILE)
    )


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


KEPT = "scoreboard.yaml"


class KeptScore(Frozen):
    """Errors of a set of rows, as fractions, and the share of the rows inside the 80 % interval.

    `interval_width`: median width of the intervals, relative to the predicted steps.
    """

    name: str
    rows: int
    median_error: float
    median_absolute_error: float
    worst_absolute_error: float
    covered: float
    interval_width: float


class KeptBoard(Frozen):
    """Scores of the sets of rows and of the groups of sources, with day and version of their computation."""

    computed: datetime.date
    version: str
    sets: tuple[KeptScore, ...]
    groups: tuple[KeptScore, ...]

    def named(self, name: str) -> KeptScore:
        """The score of one set; raises KeyError for a set that there is not."""
        return {score.name: score for score in self.sets}[name]


@lru_cache(maxsize=1)
def kept_board() -> KeptBoard:
    """The board that is kept in `data/scoreboard.yaml`; lab/writers write it with docs/validation.md."""
    text = resources.files("moesim.simulator").joinpath("data", KEPT).read_text("utf-8")
    return validate_model(KeptBoard, parse_mapping(text, KEPT), KEPT)
