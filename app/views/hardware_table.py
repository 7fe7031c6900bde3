"""The table of the page Hardware as HTML: a column for each cluster, two or three lines in each cell."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from html import escape

from moesim.app.confidence import meaning, muted, word
from moesim.app.views import figure_table, headline
from moesim.hwmodels.units import in_unit
from moesim.simulator.planner.hardware import ClusterRow, HardwareComparison
from moesim.simulator.predict.band import Band

GROUPS: tuple[tuple[str, tuple[tuple[str, str, bool], ...]], ...] = (
    (
        "Per GPU",
        (
            ("tokens_per_s_per_gpu", "Tokens/s/GPU", True),
            ("mfu_causal", "MFU, causal", True),
        ),
    ),
    ("Per dollar", (("tokens_per_usd", "Tokens per $", True),)),
    (
        "Per billion tokens",
        (
            ("usd_per_billion_tokens", "Cost", False),
            ("gpu_hours_per_billion_tokens", "GPU-hours", False),
            ("kwh_per_billion_tokens", "Energy", False),
        ),
    ),
    (
        "Whole cluster",
        (
            ("step_time_s", "Step time", False),
            ("days", "Days", False),
            ("cost_usd", "Cost of the run", False),
        ),
    ),
)
"""Headings with their figures: name, label, and whether more is better."""


def text(table: HardwareComparison) -> str:
    """The table as HTML; every text from a scenario is escaped."""
    rows = table.clusters
    faint = [row.confidence is not None and muted(row.confidence) for row in rows]

    def line(label: str, cell: Callable[[ClusterRow], str]) -> str:
        return figure_table.line(label, [cell(row) for row in rows], faint)

    body = [line("Plan", _plan), line("Fits", _fits)]
    for title, figures in GROUPS:
        shown = [item for item in figures if any(item[0] in row.figures for row in rows)]
        if shown:
            body.append(figure_table.group(title, len(rows)))
        for name, label, more in shown:
            body.append(line(label, partial(_figure, first=rows[0], name=name, more_is_better=more)))
    body += [
        figure_table.group("What it stands on", len(rows)),
        line("Price", _price),
        line("Profile", _profile),
    ]
    return figure_table.table("Clusters side by side", [_head(row) for row in rows], body, faint)


def _head(row: ClusterRow) -> str:
    size = "" if row.n_gpus is None or row.problem else f"{row.n_gpus:,} "
    badge = "" if row.confidence is None else f" {figure_table.badge(row.confidence, word(row.confidence))}"
    return f"{escape(row.cluster)}<small>{escape(size + row.accelerator)}{badge}</small>"


def _plan(row: ClusterRow) -> str:
    if row.plan is None:
        return f"<b>No plan</b><small>{escape(_short(row.problem))}</small>"
    words = f"{row.precision}, recompute {row.recompute}, best of {headline.compact(row.considered)} plans"
    return f"{escape(row.plan)}<small>{escape(words)}</small>"


def _short(problem: str, most: int = 260) -> str:
    return problem if len(problem) <= most else f"{problem[:most].rsplit(' ', 1)[0]} ..."


def _fits(row: ClusterRow) -> str:
    if row.memory_bytes is None:
        return ""
    size = f"{in_unit(row.memory_bytes, 'GiB', 'bytes'):.1f} GiB on the fullest GPU"
    return f"{'fits' if row.verdict == 'fits' else f'<b>{row.verdict}</b>'}<small>{size}</small>"


def _price(row: ClusterRow) -> str:
    if row.plan is None:
        return ""
    if row.price is None:
        return f"no price<small>{escape(_short(row.price_problem or 'the cluster states none'))}</small>"
    terms = getattr(row.price, "terms", "")
    words = ", ".join(part for part in (terms, row.price.kind, row.price.date) if part)
    return (
        f"${row.price.value:,.2f} a GPU-hour<small>{escape(words)}</small>"
        f"<small>{escape(_short(row.price.source, 120))}</small>"
    )


def _profile(row: ClusterRow) -> str:
    if row.profile is None or row.confidence is None:
        return ""
    return f"{escape(row.profile)}<small>{escape(meaning(row.confidence))}</small>"


def _figure(row: ClusterRow, first: ClusterRow, name: str, more_is_better: bool) -> str:
    band = row.figures.get(name)
    if band is None:
        return "" if row.plan is None else "not known"
    ends = f"{_written(name, band.p10)} to {_written(name, band.p90)}"
    change = _difference(row.differences.get(name), first.figures.get(name), more_is_better)
    return figure_table.main(_written(name, band.predicted)) + figure_table.note(ends) + change


def _difference(change: Band | None, first: Band | None, more_is_better: bool) -> str:
    """The change against the first cluster in percent; grey, and said, where its interval contains zero."""
    if change is None or first is None or not first.predicted:
        return ""
    base = abs(first.predicted)
    told, low, high = (f"{value / base:+.0%}" for value in (change.predicted, change.p10, change.p90))
    if not change.has_sign:
        return figure_table.note(f"uncertain: {low} to {high}")
    return figure_table.difference(f"{told} ({low} to {high})", (change.predicted > 0.0) == more_is_better)


def _written(name: str, value: float) -> str:
    if name in ("usd_per_billion_tokens", "cost_usd"):
        return headline.money(value)
    if name == "kwh_per_billion_tokens":
        return f"{headline.compact(value)} kWh"
    if name == "days":
        return f"{value:,.1f}"
    return headline.written(name, value)
