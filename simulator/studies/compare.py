"""Compares two to four predictions: their figures, the keys that differ, and the causes of the difference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import fsum
from typing import Any

import numpy as np

from moesim.hwmodels.arrays import FloatArray
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.frozen import Frozen, gib, percent, short, table_lines
from moesim.simulator.common.tables import Row, TableResult
from moesim.simulator.predict.band import Band
from moesim.simulator.predict.driver import predict
from moesim.simulator.predict.figures import POWERS, figures, powered_figures
from moesim.simulator.predict.result import Result
from moesim.simulator.predict.simulate import simulate
from moesim.simulator.scenario import Scenario
from moesim.simulator.scenario.inputs import Inputs
from moesim.simulator.studies.differing_keys import differing_keys, own_names
from moesim.simulator.studies.effects import entry_effects
from moesim.simulator.studies.uncertainty import samples_of

MOST = 4
"""Most scenarios in one comparison."""

MOST_PRINTED = 3
"""Causes of the differences that a printed comparison shows."""

OTHER = "other"
"""Cause of the seconds that the critical path does not cover; 0 s if the path reaches back to the start."""


class Side(Frozen):
    """One scenario of a comparison, with its figures and the keys that differ from the first scenario's."""

    name: str
    inputs: Inputs
    figures: dict[str, float | bool | None]
    differs: dict[str, tuple[Any, Any]]
    """(value in the first scenario, value in this one) by dotted key."""
    delta_s: Band | None = None
    """Step time minus that of the first scenario; None unless intervals are requested."""


class Waterfall(Frozen):
    """Seconds that one cause takes on the critical path of every scenario, in the order of the scenarios."""

    cause: str
    seconds: tuple[float, ...]


class Comparison(TableResult):
    """A comparison of scenarios with the first one.

    The waterfall is exact: the causes of a scenario's critical path add up to its step time, so their
    differences add up to the difference of the step times (docs/model.md, eq. U3).
    """

    sides: tuple[Side, ...]
    waterfall: tuple[Waterfall, ...]

    def __str__(self) -> str:
        """The main figures of every scenario, what differs, and the largest differences by cause."""
        return _text(self)

    def rows(self) -> list[Row]:
        """One row for each figure, with every scenario's value and its change against the first."""
        table: list[Row] = []
        for name, first in self.sides[0].figures.items():
            row: Row = {"figure": name}
            for number, side in enumerate(self.sides):
                value = side.figures[name]
                row[label(number, side)] = value
                if number and isinstance(first, float) and isinstance(value, float):
                    row[f"change {number}"] = value - first
            table.append(row)
        return table

    def waterfall_rows(self) -> list[Row]:
        """One row for each cause, with its seconds in every scenario and the change against the first."""
        table = []
        for item in self.waterfall:
            row: Row = {"cause": item.cause}
            for number, side in enumerate(self.sides):
                row[label(number, side)] = item.seconds[number]
                if number:
                    row[f"change {number}"] = item.seconds[number] - item.seconds[0]
            table.append(row)
        return table


def label(number: int, side: Side) -> str:
    """The column name of a scenario, unique by its number."""
    return f"{number}: {side.name}"


def compare(
    scenarios: Sequence[Scenario], *, names: Sequence[str | None] | None = None, uncertainty: bool = False
) -> Comparison:
    """Predict two to four scenarios and split the differences of their step times by cause.

    `names`: their names in the result, kept as given; None stands for the scenario's own name. Scenarios
    that would have the same name of their own are told apart by the keys that differ (`own_names`).
    `uncertainty`: add bands of the differences, from draws that the scenarios share. Raises InputError for
    another number of scenarios.
    """
    if not 2 <= len(scenarios) <= MOST:
        raise InputError(f"compare takes 2 to {MOST} scenarios, not {len(scenarios)}; use sweep for more")
    if names is not None and len(names) != len(scenarios):
        raise InputError(f"compare: {len(names)} names for {len(scenarios)} scenarios")
    named = [
        name if name is not None else own
        for name, own in zip(names or [None] * len(scenarios), own_names(scenarios), strict=True)
    ]
    results, draws = [], []
    for scenario in scenarios:
        if uncertainty:
            result, factors = predicted_with_draws(scenario)
            draws.append(factors)
        else:
            result = simulate(scenario)
        results.append(result)
    sides = []
    for number, (scenario, result) in enumerate(zip(scenarios, results, strict=True)):
        delta = None
        if uncertainty and number:
            delta = bands_of_changes(results[0], draws[0], result, draws[number])["step_time_s"]
        sides.append(
            Side(
                name=named[number],
                inputs=result.inputs,
                figures=figures(result),
                differs=differing_keys(scenarios[0], scenario),
                delta_s=delta,
            )
        )
    return Comparison(sides=tuple(sides), waterfall=waterfall(results))


def relative_draws(scenario: Scenario) -> FloatArray:
    """Draws of the step time relative to the predicted one [SAMPLES], for intervals of figures and changes.

    Two scenarios share the draws of every source that they have in common (docs/model.md, eq. U2), so their
    difference is less uncertain than either. Raises InputError for an illegal scenario and for a fleet.
    """
    return predicted_with_draws(scenario)[1]


