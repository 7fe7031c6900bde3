"""Functions that job processes run; they take plain arguments, are found by name and use the public API."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from msgspec import Struct

import moesim
import moesim.simulator.planner.search
import moesim.simulator.predict.driver
import moesim.simulator.studies.compare
import moesim.simulator.studies.uncertainty
from moesim.app import jobs, uploads
from moesim.app.components.timeline.packing import PackedStep, packed_step
from moesim.app.exports import trace_bytes
from moesim.hwmodels import load_cluster
from moesim.hwmodels.accelerator import list_accelerators
from moesim.hwmodels.arrays import FloatArray
from moesim.hwmodels.calibration import fitting_profiles
from moesim.hwmodels.cluster import Cluster
from moesim.hwmodels.confidence import best_profile
from moesim.hwmodels.errors import InputError, MoesimError
from moesim.hwmodels.files import READ_BELOW
from moesim.hwmodels.node import load_node
from moesim.hwmodels.topologies import Inventory
from moesim.hwmodels.topologies.base import Picture, picture
from moesim.simulator.planner.hardware import ClusterPlan, Search, on_cluster, plan_on
from moesim.simulator.planner.result import PlanResult
from moesim.simulator.planner.search import Repair
from moesim.simulator.planner.sized import Sizing
from moesim.simulator.planner.sizing import size
from moesim.simulator.predict.driver import Check
from moesim.simulator.predict.result import Result
from moesim.simulator.predict.step_events import step_events
from moesim.simulator.predict.work_size import Band
from moesim.simulator.run.report import RunReport
from moesim.simulator.scenario import Scenario
from moesim.simulator.scenario.defaults import has_node, node_of
from moesim.simulator.scenario.presets import Preset, shipped_presets
from moesim.simulator.scoring.published import PROFILES, Row, score
from moesim.simulator.scoring.published_collectives import CollectiveRow, score_collectives
from moesim.simulator.scoring.scoreboard import ScoredRow, open_rows
from moesim.simulator.scoring.scoreboard.score import score_row
from moesim.simulator.studies import result_cache
from moesim.simulator.studies.compare import Neighbour, bands_of_draws, change_bands
from moesim.simulator.studies.curves import AxisName, CurvePoint, curve_point, overrides_at
from moesim.simulator.studies.uncertainty import DRAWS, Sensitivity

Progress = Callable[[float | None, str], None]


class Drawing(Struct, frozen=True):
    """A cluster's topology: its picture, its parts, its kind and how many GPUs it joins."""

    picture: Picture
    inventory: Inventory
    kind: str
    n_gpus: int


def read_scenario(folder: str, name: str, texts: tuple[str, ...]) -> Scenario:
    """The scenario of a link, with uploads in `folder`; raises InputError above the dashboard's limits."""
    read_below(folder)
    return jobs.admit(uploads.scenario_of(name, texts))


def read_upload(folder: str, kind: str, name: str, data: bytes) -> uploads.Kept:
    """Check an upload and store it in `folder`."""
    read_below(folder)
    kept_file = uploads.accept(kind, name, data)
    if isinstance(kept_file.content, Scenario):
        jobs.admit(kept_file.content)
    return kept_file


def read_below(folder: str) -> None:
    """From now on this process reads no file by path except uploads."""
    os.environ[READ_BELOW] = folder


def topology(scenario: Scenario) -> Drawing:
    """The picture of the cluster and its parts."""
    found = scenario.machine.topology()
    found.check_size(jobs.DRAWN_PARTS)
    return Drawing(picture(found), found.inventory(), found.kind, found.n_gpus)


def simulate(scenario: Scenario) -> Result:
    """One predicted step, without prices; it is stored on disk, where the command line finds it."""
    return result_cache.predict_unpriced(jobs.admit(scenario), afterwards=jobs.once_sent)


def check(scenario: Scenario) -> Check:
    """Check whether the plan is legal and fits into memory."""
    return moesim.check(jobs.admit(scenario))


def timeline(scenario: Scenario, rank: int) -> PackedStep:
    """The events of a step as bytes; of a step with very many, the phases of one pipeline rank."""
    return packed_step(step_events(jobs.admit(scenario)), rank)


