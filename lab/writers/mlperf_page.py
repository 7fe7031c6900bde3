"""lab/docs/mlperf-v6.md: DeepSeek-V3 671B in MLPerf Training v6.0, two open runs and seven frozen predictions.

    python -m lab.writers.mlperf_page            writes the page from fresh predictions
    python -m lab.writers.mlperf_page --freeze   appends today's predictions to the frozen ones

The page puts the frozen predictions beside today's, and fails where a frozen line was changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lab.scoring import mlperf_frozen
from lab.scoring.frozen_predictions import StepInterval, step_with_interval
from lab.writers.frozen_page import ROOT, FrozenPage

from moesim.simulator.predict.driver import predict
from moesim.simulator.scoring import mlperf
from moesim.simulator.scoring.scoreboard.rows import open_rows

PAGE = ROOT / "lab" / "docs" / "mlperf-v6.md"
OPEN = "gb300-512", "gb200-512"

ABLATIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("all mechanisms", ()),
    ("transfers in series (interleaved 1F1B)", ("schedule=interleaved-1f1b",)),
    ("DeepSeek's order and interference in every pair", ("communication.overlap=deepseek-v3",)),
    ("weight gradients not delayed", ("communication.delay_weight_gradients=false",)),
    ("GEMMs leave SMs free in pairs only (16 everywhere else)", ("communication.gemm_margin=null",)),
    ("GEMMs leave no SM free", ("communication.gemm_margin=0",)),
    ("balanced experts", ("routing.load=null", "routing.capacity=null")),
    ("buffers of experts as large as their rows", ("software.static_experts=null",)),
    ("no CUDA graph", ("software.cuda_graphs=[]",)),
    ("head in BF16", ("precision.head=bf16",)),
    ("attention in BF16", ("precision.attention=bf16",)),
    ("rows permuted on the compute stream", ("communication.permutation_stream=compute",)),
    ("gradients and parameters after the step", ("software.overlap_data_parallel=false",)),
)


def prediction(name: str) -> tuple[StepInterval, bool]:
    """Today's prediction of a run: its step with the interval, and whether it fits."""
    step, result = step_with_interval(mlperf.scenario_of(name))
    return step, result.memory.fits


def columns(name: str) -> Mapping[str, Any]:
    """Today's prediction of a run as a frozen line holds it."""
    step, fits = prediction(name)
    return {**step.rounded(), "fits": "yes" if fits else "no"}


FROZEN = FrozenPage(
    PAGE,
    mlperf_frozen.FREEZES,
    "lab/scoring/mlperf_frozen.py",
    lambda: [run.name for run in mlperf.runs()],
    columns,
)


def page() -> str:
    """The page from fresh predictions; exits where a frozen line was changed."""
    frozen = FROZEN.checked_lines()
    now = {run.name: prediction(run.name)[0] for run in mlperf.runs()}
    published = {row.id: row.published_step_s for row in open_rows() if row.group == mlperf.GROUP}
    lines = [
        "# MLPerf Training v6.0: DeepSeek-V3 671B",
        "",
        "Nine submitted runs of DeepSeek-V3 671B on GB200 and GB300 NVL72, predicted from their published",
        "scripts (`simulator/data/published/mlperf-v6.yaml` says which line states what). The steps of two",
        "runs are open. Nobody has looked at those of the other seven: their predictions are frozen here",
        "before anyone compares. `lab/writers/mlperf_page.py` writes this page.",
        "",
        "## Open runs",
        "",
        "| run | published step (s) | predicted | error | P10 to P90 |",
        "|---|---|---|---|---|",
    ]
    for run in mlperf.runs():
        step = published.get(run.row)
        if step is not None:
            one = now[run.name]
            lines.append(
                f"| {run.name} | {step:.2f} | {one.step_s:.2f} | {one.step_s / step - 1.0:+.1%} | "
                f"{one.p10_s:.2f} to {one.p90_s:.2f} |"
            )
    lines += ["", *_frozen_section(frozen, now), "", *_ablations(published), ""]
    return "\n".join(lines)


def freezes_text(frozen: tuple[mlperf_frozen.FrozenPrediction, ...]) -> list[str]:
    """How often predictions were frozen, and what the open runs' errors were each time."""
    published = {row.id: row.published_step_s for row in open_rows() if row.group == mlperf.GROUP}
    said = []
    for date in mlperf_frozen.FREEZES.digests:
        steps = {line.name: line.step_s for line in frozen if line.date == date}
        errors = []
        for name in OPEN:
            measured = published[mlperf.run_named(name).row]
            assert measured is not None
            errors.append(f"{steps[name] / measured - 1.0:+.1%}")
        said.append(f"{' and '.join(errors)} on {date}")
    return [
        f"Predictions were frozen {len(said)} times. Between the freezes the model changed, with the steps",
        f"of the open runs ({', '.join(OPEN)}) in view. Their errors were",
        f"{'; '.join(said)}.",
        "No freeze replaces another: each is to be scored, the first one as what was predicted first.",
    ]


def _frozen_section(
    frozen: tuple[mlperf_frozen.FrozenPrediction, ...], now: dict[str, StepInterval]
) -> list[str]:
    lines = ["## Frozen predictions", "", *freezes_text(frozen), ""]
    for date, text in mlperf_frozen.FREEZES.digests.items():
        block = {line.name: line for line in frozen if line.date == date}
        commit = next(iter(block.values())).commit
        lines += [
            f"Frozen on {date} from commit `{commit}`; SHA-256 of the lines `{text[:16]}...`. A test and",
            "this page's writer fail where a frozen line differs from its digest. *Today* is the prediction",
            "of the tree that wrote this page.",
            "",
            "| run | GPUs | frozen step (s) | P10 | P50 | P90 | fits | today (s) |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for run in mlperf.runs():
            one = block[run.name]
            lines.append(
                f"| {run.name} | {run.gpus:,} | {one.step_s:.3f} | {one.p10_s:.3f} | {one.p50_s:.3f} | "
                f"{one.p90_s:.3f} | {one.fits} | {now[run.name].step_s:.3f} |"
            )
        lines.append("")
    return lines[:-1]


def _ablations(published: dict[str, float | None]) -> list[str]:
    lines = [
        "## What each mechanism does",
        "",
        "Each line takes one mechanism away by the overrides that it names.",
        "",
        "| without | overrides | gb300-512 (s) | error | gb200-512 (s) | error |",
        "|---|---|---|---|---|---|",
    ]
    for title, overrides in ABLATIONS:
        cells = []
        for name in OPEN:
            step = predict(mlperf.scenario_of(name, overrides)).result.step.time_s
            measured = published[mlperf.run_named(name).row]
            assert measured is not None
            cells += [f"{step:.2f}", f"{step / measured - 1.0:+.1%}"]
        shown = ", ".join(f"`{text}`" for text in overrides)
        lines.append(f"| {title} | {shown} | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    FROZEN.main(page, __doc__ or "")