def predicted_with_draws(scenario: Scenario) -> tuple[Result, FloatArray]:
    """The prediction of a scenario, and its `relative_draws`, which cost little more together than alone.

    Raises InputError for an illegal scenario and for a fleet.
    """
    prepared, executions, result = predict(scenario)
    drawn = samples_of(result, entry_effects(prepared, executions))["step_time_s"]
    return result, np.asarray(drawn / result.step.time_s)


def bands_of_draws(result: Result, draws: FloatArray) -> dict[str, Band]:
    """Intervals, by name, of all figures that are a power of the step time, from `relative_draws`."""
    found = _powered(result)
    return {name: _band(value, value * draws**power) for name, (value, power) in found.items()}


def bands_of_changes(
    first: Result, first_draws: FloatArray, other: Result, other_draws: FloatArray
) -> dict[str, Band]:
    """Intervals, by name, of the differences of all figures that are a power of the step time.

    The draws are those of `relative_draws`. A figure that one of the results lacks is left out.
    """
    before, after = _powered(first), _powered(other)
    return {
        name: _band(
            value - before[name][0], value * other_draws**power - before[name][0] * first_draws**power
        )
        for name, (value, power) in after.items()
        if name in before
    }


def bands_of_margins(margins: Sequence[float], draws: Sequence[FloatArray]) -> list[Band]:
    """Intervals of how far plans are behind the first one, relative to it, in anything paid by the step.

    The draws are those of `relative_draws`; the first plan's own distance has no width.
    """
    first = (1.0 + margins[0]) * draws[0]
    return [
        _band((1.0 + margin) / (1.0 + margins[0]) - 1.0, (1.0 + margin) * own / first - 1.0)
        for margin, own in zip(margins, draws, strict=True)
    ]


def _powered(result: Result) -> dict[str, tuple[float, int]]:
    """Figures that are proportional to a power of the step time, with that power, by name."""
    values = powered_figures(result)
    return {name: (value, POWERS[name]) for name, value in values.items() if value is not None}


def _band(predicted: float, drawn: FloatArray) -> Band:
    p10, p50, p90 = (float(v) for v in np.quantile(drawn, [0.1, 0.5, 0.9]))
    return Band(predicted=predicted, p10=p10, p50=p50, p90=p90)


def changes(first: Result, other: Result) -> dict[str, float]:
    """Difference of each tabulated figure of two predictions, by name; figures that one lacks are absent."""
    before = figures(first)
    return {
        name: value - old
        for name, value in figures(other).items()
        if isinstance(value, float) and isinstance(old := before[name], float)
    }


def waterfall(results: Sequence[Result]) -> tuple[Waterfall, ...]:
    """Critical-path seconds by cause in every result; the causes with the largest differences come first."""
    columns = [causes(result) for result in results]
    names = {name for column in columns for name in column}
    rows = [Waterfall(cause=name, seconds=tuple(c.get(name, 0.0) for c in columns)) for name in names]
    return tuple(sorted(rows, key=lambda r: (-max(abs(s - r.seconds[0]) for s in r.seconds), r.cause)))


def causes(result: Result) -> dict[str, float]:
    """Seconds of the critical path by cause; the seconds that it does not cover are `OTHER`."""
    found = {row.cause: row.seconds for row in result.critical_path_s}
    rest_ns = round((result.step.time_s - fsum(found.values())) * 1e9)
    return {**found, OTHER: rest_ns / 1e9} if rest_ns else found


def _text(comparison: Comparison) -> str:
    """The main figures of every scenario and the causes that differ most, in about ten lines."""
    sides = comparison.sides
    rows = [["scenario", "step (s)", "change (s)", "MFU", "memory (GiB)", "days", "cost"]]
    rows += [_printed_row(side, sides[0]) for side in sides]
    title = f"comparison of {len(sides)} scenarios with {sides[0].name}"
    lines = [title, *sides[0].inputs.lines(), *table_lines(rows)]
    differing = [w for w in comparison.waterfall if max(w.seconds) != min(w.seconds)][:MOST_PRINTED]
    if differing:
        lines.append("  largest differences on the critical path, seconds:")
        lines += [f"    {w.cause}: {' -> '.join(f'{s:.3f}' for s in w.seconds)}" for w in differing]
    return "\n".join([*lines, "  more: .rows(), .waterfall_rows(), .to_pandas()"])


def _fit(figure: Mapping[str, float | bool | None]) -> str:
    """What a side's memory adds to its size: nothing where it fits."""
    if not figure["fits"]:
        return ", does not fit"
    return ", at risk" if figure.get("at_risk") else ""


def _printed_row(side: Side, first: Side) -> list[str]:
    figure = side.figures
    step, base = figure["step_time_s"] or 0.0, first.figures["step_time_s"] or 0.0
    cost = figure["cost_usd"]
    return [
        side.name,
        f"{step:.3f}",
        "" if side is first else f"{step - base:+.3f}",
        percent(figure["mfu_causal"] or 0.0),
        gib(figure["memory_bytes"] or 0.0) + _fit(figure),
        f"{figure['days'] or 0.0:.1f}",
        "no price" if cost is None else f"${short(cost)}",
    ]