def trace(scenario: Scenario) -> bytes:
    """A Perfetto trace of the step."""
    return trace_bytes(jobs.admit(scenario, trace=True))


def neighbours(scenario: Scenario, result: Result, progress: Progress) -> tuple[Neighbour, ...]:
    """Single changes to try next, each simulated."""
    return moesim.neighbours(jobs.admit(scenario), result, progress=progress)


def neighbour_bands(scenario: Scenario, result: Result, neighbours: tuple[Neighbour, ...]) -> dict[str, Band]:
    """Intervals of the changes of the step time of `neighbours`, by override."""
    return change_bands(jobs.admit(scenario), result, neighbours)


def point_bands(
    scenario: Scenario, points: tuple[tuple[dict[str, Any], float], ...], metric: str
) -> list[tuple[Band, Band] | None]:
    """Intervals of a figure at points of a sweep, and of their differences from the first."""
    return moesim.simulator.studies.compare.point_bands(jobs.admit(scenario), points, metric)


def profiles(cluster: str | Cluster) -> tuple[str, list[str]]:
    """(best shipped calibration profile for a cluster, all that fit it)."""
    accelerator = (load_cluster(cluster) if isinstance(cluster, str) else cluster).accelerator
    return best_profile(accelerator)[1], fitting_profiles(accelerator.name)


def interval(scenario: Scenario) -> Result:
    """The same prediction with P10, P50 and P90 of its figures."""
    return result_cache.predict_unpriced(jobs.admit(scenario), uncertainty=True)


def interval_by_engine(scenario: Scenario, progress: Progress) -> Result:
    """The same prediction with the intervals of 200 engine runs beside the first-order ones."""

    def say(done: int, draws: int) -> None:
        progress(done / draws, f"{done} of {draws} engine runs")

    return result_cache.predict_unpriced(
        jobs.admit(scenario), uncertainty=True, engine_draws=DRAWS, workers=1, say=say
    )


def relative_draws(scenario: Scenario) -> FloatArray:
    """Random draws of the step time, each divided by the predicted step time."""
    return moesim.simulator.studies.compare.relative_draws(scenario)


def sensitivity(scenario: Scenario) -> Sensitivity:
    """The step time with each uncertain input alone at its low and high end (the tornado chart)."""
    return moesim.sensitivity(jobs.admit(scenario))


def plan(
    scenario: Scenario, space: dict[str, Any], options: dict[str, Any], progress: Progress
) -> PlanResult:
    """Search for a better plan; `space` holds the keys of a PlanSpace."""
    return moesim.plan(
        jobs.admit(scenario),
        space=moesim.PlanSpace(**space),
        workers=1,
        progress=progress,
        **options,
    )


class Choices(Struct, frozen=True):
    """What the start page offers: shipped scenarios, and accelerators with the GPUs of their node."""

    presets: tuple[Preset, ...]
    gpus_per_node: dict[str, int]


def choices() -> Choices:
    """The shipped scenarios with their confidence, and every accelerator that a node is shipped for."""
    nodes = {name: load_node(node_of(name)).n_gpus for name in list_accelerators() if has_node(name)}
    return Choices(shipped_presets(), nodes)


