"""The text of full resolution: stragglers, link utilisation and the cost of faults. No model in here."""

from __future__ import annotations

from math import fsum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesim.cli.console import table_lines
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.files import check_writable
from moesim.hwmodels.summary_text import percent

if TYPE_CHECKING:
    from moesim.simulator.engine.full_resolution.result import FullResult, HeatMap
    from moesim.simulator.predict.result import Result


NAMED = 3
"""Number of stragglers in the text; the JSON has more."""


def full_text(full: FullResult) -> list[str]:
    """Lines of text on full resolution for `simulate` and `explain`."""
    ends = ", ".join(f"{end:.3f}" for end in full.group_end_s[:8])
    more = f", {len(full.group_end_s) - 8} more" if len(full.group_end_s) > 8 else ""
    wait = full.gpu_times.wait_s
    lines = [
        f"every GPU for itself: {full.gpus:,} GPUs, {full.groups} groups of {full.members} on each pipeline "
        f"rank, whose last actions end at {ends}{more} s",
        f"  waiting at barriers: {fsum(wait) / len(wait):.3f} s a GPU on average, {max(wait):.3f} s the most",
    ]
    if full.lost_groups:
        lost = ", ".join(map(str, full.lost_groups))
        lines.append(f"  lost with their nodes: group {lost}; the step trains only what the others hold")
    for row in full.stragglers[:NAMED]:
        lines.append(
            f"  GPU {row.gpu} (pipeline rank {row.pipeline_rank}, group {row.group}) kept its group waiting "
            f"{row.held_up_s:.3f} s; its compute takes {percent(row.compute_over_group - 1)} more than the "
            "group's mean"
        )
    kinds = [f"{k.kind} mean {percent(k.mean)}, most {percent(k.most)}" for k in full.link_kinds]
    lines.append(f"  links under dispatch, combine and sends: {'; '.join(kinds)}")
    if full.causes:
        cells = [
            (
                cause.cause,
                "never ends" if cause.step_s is None else f"{cause.step_s:.3f} s",
                "" if not cause.effect_s else f"{cause.effect_s:+.3f} s",
                cause.note,
            )
            for cause in full.causes
        ]
        lines += ["", *table_lines(("what each fault costs", "step", "more", "note"), cells, right=(1, 2))]
    return lines


# -- picture -----------------------------------------------------------------------------------------
# Draws the heat maps of full resolution as one SVG or PNG picture. No model in here.

ENDINGS = (".svg", ".png")

MOST_LABELS = 16
"""Most rows or columns with a name; if there are more, every n-th is named."""

LONG = 6
"""Length of a name above which the names under a map are rotated."""


def picture_path(path: Path) -> Path:
    """Return `path` if a picture can be written there.

    Raises InputError for another ending, a missing folder, and if matplotlib is not installed.
    """
    if path.suffix.lower() not in ENDINGS:
        raise InputError(f"--picture {path}: unknown ending; use {' or '.join(ENDINGS)}")
    check_writable(path, "picture")
    try:
        import matplotlib  # noqa: F401 - only to see that it is there
    except ImportError:
        raise InputError("--picture needs matplotlib: pip install 'moesim[pictures]'") from None
    return path


def draw_heat_maps(path: Path, result: Result) -> None:
    """Write all heat maps of a result into one picture; equal results give equal bytes.

    Raises InputError if the result has none.
    """
    if result.full is None:
        raise InputError("--picture draws what every GPU did: add --resolution full")
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "moesim"
    from matplotlib import pyplot as plt

    maps = result.full.heat_maps
    heights = [_inches(heat_map) for heat_map in maps]
    figure, axes = plt.subplots(
        len(maps), 1, figsize=(10, sum(heights)), squeeze=False, height_ratios=heights, layout="constrained"
    )
    for axis, heat_map in zip(axes[:, 0], maps, strict=True):
        _draw(figure, axis, heat_map)
    figure.suptitle(f"{result.scenario}: step {result.step.time_s:.3f} s, {result.full.gpus:,} GPUs")
    date: dict[str, Any] = {"metadata": {"Date": None}} if path.suffix.lower() == ".svg" else {}
    figure.savefig(path, dpi=120, **date)
    plt.close(figure)


def _inches(heat_map: HeatMap) -> float:
    return min(6.0, 1.6 + 0.06 * len(heat_map.rows))


def _draw(figure: Any, axis: Any, heat_map: HeatMap) -> None:
    values = [[float("nan") if v is None else v for v in row] for row in heat_map.values]
    image = axis.imshow(values, aspect="auto", interpolation="nearest", cmap="cividis")
    axis.set_title(heat_map.title, fontsize=10)
    axis.set_xlabel(heat_map.column_label)
    axis.set_ylabel(heat_map.row_label)
    for set_ticks, names in ((axis.set_xticks, heat_map.columns), (axis.set_yticks, heat_map.rows)):
        step = -(-len(names) // MOST_LABELS)
        turned = {"rotation": 90} if set_ticks == axis.set_xticks and max(map(len, names)) > LONG else {}
        set_ticks(range(0, len(names), step), names[::step], fontsize=6, **turned)
    figure.colorbar(image, ax=axis, label=heat_map.unit, pad=0.01)
