"""Scores the times of sparse attention modules on H200 against measured ones.

The 348 measured rows are a sample of the tables of ai-dynamo/aiconfigurator@095f58a51 (Apache-2.0): modules
of SGLang 0.5.14 and vLLM 0.24.0 on one H200. Within every kernel, model, module, phase and hidden size the
rows are in the order of the source; the first, third, ... are for calibration, the others are left out of it.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from statistics import median
from typing import NamedTuple

from lab.scoring.attention_calls import AttentionCall
from lab.scoring.attention_modules import call_seconds
from lab.scoring.frozen_predictions import DATA

from moesim.hwmodels.accelerator import Accelerator, load_accelerator
from moesim.hwmodels.calibration import CalibrationProfile, load_profile
from moesim.simulator.cost.rate_tables import RateTables
from moesim.simulator.model.attention.compressed import Compressed
from moesim.simulator.model.attention.dsa import DSA
from moesim.simulator.model.attention.protocol import Attention
from moesim.simulator.model.block import site_forward
from moesim.simulator.model.operator import Operator

PROFILE = "h200-sparse-attention"
SITES, STREAMS = 2, 4
"""Halves of a layer that a row of hyper-connections covers, and its residual streams."""

_V32 = {
    "heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_dim": 128, "qk_rope_dim": 64,
    "v_dim": 128, "indexer": {"heads": 64, "head_dim": 128, "top_k": 2048},
}  # fmt: skip
_GLM = {
    "heads": 64, "q_lora_rank": 2048, "kv_lora_rank": 512, "qk_nope_dim": 192, "qk_rope_dim": 64,
    "v_dim": 256, "indexer": {"heads": 32, "head_dim": 128, "top_k": 2048},
}  # fmt: skip
_V4 = {
    "heads": 128, "head_dim": 512, "rope_dim": 64, "q_lora_rank": 1536, "o_groups": 16, "o_lora_rank": 1024,
    "window": 128,
}  # fmt: skip
_DSA: dict[str, tuple[int, DSA]] = {
    "DeepSeek-V3.2": (7168, DSA.model_validate(_V32)),
    "GLM-5": (6144, DSA.model_validate(_GLM)),
    "GLM-5-FP8": (6144, DSA.model_validate(_GLM)),
    "GLM-5.2-FP8": (6144, DSA.model_validate(_GLM)),
}
"""Hidden size and attention of the measured models, from their config.json."""
_COMPRESSED: dict[str, Compressed] = {
    "csa": Compressed.model_validate(
        _V4 | {"ratio": 4, "indexer": {"heads": 64, "head_dim": 128, "top_k": 1024}}
    ),
    "hca": Compressed.model_validate(_V4 | {"ratio": 128}),
}


@dataclass(frozen=True, slots=True)
class MeasuredModule:
    """One measured row: a module, its sizes, its time, and whether the calibration may use it."""

    framework: str
    kernel: str
    model: str
    module: str
    phase: str
    kv: str
    batch: int
    new: int
    past: int
    hidden: int
    seconds: float
    source: str
    calibrates: bool

    @property
    def hyper(self) -> bool:
        """Whether the row is one of hyper-connections; `batch` is then its number of tokens."""
        return self.module.startswith("mhc")

    @property
    def family(self) -> str:
        """Kernel and phase by which the table of errors is grouped."""
        return f"{self.kernel}, {self.phase}" if self.phase else self.kernel

    @property
    def attention(self) -> tuple[int, Attention]:
        """Hidden size and attention of the row's model."""
        if self.module.startswith("dsv4"):
            return self.hidden or 7168, _COMPRESSED[self.module.split("_")[1]]
        hidden, attention = _DSA[self.model]
        if "skip_indexer" in self.module:
            shared = attention.indexer.model_copy(update={"shared": True})
            attention = attention.model_copy(update={"indexer": shared})
        return hidden, attention

    @property
    def site_operator(self) -> Operator:
        """The kernel of hyper-connections around one half of a layer that the row measured."""
        pre, post = site_forward(self.batch, self.hidden, STREAMS, "layer")
        return pre if self.module.endswith("pre") else post

    @property
    def call(self) -> AttentionCall:
        """The call that was measured."""
        return AttentionCall(
            phase="prefill" if self.phase == "prefill" else "decode",
            batch=self.batch,
            new=self.new,
            past=self.past,
            kv="bf16" if self.kv == "bfloat16" else "fp8",
            stack="vllm" if self.framework.startswith("VLLM") else "sglang",
        )


class ModuleScore(NamedTuple):
    """A measured row with its predicted seconds."""

    row: MeasuredModule
    seconds: float

    @property
    def error(self) -> float:
        """Relative error, positive where the prediction is too slow."""
        return self.seconds / self.row.seconds - 1.0


@lru_cache(maxsize=1)
def measured_modules() -> tuple[MeasuredModule, ...]:
    """The rows of `lab/scoring/data/sparse-attention.csv`, with every second one for calibration."""
    file = DATA / "sparse-attention.csv"
    raw = list(csv.DictReader(file.read_text(encoding="utf-8").splitlines()))
    raw.sort(key=lambda r: (_class(r), int(r["source"].rpartition(" ")[2])))
    out, seen = [], dict[tuple[str, ...], int]()
    for r in raw:
        number = seen[_class(r)] = seen.get(_class(r), -1) + 1
        out.append(_row(r, calibrates=number % 2 == 0))
    return tuple(out)


def _class(r: dict[str, str]) -> tuple[str, ...]:
    return r["framework"], r["kernel"], r["model"], r["module"], r["phase"], r["hidden"]


def _row(r: dict[str, str], calibrates: bool) -> MeasuredModule:
    return MeasuredModule(
        r["framework"], r["kernel"], r["model"], r["module"], r["phase"], r["kv"], int(r["batch"]),
        int(r["new"] or 0), int(r["past"] or 0), int(r["hidden"] or 0), float(r["milliseconds"]) * 1e-3,
        r["source"], calibrates,
    )  # fmt: skip


def predicted_seconds(row: MeasuredModule, accelerator: Accelerator, profile: CalibrationProfile) -> float:
    """Seconds of a row's module under a profile."""
    if row.hyper:
        return SITES * RateTables(accelerator, profile).basis(row.site_operator, False).seconds
    hidden, attention = row.attention
    return call_seconds(attention, hidden, row.call, accelerator, profile).seconds


def score_modules(rows: Iterable[MeasuredModule] | None = None) -> tuple[ModuleScore, ...]:
    """Predict every measured row on H200 with the shipped profile."""
    accelerator, profile = load_accelerator("h200-sxm"), load_profile(PROFILE)
    chosen = measured_modules() if rows is None else tuple(rows)
    return tuple(ModuleScore(row, predicted_seconds(row, accelerator, profile)) for row in chosen)


def median_error(scores: Iterable[ModuleScore]) -> float:
    """Median of the absolute relative errors."""
    return median(abs(score.error) for score in scores)
