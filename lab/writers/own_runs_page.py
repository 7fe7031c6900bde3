"""lab/docs/own-runs.md: training runs of our own on two H200, predicted first and measured after.

    python -m lab.writers.own_runs_page            writes the page from the frozen and fresh predictions
    python -m lab.writers.own_runs_page --freeze   appends today's predictions to the frozen ones

The page fails where a frozen line was changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lab import packed
from lab.scoring import own_runs
from lab.scoring.own_runs_kernels import CLASSES, measured_classes, predicted_classes
from lab.writers.frozen_page import ROOT, FrozenPage

from moesim.simulator.predict.driver import predict

PAGE = ROOT / "lab" / "docs" / "own-runs.md"
RESULTS = "2026-11-22-h200-x2-train-runs.json"
NOTES_PAGE = ROOT / "lab" / "docs" / "own-runs-notes.md"
GIB = 2.0**30
NOTES = {
    "2026-11-22 20:39": (
        "Also before the measurement: reading FSDP2 and torchtitan's gpt_oss showed copies that the first",
        "freeze lacks (`software.single_groups_copied` and `software.expert_biases=repeated`).",
    ),
}
"""What a later freeze adds to the one before it."""
ABLATIONS = (
    "software.single_groups_copied=false",
    "software.expert_biases=fused",
    "software.gradient_sums=false",
    "software.op_keeps_transfers=true",
    "software.step_kernels=plain",
    "software.host=null",
)


def columns(name: str) -> Mapping[str, Any]:
    """Today's prediction of a run as a frozen line holds it."""
    one = own_runs.prediction(name)
    return {
        **one.step.rounded(),
        "active_gib": round(one.active_bytes / GIB, 3),
        "reserved_gib": round(one.reserved_bytes / GIB, 3),
    }


FROZEN = FrozenPage(
    PAGE,
    own_runs.FREEZES,
    "lab/scoring/own_runs.py",
    lambda: [run.name for run in own_runs.file().runs],
    columns,
)


def page() -> str:
    """The page from fresh predictions; exits where a frozen line was changed."""
    frozen = FROZEN.checked_lines()
    now = {run.name: own_runs.prediction(run.name) for run in own_runs.file().runs}
    lines = [
        "# Runs of our own on two H200",
        "",
        "Three training runs with torchtitan 0.2.2 on two H200 of one host, with shapes that no scored row",
        "has (`lab/scoring/data/own-runs.yaml`). Their predictions were frozen here before anything",
        "was measured. `lab/studies/train_runs.py` trains them, and",
        "`lab/writers/own_runs_page.py` writes this page.",
        "",
        *_frozen_section(frozen, now),
        "",
        *_measured_section(frozen, now),
        "",
        *_classes_section(),
        "",
        *_ablations_section(),
        "",
    ]
    return "\n".join(lines) + "\n" + NOTES_PAGE.read_text("utf-8")


def _error(predicted: float, measured: float) -> str:
    return f"{predicted / measured - 1.0:+.1%}"


