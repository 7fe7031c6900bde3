"""The table of the page Compare: what each scenario is, its figures, and their differences from the first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from moesim.app.confidence import meaning, muted, word
from moesim.app.views import comparability, figure_table, headline
from moesim.hwmodels.units import in_unit
from moesim.simulator.predict.band import Band
from moesim.simulator.predict.figures import powered_figures
from moesim.simulator.predict.result import Result
from moesim.simulator.scenario import Scenario

PER = {
    "tokens_per_usd": "Tokens per $",
    "usd_per_billion_tokens": "Cost of a B tokens",
    "gpu_hours_per_billion_tokens": "GPU-hours per B tokens",
}
"""Figures per dollar or per token, which stay comparable where GPUs, prices or tokens differ."""
MORE_IS_BETTER = frozenset(
    {"tokens_per_s_per_gpu", "mfu_causal", "mfu_noncausal", "tokens_per_day", "tokens_per_usd"}
)
IN_DOLLARS = frozenset({"usd_per_billion_tokens", "cost_usd"})


@dataclass(frozen=True, slots=True)
class Column:
    """One scenario: its title, intervals of its figures, and those of its differences from the first.

    `differences` is None while they are computed; `bands` is empty then.
    """

    title: str
    scenario: Scenario
    result: Result
    bands: Mapping[str, Band]
    differences: Mapping[str, Band] | None


def text(columns: Sequence[Column]) -> str:
    """The table as HTML; every text from a scenario is escaped."""
    faint = [muted(column.result.confidence) for column in columns]
    body = [
        figure_table.line("GPUs", [f"{c.scenario.machine.n_gpus:,}" for c in columns], faint),
        figure_table.line("Price of a GPU-hour", [_price(c) for c in columns], faint),
        figure_table.line("Profile", [_profile(c) for c in columns], faint),
        figure_table.line("Memory", [_memory(c) for c in columns], faint),
        figure_table.group("Figures", len(columns)),
    ]
    labels = {name: label for label, _, name in headline.tiles(columns[0].result)} | PER
    for name, label in labels.items():
        cells = [_figure(column, columns[0], name) for column in columns]
        body.append(figure_table.line(label, cells, faint))
    return figure_table.table("Scenarios side by side", [_head(c) for c in columns], body, faint)


def _head(column: Column) -> str:
    level = column.result.confidence
    return f"{escape(column.title)}<small>{figure_table.badge(level, word(level))}</small>"


def _price(column: Column) -> str:
    stated = column.scenario.machine.price_per_gpu_hour
    source = "" if stated is None else f"{stated.kind}, {stated.date}"
    return escape(comparability.price(column.scenario)) + figure_table.note(source)


def _profile(column: Column) -> str:
    return escape(column.result.profile) + figure_table.note(meaning(column.result.confidence))


def _memory(column: Column) -> str:
    memory = column.result.memory
    size = f"{in_unit(memory.total_bytes, 'GiB', 'bytes'):.1f} GiB on the fullest GPU"
    return ("fits" if memory.verdict == "fits" else f"<b>{memory.verdict}</b>") + figure_table.note(size)


def _written(name: str, value: float | None) -> str:
    if value is None or name in IN_DOLLARS:
        return headline.money(value)
    return headline.written(name, value)


def _figure(column: Column, first: Column, name: str) -> str:
    value, band = powered_figures(column.result)[name], column.bands.get(name)
    ends = "" if band is None else f"{_written(name, band.p10)} to {_written(name, band.p90)}"
    cell = figure_table.main(_written(name, value)) + figure_table.note(ends)
    base = powered_figures(first.result)[name]
    if column is first or value is None or base is None:
        return cell
    return cell + _difference(name, value - base, column.differences)


def _difference(name: str, by: float, bands: Mapping[str, Band] | None) -> str:
    """The difference from the first scenario; grey where it may as well be none, or nobody knows yet."""
    told = _change(name, by)
    band = None if bands is None else bands.get(name)
    if told == headline.SAME or band is None:
        return figure_table.note(told)
    ends = f"{_change(name, band.p10)} to {_change(name, band.p90)}"
    if not band.has_sign:
        return figure_table.note(f"{told}, uncertain ({ends})")
    return figure_table.difference(f"{told} ({ends})", (by > 0.0) == (name in MORE_IS_BETTER))


def _change(name: str, by: float) -> str:
    if name not in IN_DOLLARS:
        return headline.change(name, by)
    shown = _written(name, abs(by))
    return headline.SAME if shown == _written(name, 0.0) else f"{'-' if by < 0 else '+'}{shown}"
