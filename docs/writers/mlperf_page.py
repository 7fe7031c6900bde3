"""docs/mlperf-v6.md: DeepSeek-V3 671B in MLPerf Training v6.0, two open runs and seven frozen predictions.

    python docs/writers/mlperf_page.py            writes the page from fresh predictions
    python docs/writers/mlperf_page.py --freeze   appends today's predictions to the frozen ones

The page puts the frozen predictions beside today's, and fails where a frozen line was changed.
"""

from __future__ import annotations

import argparse
import csv
import io
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from moesim.simulator.predict.driver import predict
from moesim.simulator.scoring import mlperf
from moesim.simulator.scoring.scoreboard.rows import open_rows
from moesim.simulator.studies.uncertainty import with_uncertainty

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "mlperf-v6.md"
DATA = ROOT / "simulator" / "data" / "published" / mlperf.FROZEN
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


class Today(NamedTuple):
    """Today's prediction of a run: step (s), its 80 % interval with the median, and whether it fits."""

    step_s: float
    p10_s: float
    p50_s: float
    p90_s: float
    fits: bool


def today(name: str) -> Today:
    """Predict a run with its interval."""
    result = with_uncertainty(mlperf.scenario_of(name))
    assert result.uncertainty is not None
    band = result.uncertainty.bands["step_time_s"]
    return Today(result.step.time_s, band.p10, band.p50, band.p90, result.memory.fits)


def page() -> str:
    """The page from fresh predictions; exits where a frozen line was changed."""
    changed = mlperf.changed_freezes()
    if changed:
        sys.exit(f"{mlperf.FROZEN}: the freezes of {', '.join(changed)} are not those that were frozen")
    now = {run.name: today(run.name) for run in mlperf.runs()}
    published = {row.id: row.published_step_s for row in open_rows() if row.group == mlperf.GROUP}
    lines = [
        "# MLPerf Training v6.0: DeepSeek-V3 671B",
        "",
        "Nine submitted runs of DeepSeek-V3 671B on GB200 and GB300 NVL72, predicted from their published",
        "scripts (`simulator/data/published/mlperf-v6.yaml` says which line states what). The steps of two",
        "runs are open. Nobody has looked at those of the other seven: their predictions are frozen here",
        "before anyone compares. `docs/writers/mlperf_page.py` writes this page.",
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
    lines += ["", *_frozen_section(now), "", *_ablations(published), ""]
    return "\n".join(lines)


def _frozen_section(now: dict[str, Today]) -> list[str]:
    lines = ["## Frozen predictions", ""]
    for date, text in mlperf.FREEZES.items():
        block = {line.name: line for line in mlperf.frozen() if line.date == date}
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


def freeze() -> None:
    """Append today's predictions of all runs, and print the digest that goes into the code."""
    date = datetime.now(tz=UTC).strftime("%Y-%m-%d %H:%M")
    if mlperf.changed_freezes():
        sys.exit(f"{mlperf.FROZEN}: an earlier freeze was changed; restore it first")
    commit = subprocess.run(
        ["git", "rev-parse", "--short=10", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    block = []
    for run in mlperf.runs():
        one = today(run.name)
        times = {
            f"{key}_s": round(value, 4)
            for key, value in zip(("step", "p10", "p50", "p90"), one, strict=False)
        }
        fits = "yes" if one.fits else "no"
        block.append(
            mlperf.FrozenPrediction.model_validate(
                {"name": run.name, "date": date, "commit": commit, **times, "fits": fits}
            )
        )
    text = io.StringIO()
    writer = csv.DictWriter(text, list(mlperf.FrozenPrediction.model_fields), lineterminator="\n")
    if not DATA.exists() or not DATA.read_text("utf-8"):
        writer.writeheader()
    writer.writerows(line.model_dump() for line in block)
    with DATA.open("a", encoding="utf-8") as file:
        file.write(text.getvalue())
    print(f'add to FREEZES in simulator/scoring/mlperf.py:\n    "{date}": "{mlperf.digest(block)}",')


def main() -> None:
    """Write the page, or freeze."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--freeze", action="store_true", help="append today's predictions to the frozen ones")
    if parser.parse_args().freeze:
        freeze()
    else:
        PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
