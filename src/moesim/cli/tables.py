"""Prints schedules, scores, presets and hardware."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from moesim.cli.console import print_json, print_table, print_text, wrapped
from moesim.cli.console import width as console_width
from moesim.hwmodels.summary_text import short

if TYPE_CHECKING:
    from moesim.simulator.schedules import Schedule
    from moesim.simulator.scoring.published import Placement, Row
    from moesim.simulator.scoring.published_collectives import GroupSummary
    from moesim.simulator.scoring.published_full_resolution import FullChecks


def schedule_text(schedule: Schedule, width: int | None = None) -> str:
    """The drawing of a schedule, with its bubble and the published formula for the same durations."""
    from moesim.simulator.schedules import Durations, draw, idle, published_bubble, unit_times, validate

    report = validate(schedule)
    peaks = sorted(set(report.peak_in_flight))
    shown = str(peaks[0]) if len(peaks) == 1 else f"{peaks[0]} to {peaks[-1]}"
    bubbles = idle(unit_times(schedule))
    published = published_bubble(schedule.name, schedule.pp, Durations(), schedule.vpp)
    formula = "no published formula" if published is None else f"published formula {published:g}"
    drawing = draw(schedule, width or console_width()).split("\n")
    lines = [
        *drawing,
        f"bubble: {sum(bubbles) / len(bubbles):g} on the mean rank, {bubbles[0]:g} on rank 0; {formula} "
        "(F, I, W = 1, B = 2, pair = 3)",
        f"micro-batches in flight on a rank: at most {shown}",
    ]
    return "\n".join(
        part for line in lines for part in ([line] if line.startswith("rank ") else wrapped(line))
    )


def print_scores(rows: Sequence[Row], placements: Sequence[Placement]) -> None:
    """Print the scores, and the step times under other placements of the layers."""
    sources = {source: number for number, source in enumerate(dict.fromkeys(row.source for row in rows), 1)}
    headers = ("published", "predicted", "error", "source")
    for profile, group in groupby(rows, key=lambda row: row.id.partition("@")[2]):
        cells = [
            (
                f"{row.quantity}{'' if row.unit == '1' else f', {row.unit}'}"
                f"{' *' if row.used_for_calibration else ''}",
                f"{row.published:,.4g}" if row.published < 1e5 else short(row.published, 4),
                f"{row.predicted:,.4g}" if row.predicted < 1e5 else short(row.predicted, 4),
                f"{100 * row.relative_error:+.1f} %",
                f"[{sources[row.source]}]",
            )
            for row in group
        ]
        print_table((f"with profile {profile}" if profile else "quantity", *headers), cells, right=(1, 2, 3))
        print_text("")
    print_text("* calibrated on it, so no test of the prediction")
    for source, number in sources.items():
        print_text(f"[{number}] {source}")
    if placements:
        print_text("\nstep time under other placements of the layers, which the reports do not publish")
        lines = [
            (p.name, f"{p.time_s:.3f}", f"{100 * p.relative_to_default:+.1f} %", " ".join(map(str, p.layers)))
            for p in placements
        ]
        print_table(("placement", "seconds", "change", "layers per stage"), lines, right=(1, 2))


def print_full_checks(checks: FullChecks) -> None:
    """Print full resolution against the folded run, two measured networks and a published timeline."""
    print_text("\nfull resolution: relative differences, published and predicted")
    cells = [
        (
            row.quantity,
            f"{100 * row.published:+.2f} %",
            f"{100 * row.predicted:+.2f} %",
            f"{100 * row.limit:.1f} %",
            "holds" if row.holds else "MISSED",
        )
        for row in checks.differences
    ]
    headers = ("difference", "published", "predicted", "within", "")
    print_table(headers, cells, right=(1, 2, 3))
    print_text(
        "\nwait at the barriers of a pair, ms: one GPU of the published timeline, all GPUs of the full run"
    )
    rows = [
        (
            row.phase,
            str(row.layer),
            f"{1e3 * row.published_s:.2f}",
            *(f"{1e3 * v:.2f}" for v in (row.predicted.p10_s, row.predicted.p50_s, row.predicted.p90_s)),
        )
        for row in checks.notify
    ]
    print_table(("transfer", "layer", "published", "10 %", "50 %", "90 %"), rows, right=(1, 2, 3, 4, 5))


def print_collectives(groups: Sequence[GroupSummary]) -> None:
    """Print the errors of the collectives' times by group; single rows are in the JSON."""
    if not groups:
        return
    print_text("\ncollectives: error of the predicted time, by group (single rows: --json)")
    cells = [
        (
            group.use,
            group.group,
            str(group.rows),
            f"{100 * group.median_absolute_error:.1f} %",
            f"{100 * group.signed_median_error:+.1f} %",
            f"{100 * group.worst_error:+.1f} %",
            group.worst_row,
        )
        for group in groups
    ]
    headers = ("class", "group", "rows", "median |error|", "signed median", "worst", "worst row")
    print_table(headers, cells, right=(2, 3, 4, 5))


def print_presets(as_json: bool) -> None:
    """Print every shipped scenario with its confidence."""
    from moesim.simulator.scenario import preset_names
    from moesim.simulator.scenario.presets import shipped_presets

    rows = shipped_presets()
    if as_json:
        print_json([row.model_dump() for row in rows])
        return
    headers = ("preset", "model", "GPUs", "accelerator", "confidence", "description")
    cells = [(r.preset, r.model, f"{r.n_gpus:,}", r.accelerator, r.confidence, r.description) for r in rows]
    print_table(headers, cells, right=(2,))
    print_text(f"For `moesim serve simulate`: {', '.join(preset_names(serving=True))}.")


def print_hardware(name: str | None, as_json: bool) -> None:
    """Print every shipped description, or every figure of one."""
    from moesim.hwmodels.hardware_text import describe, hardware_rows

    rows: Sequence[Any] = hardware_rows() if name is None else describe(name)
    if as_json:
        print_json([row._asdict() for row in rows])
    elif name is None:
        print_table(("what", "name", "summary", "confidence", "figures not found"), rows)
    else:
        print_table(("figure", "value", "kind", "source", "date", "note"), rows)
