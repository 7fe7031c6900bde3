"""Designs of a sweep: the points of grid, list, random and Sobol designs over scenario keys (pure)."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from msgspec import Struct

from moesim.hwmodels.arrays import FloatArray
from moesim.hwmodels.calibration import profile_hash
from moesim.hwmodels.errors import InfeasibleError, InputError
from moesim.hwmodels.files import is_there
from moesim.hwmodels.validation import nearest
from moesim.simulator.common.processes import without_cyclic_collection
from moesim.simulator.common.texts import parse_interval, parse_values
from moesim.simulator.predict.driver import simulate
from moesim.simulator.predict.figures import energy_figures, figures
from moesim.simulator.predict.pools import joined_hash
from moesim.simulator.scenario import Scenario
from moesim.simulator.studies.store import Key, PointOutcome
from moesim.simulator.studies.uncertainty import with_uncertainty
from moesim.version import __version__

Design = Literal["grid", "list", "random", "sobol"]
DESIGNS: tuple[Design, ...] = ("grid", "list", "random", "sobol")

Values = str | int | float | bool | Mapping[str, Any] | Sequence[Any]
"""Values of a key: an expression ("8..256:x2"), one value, or a list of them."""

Space = Mapping[str, Values] | Sequence[Mapping[str, Any]]
"""Values by dotted scenario key, or, for the list design, one mapping for each point."""

MOST_POINTS = 100_000
"""Most points of one sweep."""

Point = dict[str, Any]


class _Choice(Struct, frozen=True):
    """The choice of one key's value: listed values, or a range of whole or real numbers."""

    values: tuple[Any, ...] = ()
    low: float = 0.0
    high: float = 0.0
    whole: bool = False

    def at(self, u: float) -> Any:
        """The value at the share `u` (0 to 1) of the choice."""
        if self.values:
            return self.values[min(int(u * len(self.values)), len(self.values) - 1)]
        if self.whole:
            return min(int(self.low + u * (self.high - self.low + 1)), int(self.high))
        return self.low + u * (self.high - self.low)


class Points(Sequence[Point]):
    """The points of a design in its order, each made when it is read; equal points appear once."""

    def __init__(self, count: int, make: Callable[[int], Point]) -> None:
        """`make` gives each of `count` points by its number."""
        self._make = make
        first: dict[bytes, int] = {}
        for number in range(count):
            text = repr(sorted(make(number).items(), key=lambda item: item[0]))
            first.setdefault(hashlib.blake2b(text.encode(), digest_size=16).digest(), number)
        self._numbers = np.fromiter(first.values(), dtype=np.int64)

    def __len__(self) -> int:
        """Number of points."""
        return len(self._numbers)

    def __getitem__(self, at):  # type: ignore[no-untyped-def]
        """A point, or the list of those of a slice."""
        own = self._numbers[at]
        return [self._make(int(number)) for number in own] if isinstance(at, slice) else self._make(int(own))


def points(space: Space, design: str = "grid", count: int | None = None, seed: int = 0) -> Points:
    """The points of a design, in its order; equal points appear once.

    A grid has every combination, with the last key varying fastest. A list takes the n-th value of every
    key; a key with one value keeps it. random and sobol draw `count` points, and "a..b" then means any whole
    number between the ends, or any real number if an end has a decimal point. Raises InputError for an empty
    or malformed space.
    """
    if design not in DESIGNS:
        raise InputError(
            f"design {design!r} is not one of {', '.join(DESIGNS)}{nearest(design, list(DESIGNS))}"
        )
    if not space:
        raise InputError("the space of the sweep is empty: name at least one scenario key and its values")
    drawn = design in ("random", "sobol")
    if drawn and (count is None or not 1 <= count <= MOST_POINTS):
        raise InputError(
            f"design {design} needs a number of points between 1 and {MOST_POINTS:,}, not {count}"
        )
    if not drawn and count is not None:
        raise InputError(f"design {design} has as many points as its values; leave the number of points out")
    if not isinstance(space, Mapping):
        if design != "list":
            raise InputError(f"design {design} takes values by key; a list of points goes with design list")
        found = [dict(point) for point in space]
        if not all(found):
            raise InputError("a point of the sweep names no key; leave it out")
        return Points(len(found), found.__getitem__)
    choices = {key: _choice(key, values, drawn) for key, values in space.items()}
    sizes = [len(c.values) for c in choices.values()]
    if design == "grid":
        if prod(sizes) > MOST_POINTS:
            raise InputError(
                f"the grid has {prod(sizes):,} points, more than {MOST_POINTS:,}; use design sobol"
            )

        def of_grid(number: int) -> Point:
            at = np.unravel_index(number, sizes)
            return {key: c.values[int(i)] for (key, c), i in zip(choices.items(), at, strict=True)}

        return Points(prod(sizes), of_grid)
    if design == "list":
        lengths = {*sizes} - {1}
        if len(lengths) > 1:
            told = ", ".join(f"{key} {len(c.values)}" for key, c in choices.items())
            raise InputError(f"design list needs as many values for every key (or one): {told}")
        return Points(
            max(lengths, default=1),
            lambda number: {k: c.values[number if len(c.values) > 1 else 0] for k, c in choices.items()},
        )
    assert count is not None
    units = (
        np.random.default_rng(seed).random((count, len(choices)))
        if design == "random"
        else _sobol(count, len(choices), seed)
    )
    return Points(
        count,
        lambda number: {k: c.at(float(u)) for (k, c), u in zip(choices.items(), units[number], strict=True)},
    )


