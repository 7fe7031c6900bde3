"""Compares two to four predictions: their figures, the keys that differ, and the causes of the difference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import fsum
from typing import Any

import numpy as np

from moesim.hwmodels.arrays import FloatArray
from moesim.hwmodels.errors import InfeasibleError, InputError
from moesim.hwmodels.frozen import Frozen
from moesim.hwmodels.summary_text import gib, percent, short, table_lines
from moesim.simulator.common.tables import Row, TableResult
from moesim.simulator.memory.gpu import VERDICTS, Verdict
from moesim.simulator.predict.driver import predict, simulate
from moesim.simulator.predict.figures import POWERS, figures, powered_figures
from moesim.simulator.predict.result import Result
from moesim.simulator.predict.step import ExecutedStep, run_step
from moesim.simulator.predict.summarise import run_report
from moesim.simulator.predict.work_size import Band
from moesim.simulator.scenario import Scenario
from moesim.simulator.scenario.inputs import Inputs
from moesim.simulator.schedules import SCHEDULES
from moesim.simulator.studies.effects import draws_s, entry_effects, generator_of
from moesim.simulator.studies.uncertainty import samples_of

# -- differing keys ----------------------------------------------------------------------------------
# The keys in which scenarios differ, and names that tell scenarios apart by them (pure).

MOST_CHANGES = 3
"""Differing keys that the name of a scenario in a comparison states."""

MOST_VALUE = 30
"""Most characters of a value in such a name."""


def own_names(scenarios: Sequence[Scenario]) -> list[str]:
    """Names of scenarios, each told apart from an earlier one of the same name by its differing keys.

    `Scenario.replace` keeps the name, so a changed copy would otherwise be called like its original: a copy
    with communication.sms=8 is called "NAME, communication.sms=8".
    """
    names: list[str] = []
    first: dict[str, Scenario] = {}
    for scenario in scenarios:
        original = first.setdefault(scenario.name, scenario)
        # The name of a scenario with its keys that differ from those of `original`.
        changes = [
            f"{key}={_short_value(new)}" for key, (_, new) in differing_keys(original, scenario).items()
        ]
        more = len(changes) - MOST_CHANGES
        shown = changes[:MOST_CHANGES] + ([f"{more} more keys"] if more > 0 else [])
        names.append(", ".join([scenario.name, *shown]))
    return names


def _short_value(value: object) -> str:
    """A value of a key in a name: null for an absent key, cut where it is long."""
    text = "null" if value is None else str(value)
    return text if len(text) <= MOST_VALUE else f"{text[: MOST_VALUE - 3]}..."


def differing_keys(first: Scenario, other: Scenario) -> dict[str, tuple[Any, Any]]:
    """Keys whose values differ, defaults included; for a key with a default in both, only `.value` counts."""
    chosen = {item.key for item in first.defaults} & {item.key for item in other.defaults}
    found = differences(first.resolved(), other.resolved())
    return {
        key: values
        for key, values in found.items()
        if key.endswith(".value") or key.rpartition(".")[0] not in chosen
    }


def differences(first: dict[str, Any], other: dict[str, Any], at: str = "") -> dict[str, tuple[Any, Any]]:
    """(first, other) values by dotted key, for all keys that differ; None for an absent key."""
    found: dict[str, tuple[Any, Any]] = {}
    for key in [*first, *(k for k in other if k not in first)]:
        a, b = first.get(key), other.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            found |= differences(a, b, f"{at}{key}.")
        elif a != b:
            found[f"{at}{key}"] = (a, b)
    return found


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
        sides = self.sides
        rows = [["scenario", "step (s)", "change (s)", "MFU", "memory (GiB)", "days", "cost"]]
        rows += [_printed_row(side, sides[0]) for side in sides]
        title = f"comparison of {len(sides)} scenarios with {sides[0].name}"
        lines = [title, *sides[0].inputs.lines(), *table_lines(rows)]
        differing = [w for w in self.waterfall if max(w.seconds) != min(w.seconds)][:MOST_PRINTED]
        if differing:
            lines.append("  largest differences on the critical path, seconds:")
            lines += [f"    {w.cause}: {' -> '.join(f'{s:.3f}' for s in w.seconds)}" for w in differing]
        return "\n".join([*lines, "  more: .rows(), .waterfall_rows(), .to_pandas()"])

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
    return step_draws(run_step(scenario))


def step_draws(step: ExecutedStep) -> FloatArray:
    """The `relative_draws` of a step that ran."""
    return np.asarray(draws_s(step.time_s, entry_effects(step.prepared, step.executions)) / step.time_s)


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
    return {name: Band.of(value, value * draws**power) for name, (value, power) in found.items()}


def bands_of_changes(
    first: Result, first_draws: FloatArray, other: Result, other_draws: FloatArray
) -> dict[str, Band]:
    """Intervals, by name, of the differences of all figures that are a power of the step time.

    The draws are those of `relative_draws`. A figure that one of the results lacks is left out.
    """
    before, after = _powered(first), _powered(other)
    return {
        name: Band.of(
            value - before[name][0], value * other_draws**power - before[name][0] * first_draws**power
        )
        for name, (value, power) in after.items()
        if name in before
    }


PLAN_ERROR = 0.02
"""Standard deviation of the relative error of a plan's step that other plans do not share (eq. U8).

