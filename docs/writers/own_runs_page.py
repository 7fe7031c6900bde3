"""docs/own-runs.md: training runs of our own on two H200, predicted first and measured after.

    python docs/writers/own_runs_page.py            writes the page from the frozen and fresh predictions
    python docs/writers/own_runs_page.py --freeze   appends today's predictions to the frozen ones

The page fails where a frozen line was changed.
"""

from __future__ import annotations

import argparse
import csv
import io
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

from moesim.simulator.scoring import own_runs

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "own-runs.md"
DATA = ROOT / "simulator" / "data" / "published" / own_runs.FROZEN
GIB = 2.0**30
NOTES = {
    "2026-11-22 20:39": (
        "Also before the measurement: reading FSDP2 and torchtitan's gpt_oss showed copies that the first",
        "freeze lacks (`software.single_groups_copied`, eq. O32, and `software.expert_biases=repeated`).",
    ),
}
"""What a later freeze adds to the one before it."""


def page() -> str:
    """The page from fresh predictions; exits where a frozen line was changed."""
    changed = own_runs.changed_freezes()
    if changed:
        sys.exit(f"{own_runs.FROZEN}: the freezes of {', '.join(changed)} are not those that were frozen")
    lines = [
        "# Runs of our own on two H200",
        "",
        "Three training runs with torchtitan 0.2.2 on two H200 of one host, with shapes that no scored row",
        "has (`simulator/data/published/own-runs.yaml`). Their predictions were frozen here before anything",
        "was measured. `kernels/calibrate/studies/train_runs.py` trains them, and",
        "`docs/writers/own_runs_page.py` writes this page.",
        "",
        *_frozen_section(),
    ]
    return "\n".join([*lines, ""])


def _frozen_section() -> list[str]:
    lines = ["## Frozen predictions", ""]
    now = {run.name: own_runs.prediction(run.name) for run in own_runs.file().runs}
    for date, text in own_runs.FREEZES.items():
        block = [line for line in own_runs.frozen() if line.date == date]
        lines += [*NOTES[date], ""] if date in NOTES else []
        lines += [
            f"Frozen on {date} from commit `{block[0].commit}`; SHA-256 of the lines `{text[:16]}...`.",
            "A test and this page's writer fail where a frozen line differs from its digest. *Today* is the",
            "prediction of the tree that wrote this page. Memory is that of tensors on one GPU at its peak",
            "(GiB); reserved adds the allocator's slack.",
            "",
            "| run | step (ms) | P10 | P50 | P90 | active | reserved | today: step | active | reserved |",
            "|---|---|---|---|---|---|---|---|---|---|",
        ]
        for line in block:
            today = now[line.name]
            times = (line.step_s, line.p10_s, line.p50_s, line.p90_s)
            lines.append(
                f"| {line.name} | {' | '.join(f'{1e3 * value:.1f}' for value in times)} | "
                f"{line.active_gib:.2f} | {line.reserved_gib:.2f} | {1e3 * today.step_s:.1f} | "
                f"{today.active_bytes / GIB:.2f} | {today.reserved_bytes / GIB:.2f} |"
            )
        lines.append("")
    return lines[:-1]


def freeze() -> None:
    """Append today's predictions of all runs, and print the digest that goes into the code."""
    date = datetime.now(tz=UTC).strftime("%Y-%m-%d %H:%M")
    if DATA.exists() and own_runs.changed_freezes():
        sys.exit(f"{own_runs.FROZEN}: an earlier freeze was changed; restore it first")
    commit = subprocess.run(
        ["git", "rev-parse", "--short=10", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    block = []
    for run in own_runs.file().runs:
        one = own_runs.prediction(run.name)
        times = {f"{key}_s": round(x, 4) for key, x in zip(("step", "p10", "p50", "p90"), one, strict=False)}
        memory = {
            "active_gib": round(one.active_bytes / GIB, 3),
            "reserved_gib": round(one.reserved_bytes / GIB, 3),
        }
        block.append(
            own_runs.FrozenPrediction.model_validate(
                {"name": run.name, "date": date, "commit": commit, **times, **memory}
            )
        )
    text = io.StringIO()
    writer = csv.DictWriter(text, list(own_runs.FrozenPrediction.model_fields), lineterminator="\n")
    if not DATA.exists():
        writer.writeheader()
    writer.writerows(line.model_dump() for line in block)
    with DATA.open("a", encoding="utf-8") as file:
        file.write(text.getvalue())
    print(f'add to FREEZES in simulator/scoring/own_runs.py:\n    "{date}": "{own_runs.digest(block)}",')


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