def _choice(key: str, values: Values, drawn: bool) -> _Choice:
    if isinstance(values, str):
        ends = parse_interval(values, key) if drawn else None
        if ends is not None:
            return _Choice(
                low=ends[0],
                high=ends[1],
                whole="." not in values.replace("..", "") and "e" not in values.lower(),
            )
        return _Choice(parse_values(values, key))
    if isinstance(values, Sequence):
        if not values:
            raise InputError(f"{key} has an empty list of values: no point is left; give a value")
        return _Choice(tuple(values))
    return _Choice((values,))


def _sobol(count: int, dimensions: int, seed: int) -> FloatArray:
    """The Sobol sequence, shifted by one seeded vector modulo 1, so that every SciPy gives equal numbers."""
    try:
        from scipy.stats import qmc
    except ImportError:
        raise InputError(
            "design sobol needs SciPy, which is not installed: pip install 'moesim[notebook]', or use random"
        ) from None
    power = max(count - 1, 0).bit_length()
    units = cast("FloatArray", qmc.Sobol(dimensions, scramble=False).random_base2(power))[:count]
    return (units + np.random.default_rng(seed).random(dimensions)) % 1.0


# -- work order --------------------------------------------------------------------------------------
# Orders the points of a sweep: those that share prices and draws are computed one after the other.

EXPENSIVE = ("model", "parallel", "schedule", "batch", "seed", "variation", "routing")
"""Sections whose values decide draws and schedule, the parts of a step that take longest to make."""
CHEAP = ("communication", "cluster", "profile", "software", "run")
"""Sections that change prices only; points that differ in them alone share the rest."""

LARGEST = 16
"""Most points that a worker gets at a time; those of a worker that is killed are computed again."""

KeyValues = Mapping[str, Any]


def work_order(points: Sequence[KeyValues]) -> list[int]:
    """Numbers of the points in the order of work: those that share expensive values stand together.

    Values are ordered by their first appearance, so that the order depends on the points alone.
    """
    keys = sorted({key for point in points for key in point}, key=_cost)
    known: list[dict[str, int]] = [{} for _ in keys]
    rank = np.empty((len(keys), len(points)), dtype=np.int32)
    for number, point in enumerate(points):
        for row, (key, own) in enumerate(zip(keys, known, strict=True)):
            rank[row, number] = own.setdefault(_text(point, key), len(own))
    order: list[int] = np.lexsort((np.arange(len(points)), *rank[::-1])).tolist()
    return order


