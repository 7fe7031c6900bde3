"""The table of the page Hardware as HTML: a column for each cluster, two or three lines in each cell."""

from __future__ import annotations

from collections.abc import Callable
from html import escape

from moesim.app.confidence import meaning, muted, word
from moesim.app.views import headline
from moesim.hwmodels.units import in_unit
from moesim.simulator.planner.hardware import HardwareComparison, HardwareRow
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

STYLE = """<style>
.hardware {overflow-x: auto}
.hardware table {border-collapse: collapse; width: 100%; font-size: 0.875rem;
  font-variant-numeric: tabular-nums}
.hardware th, .hardware td {text-align: left; vertical-align: top; padding: 0.3rem 0.75rem 0.3rem 0;
  border-bottom: 1px solid light-dark(#e3e6eb, #333946); min-width: 8.5rem; line-height: 1.3}
.hardware tbody th {font-weight: 400; min-width: 7rem; color: light-dark(#4a505b, #b6bbc6)}
.hardware thead th {font-weight: 600; font-size: 0.95rem; border-bottom-width: 2px}
.hardware .group th {font-weight: 600; padding-top: 0.8rem; color: inherit}
.hardware .main {font-weight: 600; font-size: 0.95rem}
.hardware small {display: block; font-size: 0.78rem; color: light-dark(#5f6670, #a3a8b4); font-weight: 400}
.hardware .roofline, .hardware .roofline .main {color: light-dark(#5f6670, #a3a8b4); font-style: italic}
.hardware .better {color: light-dark(#116b2c, #56d364)}
.hardware .worse {color: light-dark(#b42318, #ff8f85)}
.hardware .badge {display: inline-block; border-radius: 0.6rem; padding: 0 0.5rem; font-size: 0.75rem;
  font-style: normal; font-weight: 600; border: 1px solid currentColor}
.hardware .measured {color: light-dark(#116b2c, #56d364)}
.hardware .published {color: light-dark(#0b5cad, #79c0ff)}
.hardware .peak {color: light-dark(#5f6670, #a3a8b4)}
</style>"""
"""Colours with at least 4.5 to 1 against the page in both themes; none is the only cue."""


def text(table: HardwareComparison) -> str:
    """The table as HTML; every text from a scenario is escaped."""
    rows = table.clusters
    head = "".join(_cell("th", _head(row), row, ' scope="col"') for row in rows)
    body = [_line("Plan", rows, _plan), _line("Fits", rows, _fits)]
    for title, figures in GROUPS:
        shown = [item for item in figures if any(item[0] in row.figures for row in rows)]
        if shown:
            body.append(
                f'<tr class="group"><th scope="rowgroup" colspan="{len(rows) + 1}">{escape(title)}</th></tr>'
            )
        for name, label, more in shown:
            body.append(_line(label, rows, lambda row, n=name, m=more: _figure(row, rows[0], n, m)))  # type: ignore[misc]
    body += [
        f'<tr class="group"><th scope="rowgroup" colspan="{len(rows) + 1}">What it stands on</th></tr>',
        _line("Price", rows, _price),
        _line("Profile", rows, _profile),
    ]
    return (
        f'{STYLE}<div class="hardware" tabindex="0" role="region" aria-label="Clusters side by side">'
        f'<table><thead><tr><th scope="col">&nbsp;</th>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def _line(label: str, rows: tuple[HardwareRow, ...], cell: Callable[[HardwareRow], str]) -> str:
    cells = "".join(_cell("td", cell(row), row) for row in rows)
    return f'<tr><th scope="row">{escape(label)}</th>{cells}</tr>'


def _cell(tag: str, content: str, row: HardwareRow, more: str = "") -> str:
    faint = row.confidence is not None and muted(row.confidence)
    return f"<{tag}{more}{' class=roofline' if faint else ''}>{content}</{tag}>"


def _head(row: HardwareRow) -> str:
    size = "" if row.n_gpus is None or row.problem else f"{row.n_gpus:,} "
    badge = ""
    if row.confidence is not None:
        kind = {"measured": "measured", "published": "published"}.get(row.confidence, "peak")
        badge = f' <span class="badge {kind}">{escape(word(row.confidence))}</span>'
    return f"{escape(row.cluster)}<small>{escape(size + row.accelerator)}{badge}</small>"


def _plan(row: HardwareRow) -> str:
    if row.plan is None:
        return f"<b>No plan</b><small>{escape(_short(row.problem))}</small>"
    words = f"{row.precision}, recompute {row.recompute}, best of {headline.compact(row.considered)} plans"
    return f"{escape(row.plan)}<small>{escape(words)}</small>"


def _short(problem: str, most: int = 260) -> str:
    return problem if len(problem) <= most else f"{problem[:most].rsplit(' ', 1)[0]} ..."


def _fits(row: HardwareRow) -> str:
    if row.memory_bytes is None:
        return ""
    size = f"{in_unit(row.memory_bytes, 'GiB', 'bytes'):.1f} GiB on the fullest GPU"
    return f"{'yes' if row.fits else '<b>no</b>'}<small>{size}</small>"


def _price(row: HardwareRow) -> str:
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


def _profile(row: HardwareRow) -> str:
    if row.profile is None or row.confidence is None:
        return ""
    return f"{escape(row.profile)}<small>{escape(meaning(row.confidence))}</small>"


def _figure(row: HardwareRow, first: HardwareRow, name: str, more_is_better: bool) -> str:
    band = row.figures.get(name)
    if band is None:
        return "" if row.plan is None else "not known"
    shown = f'<span class="main">{escape(_written(name, band.predicted))}</span>'
    ends = f"<small>{escape(f'{_written(name, band.p10)} to {_written(name, band.p90)}')}</small>"
    return shown + ends + _difference(row.differences.get(name), first.figures.get(name), more_is_better)


def _difference(change: Band | None, first: Band | None, more_is_better: bool) -> str:
    """The change against the first cluster in percent; grey, and said, where its interval contains zero."""
    if change is None or first is None or not first.predicted:
        return ""
    base = abs(first.predicted)
    told, low, high = (f"{value / base:+.0%}" for value in (change.predicted, change.p10, change.p90))
    if not change.has_sign:
        return f"<small>uncertain: {low} to {high}</small>"
    good = (change.predicted > 0.0) == more_is_better
    return f'<small class="{"better" if good else "worse"}">{told} ({low} to {high})</small>'


def _written(name: str, value: float) -> str:
    if name in ("usd_per_billion_tokens", "cost_usd"):
        return headline.money(value)
    if name == "kwh_per_billion_tokens":
        return f"{headline.compact(value)} kWh"
    if name == "days":
        return f"{value:,.1f}"
    return headline.written(name, value)