def _measured_section(
    frozen: tuple[own_runs.FrozenRun, ...], now: dict[str, own_runs.PredictedRun]
) -> list[str]:
    lines = [
        "## Measured",
        "",
        "Measured on 2026-11-22, once, after both freezes: two H200 (driver 580.159.04), torch 2.11.0,",
        "NCCL 2.28.9, NVLink multicast off, segments of fixed size (no `expandable_segments`). Steps are",
        "the median of steps 6 to 12 by the wall clock of rank 0. Active is the peak of the allocator's",
        "events in one step, because torchtitan resets the counter after every step that it logs. *In",
        "80 %* says whether the step lies between P10 and P90.",
        "",
        "| run | step (ms) | least to most | frozen | error | in 80 % | today | error |",
        "|---|---|---|---|---|---|---|---|",
    ]
    memory = [
        "| run | active | frozen | error | today | error | reserved | frozen | error | today | error |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for line in frozen:
        one, today = own_runs.measured()[line.name], now[line.name]
        name = f"{line.name}, frozen {line.date[-5:]}"
        covered = "yes" if line.p10_s <= one.step_s <= line.p90_s else "no"
        active, reserved = today.active_bytes / GIB, today.reserved_bytes / GIB
        lines.append(
            f"| {name} | {1e3 * one.step_s:.1f} | {1e3 * one.least_s:.1f} to {1e3 * one.most_s:.1f} | "
            f"{1e3 * line.step_s:.1f} | {_error(line.step_s, one.step_s)} | {covered} | "
            f"{1e3 * today.step.step_s:.1f} | {_error(today.step.step_s, one.step_s)} |"
        )
        memory.append(
            f"| {name} | {one.peak_active_gib:.2f} | {line.active_gib:.2f} | "
            f"{_error(line.active_gib, one.peak_active_gib)} | {active:.2f} | "
            f"{_error(active, one.peak_active_gib)} | "
            f"{one.peak_reserved_gib:.2f} | {line.reserved_gib:.2f} | "
            f"{_error(line.reserved_gib, one.peak_reserved_gib)} | {reserved:.2f} | "
            f"{_error(reserved, one.peak_reserved_gib)} |"
        )
    return [*lines, "", *memory]


def _classes_section() -> list[str]:
    data: dict[str, Any] = packed.read(RESULTS)
    lines = [
        "## Where the time goes",
        "",
        "GPU time of one step by class of kernel on rank 0 (ms), as predicted today and as profiled.",
        "Kernels beside each other all count, so a class that shares the GPU takes longer than alone;",
        "collectives include waits for the other rank. *Exposed* is the time of collectives alone, *idle*",
        "that without any kernel (predicted: waits for launches). The profiled steps were 1 to 5 % longer.",
    ]
    for run in data["runs"]:
        shape = own_runs.file().models[run["run"]["model"]].shape
        found = measured_classes(
            run["operators"]["by_operator"], run["kernels"]["by_name"], shape["vocab"], shape["hidden"]
        )
        name, one = run["name"], own_runs.measured()[run["name"]]
        predicted, result = predicted_classes(name), predict(own_runs.scenario_of(name)).result
        waits = result.host.wait_s if result.host else 0.0
        rows = [(kind, predicted[kind], found[kind]) for kind in CLASSES]
        rows.append(("exposed collectives", result.breakdown_s.exposed_communication, one.exposed_s))
        rows.append(("idle", waits, one.idle_s))
        lines += ["", f"| {name} | predicted | measured | difference |", "|---|---|---|---|"]
        lines += [f"| {kind} | {1e3 * p:.1f} | {1e3 * m:.1f} | {1e3 * (p - m):+.1f} |" for kind, p, m in rows]
    return lines


def _ablations_section() -> list[str]:
    names = [run.name for run in own_runs.file().runs]
    lines = [
        "## Without each mechanism",
        "",
        "Error of the step without a mechanism, by the override that takes it away.",
        "",
        f"| without | {' | '.join(names)} |",
        f"|---|{'---|' * len(names)}",
    ]
    for override in ("", *ABLATIONS):
        cells = []
        for name in names:
            step = predict(own_runs.scenario_of(name, *([override] if override else []))).result.step.time_s
            cells.append(_error(step, own_runs.measured()[name].step_s))
        lines.append(f"| {f'`{override}`' if override else 'nothing'} | {' | '.join(cells)} |")
    return lines


def _frozen_section(
    frozen: tuple[own_runs.FrozenRun, ...], now: dict[str, own_runs.PredictedRun]
) -> list[str]:
    lines = ["## Frozen predictions", ""]
    for date, text in own_runs.FREEZES.digests.items():
        block = [line for line in frozen if line.date == date]
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
                f"{line.active_gib:.2f} | {line.reserved_gib:.2f} | {1e3 * today.step.step_s:.1f} | "
                f"{today.active_bytes / GIB:.2f} | {today.reserved_bytes / GIB:.2f} |"
            )
        lines.append("")
    return lines[:-1]


if __name__ == "__main__":
    FROZEN.main(page, __doc__ or "")