def work_groups(points: Sequence[KeyValues], ordered: Sequence[int], workers: int) -> list[list[int]]:
    """Numbers of points, in the order of work, in groups that one worker computes in a row.

    The points of a group share every value that is not cheap. A group has at most LARGEST points, and so few
    that every worker gets several groups.
    """
    most = max(1, min(LARGEST, len(ordered) // (4 * workers)))
    found = []
    for _, shared in groupby(ordered, key=lambda number: _shared(points[number])):
        group = list(shared)
        found += [group[n : n + most] for n in range(0, len(group), most)]
    return found


def _shared(point: KeyValues) -> list[tuple[str, str]]:
    return [(key, _text(point, key)) for key in sorted(point) if _section(key) not in CHEAP]


def _cost(key: str) -> tuple[int, str]:
    """Sort key of a scenario key: the expensive sections in their order, then others, then the cheap ones."""
    section = _section(key)
    if section in EXPENSIVE:
        return EXPENSIVE.index(section), key
    return len(EXPENSIVE) + (1 + CHEAP.index(section) if section in CHEAP else 0), key


def _section(key: str) -> str:
    return key.partition(".")[0]


def _text(point: KeyValues, key: str) -> str:
    return repr(point[key]) if key in point else ""


# -- point -------------------------------------------------------------------------------------------
# One point of a sweep: the key of its scenario, and its prediction in any process.


Measure = Callable[[Scenario], PointOutcome]
"""What a sweep finds out about a point; one that other processes run is a function of a module."""


def key_of(scenario: Scenario, uncertainty: bool = False, engine_draws: int = 0, measure: str = "") -> Key:
    """The key of a scenario, which hashes its keys and the content of the model, cluster and files it names.

    `uncertainty` and `engine_draws`: whether the prediction has bands, and from how many engine runs further
    ones are taken. `measure`: name of what else than a training step is predicted.

    Raises InputError if one of them cannot be read.
    """
    clusters = [machine.model_dump(mode="json") for machine in scenario.machines]
    content = {
        "scenario": scenario.resolved(),
        "model": scenario.shape.model_dump(mode="json"),
        "cluster": clusters if scenario.fleet is not None else clusters[0],
        "files": {name: _digest(scenario.path(name)) for name in _files(scenario)},
        "uncertainty": uncertainty,
        **({"engine_draws": engine_draws} if engine_draws else {}),
        **({"measure": measure} if measure else {}),
        **({"defaults": chosen} if (chosen := [item.key for item in scenario.defaults]) else {}),
    }
    text = json.dumps(content, sort_keys=True, default=str)
    hashes = [profile_hash(profile) for profile in scenario.calibrations]
    return Key(hashlib.sha256(text.encode()).hexdigest(), joined_hash(hashes), __version__)


def _files(scenario: Scenario) -> list[str]:
    """Names of the further files that a scenario reads: schedule, expert counts and log of requests."""
    log = scenario.serving.load.log if scenario.serving else None
    named = [getattr(scenario.routing.load, "file", None), scenario.schedule, log]
    return [name for name in named if name and is_there(Path(scenario.path(name)))]


def _digest(path: str) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None


def evaluate(scenario: Scenario, uncertainty: bool = False) -> PointOutcome:
    """Predict one scenario; a refused scenario becomes an outcome with the reason.

    Of the prediction the outcome has the figures alone, so that what nobody tabulates is never worked out
    (decision 0095).
    """
    began = time.perf_counter()
    with without_cyclic_collection():  # a point's objects are gone before the collector looks at them
        outcome = _outcome(scenario, uncertainty)
    return replace(outcome, work_s=time.perf_counter() - began)


def evaluate_group(scenarios: Sequence[Scenario], measure: Measure) -> list[PointOutcome]:
    """Predict scenarios one after the other, so that each uses what the ones before it left to share."""
    return [measure(scenario) for scenario in scenarios]


def _outcome(scenario: Scenario, uncertainty: bool) -> PointOutcome:
    try:
        result = with_uncertainty(scenario) if uncertainty else simulate(scenario)
    except InfeasibleError as error:
        return PointOutcome("infeasible", str(error), {}, "")
    except InputError as error:
        return PointOutcome("illegal", str(error), {}, "")
    except Exception as error:
        return PointOutcome("failed", f"{type(error).__name__}: {error}", {}, "")
    row: dict[str, Any] = figures(result) | energy_figures(result.energy)
    for name, band in result.uncertainty.bands.items() if result.uncertainty else ():
        row |= {f"{name}_p10": band.p10, f"{name}_p50": band.p50, f"{name}_p90": band.p90}
    memory, gib = result.memory, 2.0**30
    if memory.fits:
        return PointOutcome("ok", memory.risk or "", row, "")
    short = f"needs {memory.total_bytes / gib:.1f} GiB of {memory.capacity_bytes / gib:.1f} GiB a GPU"
    return PointOutcome("does not fit", short, row, "")
