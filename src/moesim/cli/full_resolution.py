"""The text of full resolution: stragglers, link utilisation and the cost of faults. No model in here."""

from __future__ import annotations

from math import fsum
from typing import TYPE_CHECKING

from moesim.cli.console import percent, table_lines

if TYPE_CHECKING:
    from moesim.simulator.engine.full_resolution.result import FullResult

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
