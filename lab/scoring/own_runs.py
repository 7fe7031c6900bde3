"""Training runs of our own on two H200, as scenarios, with the predictions frozen before they were run.

`own-runs.yaml` holds shapes and plans, `own-runs-frozen.csv` what was predicted before anything was measured.
"""

from __future__ import annotations

import csv
import io
from functools import lru_cache
from importlib import resources
from typing import Any, Literal, NamedTuple

from pydantic import PositiveFloat, PositiveInt

from lab.scoring.frozen_predictions import (
    Freezes,
    FrozenStep,
    StepInterval,
    published_text,
    step_with_interval,
)
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.frozen import Frozen
from moesim.hwmodels.validation import nearest, validate_model
from moesim.hwmodels.yaml_io import parse_mapping
from moesim.simulator.memory.gpu import FRAMEWORK_BYTES, FSDP_SLACK
from moesim.simulator.predict.driver import predict
from moesim.simulator.scenario import Scenario

FILE, FROZEN, MEASURED = "own-runs.yaml", "own-runs-frozen.csv", "own-runs-measured.csv"
GPUS = 2
PUBLISHED = resources.files("moesim.simulator").joinpath("data", "published")
"""Holds what was measured: a number that ships cites it."""


class OwnRun(Frozen):
    """One run: a model of the file, its batch, what is recomputed, and the kernel of attention."""

    name: str
    model: str
    sequence: PositiveInt
    microbatch: PositiveInt
    recompute: Literal["none", "op", "full"]
    attention: Literal["flash", "flex"]


class OwnModel(Frozen):
    """A model: arguments of torchtitan's class, its shape for a scenario, and what its code does."""

    software: dict[str, Any]
    torchtitan: dict[str, Any]
    shape: dict[str, Any]


class OwnRuns(Frozen):
    """The file `own-runs.yaml`."""

    common: dict[str, Any]
    overrides: tuple[str, ...]
    models: dict[str, OwnModel]
    runs: tuple[OwnRun, ...]


class FrozenRun(FrozenStep):
    """What was predicted for a run on a day: the step (s) with its 80 % interval, and memory (GiB)."""

    active_gib: PositiveFloat
    reserved_gib: PositiveFloat


class MeasuredRun(Frozen):
    """What was measured of a run on rank 0 (lab/results/2026-11-22-h200-x2-train-runs.json.xz)."""

    name: str
    step_s: PositiveFloat
    """Median of the wall clock of steps 6 to 12."""
    least_s: PositiveFloat
    most_s: PositiveFloat
    peak_active_gib: PositiveFloat
    """Tensors at the peak of a step, from the allocator's events."""
    peak_reserved_gib: PositiveFloat
    idle_s: PositiveFloat
    """Seconds of a profiled step in which no kernel ran."""
    exposed_s: PositiveFloat
    """Seconds of a profiled step in which collectives ran alone."""


class PredictedRun(NamedTuple):
    """Step (s) with its 80 % interval, and tensors' bytes at the peak, active and reserved."""

    step: StepInterval
    active_bytes: float
    reserved_bytes: float


@lru_cache(maxsize=1)
def file() -> OwnRuns:
    """The file's content."""
    return validate_model(OwnRuns, parse_mapping(published_text(FILE), FILE), FILE)


def run_named(name: str) -> OwnRun:
    """The run of this name; raises InputError with the valid names for any other."""
    names = [run.name for run in file().runs]
    for run in file().runs:
        if run.name == name:
            return run
    raise InputError(f"{FILE}: no run {name!r}{nearest(name, names)}; runs: {', '.join(names)}")


def scenario_of(name: str, *overrides: str) -> Scenario:
    """The scenario of a run, with `key=value` overrides as for `load_scenario`."""
    run, common = run_named(name), file().common
    model, sequences = file().models[run.model], run.microbatch * GPUS
    data = {
        **common,
        "name": run.name,
        "model": model.shape,
        "parallel": {"ep": GPUS, "microbatch": run.microbatch, "zero_stage": 3},
        "batch": {"sequences": sequences, "sequence_length": run.sequence},
        "recompute": run.recompute,
        "software": {**common["software"], **model.software},
        "run": {"tokens": float(sequences * run.sequence)},
    }
    scenario = validate_model(Scenario, data, f"{FILE}: {name}")
    return scenario.overridden(*file().overrides, *overrides)


def prediction(name: str, *overrides: str) -> PredictedRun:
    """Predict a run with its interval; memory is a replay's, or tensors and slack without one."""
    scenario = scenario_of(name, *overrides)
    step, _ = step_with_interval(scenario)
    memory = predict(scenario).result.memory
    active, reserved = memory.active_bytes, memory.reserved_bytes
    if active is None or reserved is None:  # flex_attention: its allocations are not replayed
        active = memory.total_bytes - FRAMEWORK_BYTES.value
        reserved = active + FSDP_SLACK.value * memory.by_kind_bytes["optimizer"]
    return PredictedRun(step, active, reserved)


FREEZES = Freezes(
    FROZEN,
    FrozenRun,
    {
        "2026-11-22 20:26": "90e535fb608b15842ee2df091b01e7658fcfa3876d5719b9d73dc12206b01a2a",
        "2026-11-22 20:39": "8e12491bd0a040b5a0bd55e7c6723680a695ee64c9fbcf5401d0c1c39a3cbe38",
    },
)
"""The predictions that were frozen before the runs."""


@lru_cache(maxsize=1)
def measured() -> dict[str, MeasuredRun]:
    """The measurements by run. Raises InputError for a malformed line."""
    lines = csv.DictReader(io.StringIO(PUBLISHED.joinpath(MEASURED).read_text("utf-8")))
    found = (validate_model(MeasuredRun, line, MEASURED) for line in lines)
    return {one.name: one for one in found}