def scenario_for(
    folder: str, model: str, accelerator: str, n_gpus: int, sequences: int, sequence_length: int
) -> Scenario:
    """The scenario of a model on a number of GPUs; rules choose what is not given. Raises InputError."""
    read_below(folder)
    node = load_node(node_of(accelerator))
    if n_gpus % node.n_gpus:
        below = n_gpus - n_gpus % node.n_gpus
        near = [gpus for gpus in (below, below + node.n_gpus) if gpus]
        raise InputError(
            f"{n_gpus:,} GPUs are no whole number of nodes: {node.name} has {node.n_gpus}; the nearest are "
            f"{' and '.join(f'{gpus:,}' for gpus in near)}",
            key="gpus",
            nearest=near,
        )
    stated = {
        "model": model,
        "cluster": {"accelerator": accelerator, "nodes": n_gpus // node.n_gpus},
        "parallel": {},
        "batch": {"sequences": sequences, "sequence_length": sequence_length},
    }
    found = jobs.admit(uploads.scenario_from(stated))
    return found.replace(name=f"{found.shape.name} on {n_gpus} {accelerator}")


def nearest_plans(scenario: Scenario, progress: Progress) -> tuple[Repair, ...]:
    """The legal plans that fit and change the fewest keys of the scenario."""
    return moesim.simulator.planner.search.nearest_plans(jobs.admit(scenario), progress=progress)


# -- curve jobs --------------------------------------------------------------------------------------
# The function of plain arguments that job processes run for the page Curves.


def points(scenario: Scenario, name: AxisName, values: tuple[float, ...]) -> tuple[CurvePoint, ...]:
    """Some points of one curve; what exceeds the dashboard's limits is a point with the reason."""
    return tuple(curve_point(scenario, name, value, jobs.admit) for value in values)


def curve_bands(scenario: Scenario, name: AxisName, values: tuple[float, ...]) -> tuple[dict[str, Band], ...]:
    """The intervals of the figures at some points of one curve; none at a value that cannot be predicted."""
    found: list[dict[str, Band]] = []
    for value in values:
        found.append({})
        with suppress(MoesimError):
            changed = jobs.admit(scenario.overridden(*overrides_at(scenario, name, value)))
            found[-1] = bands_of_draws(moesim.simulate(changed), relative_draws(changed))
    return tuple(found)


# -- hardware jobs -----------------------------------------------------------------------------------
# The functions of plain arguments that job processes run for the pages Hardware and Curves.


def best_on(
    scenario: Scenario, name: str, gpus: int | None, search: Search, progress: Progress
) -> ClusterPlan:
    """The best plan of the scenario's job on one cluster; raises InputError above the dashboard's limits."""
    there = None
    with suppress(InputError):  # the plan says then why there is none
        there = on_cluster(scenario, name, gpus)
    if there is not None:
        jobs.admit(there)
    say: Any = progress
    return plan_on(scenario, name, gpus, search=search, progress=say)


MOST_SIZES = 48
"""Sizes, counted for each accelerator, of one job; the command line has no such limit."""


def sized(scenario: Scenario, options: Mapping[str, Any], progress: Progress) -> Sizing:
    """The sizes of a training job within its limits; raises InputError above the dashboard's limits."""
    count = len(options["gpus"] or ()) * max(1, len(options["accelerators"]))
    if count > MOST_SIZES:
        raise InputError(
            f"{count} sizes are more than the {MOST_SIZES} that the dashboard prices at once; moesim plan "
            "prices any number"
        )
    jobs.admit(scenario)
    say: Any = progress
    return size(scenario, **options, progress=say)


# -- runs and scores ---------------------------------------------------------------------------------
# The functions of plain arguments that job processes run for the pages Run & cost and Evidence.

STEPS = 4 * len(PROFILES) + 1
"""Number of progress messages of a scoreboard: four for each profile, and one for the collectives."""


class Scoreboards(Struct, frozen=True):
    """Both scoreboards."""

    rows: tuple[Row, ...]
    collectives: tuple[CollectiveRow, ...]


def run_report(scenario: Scenario, step_time_s: float) -> RunReport:
    """The whole run of a scenario whose step takes `step_time_s`, its uncertainty included."""
    return moesim.run(jobs.admit(scenario), step_time_s=step_time_s, uncertainty=True)


def evidence(progress: Callable[[float | None, str], None]) -> Scoreboards:
    """Every published figure and every measured collective beside its prediction, computed now."""
    done = 0

    def say(what: str) -> None:
        nonlocal done
        progress(min(1.0, done / STEPS), what)
        done += 1

    rows = score(say)
    say("collectives")
    return Scoreboards(tuple(rows), tuple(score_collectives()))


def published_step(row_id: str) -> ScoredRow:
    """One published step beside its prediction with its interval, computed now."""
    return score_row(next(row for row in open_rows() if row.id == row_id))