It is assumed (0.01 to 0.05): already the steps of one run spread by 1.5 to 2.2 %
(data/published/own-runs-measured.csv), and plans take different kernels, messages and orders."""


def band_of_margin(margin: float, first: FloatArray, own: FloatArray) -> Band:
    """Interval of how far a plan is behind another, relative to it, in anything paid by the step (eq. U8).

    `first` and `own` are the `relative_draws` of the other plan and of the plan.
    """
    apart = 2**0.5 * PLAN_ERROR * generator_of("two plans", 0).standard_normal(len(own))
    return Band.of(margin, (1.0 + margin) * own / first * (1.0 + apart) - 1.0)


def places_of(margins: Sequence[float], draws: Sequence[FloatArray | None]) -> list[int]:
    """Places of plans in the order of their margins, from 1; plans that cannot be told apart share one.

    A plan is told apart from the first of the place before it where the interval of their difference
    (`band_of_margin`) leaves zero out, or where either has no draws.
    """
    places, leader = [1] if margins else [], 0
    for number in range(1, len(margins)):
        first, own = draws[leader], draws[number]
        behind = (1.0 + margins[number]) / (1.0 + margins[leader]) - 1.0
        if first is None or own is None or band_of_margin(behind, first, own).has_sign:
            leader = number
        places.append(leader + 1)
    return places


def _powered(result: Result) -> dict[str, tuple[float, int]]:
    """Figures that are proportional to a power of the step time, with that power, by name."""
    values = powered_figures(result)
    return {name: (value, POWERS[name]) for name, value in values.items() if value is not None}


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


# -- neighbours --------------------------------------------------------------------------------------
# Suggests what to try next: scenarios that are one change away, each simulated.

Progress = Callable[[float, str], None]

SMS_STEPS = (-8, -4, 4, 8)
"""Changes of the number of communication SMs that are tried."""

RECOMPUTE = ("none", "selective", "deepseek-v3", "full")


class Neighbour(Frozen):
    """One change of a scenario and its effect; `change` is the relative change of the step time."""

    override: str
    why: str
    step_time_s: float
    change: float
    memory_bytes: float
    fits: bool
    verdict: Verdict
    """`fits`, `at risk` or `does not fit` (docs/model.md, eq. M10)."""


def neighbours(
    scenario: Scenario, result: Result, progress: Progress = lambda share, text: None
) -> tuple[Neighbour, ...]:
    """Simulate all legal single changes of the plan: those that fit, then those at risk, fastest first.

    `result` is the scenario's own. Illegal changes are left out.
    """
    wanted = _candidates(scenario)
    found = []
    for number, (override, why) in enumerate(wanted):
        progress(number / len(wanted), override)
        try:
            step = run_step(scenario.overridden(override))
            if scenario.run.asks_for_more:  # leave out a change with which the run cannot be predicted
                run_report(step.prepared, step.time_s)
        except (InputError, InfeasibleError):
            continue
        memory = step.prepared.memory
        found.append(
            Neighbour(
                override=override,
                why=why,
                step_time_s=step.time_s,
                change=step.time_s / result.step.time_s - 1.0,
                memory_bytes=memory.total_bytes,
                fits=memory.fits,
                verdict=memory.verdict,
            )
        )
    return tuple(sorted(found, key=lambda n: (VERDICTS.index(n.verdict), n.step_time_s, n.override)))


def change_bands(scenario: Scenario, result: Result, neighbours: Sequence[Neighbour]) -> dict[str, Band]:
    """Intervals of the relative changes of the step time, by override.

    The draws are shared with the scenario's own (docs/model.md, eq. U2), so that a change is less uncertain
    than either step time. A change without draws, as on a fleet, is left out.
    """
    bands: dict[str, Band] = {}
    try:
        own = relative_draws(scenario)
    except InputError:
        return bands
    for row in neighbours:
        try:
            other = relative_draws(scenario.overridden(row.override))
        except (InputError, InfeasibleError):
            continue
        drawn = (row.step_time_s * other) / (result.step.time_s * own) - 1.0
        bands[row.override] = Band.of(row.change, drawn)
    return bands


def point_bands(
    scenario: Scenario, points: Sequence[tuple[Mapping[str, Any], float]], metric: str
) -> list[tuple[Band, Band] | None]:
    """Intervals of a figure at some points of a sweep, each with that of its difference from the first point.

    A point is (values by key, predicted figure). Points share the draws of the sources that they have in
    common (docs/model.md, eq. U2). None for a figure that does not follow the step time, and for a point
    without draws.
    """
    found: list[tuple[Band, Band] | None] = []
    base: FloatArray | None = None
    for values, predicted in points:
        try:
            drawn = predicted * relative_draws(scenario.replace(**values)) ** POWERS[metric]
        except (InputError, InfeasibleError, KeyError):
            found.append(None)
            continue
        base = drawn if base is None else base
        found.append((Band.of(predicted, drawn), Band.of(predicted - points[0][1], drawn - base)))
    return found


def _candidates(scenario: Scenario) -> list[tuple[str, str]]:
    """Single changes with the reason to try each; changes to the scenario's own value are left out."""
    sms, ep = scenario.communication.sms, scenario.parallel.ep
    found = [
        (f"communication.sms={sms + step}", "more SMs for transfers" if step > 0 else "more SMs for compute")
        for step in SMS_STEPS
        if sms and sms + step > 0
    ]
    if ep > 1:
        found.append((f"parallel.ep={ep // 2}", "tokens go to fewer nodes, every GPU holds more experts"))
        found.append((f"parallel.ep={2 * ep}", "every GPU holds fewer experts, tokens go to more nodes"))
    found += [
        (f"recompute={name}", "other activations kept or formed again")
        for name in RECOMPUTE
        if name != scenario.recompute
    ]
    if scenario.parallel.pp > 1 and scenario.stages.blocks is None:
        found += [
            (f"schedule={spec.name}", "another pipeline order")
            for spec in SCHEDULES.values()
            if spec.advised and spec.name != scenario.schedule
        ]
    return found
