"""One point of a sweep: the key of its scenario, and its prediction in any process."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from moesim.hwmodels.calibration import profile_hash
from moesim.hwmodels.errors import InfeasibleError, InputError
from moesim.hwmodels.files import is_there
from moesim.simulator.predict.figures import figures
from moesim.simulator.predict.pools import joined_hash
from moesim.simulator.predict.simulate import simulate
from moesim.simulator.scenario import Scenario
from moesim.simulator.studies.outcome import Key, PointOutcome
from moesim.simulator.studies.uncertainty import with_uncertainty
from moesim.version import __version__


def key_of(scenario: Scenario, uncertainty: bool = False, engine_draws: int = 0) -> Key:
    """The key of a scenario, which hashes its keys and the content of the model, cluster and files it names.

    `uncertainty` and `engine_draws`: whether the prediction has bands, and from how many engine runs further
    ones are taken.

    Raises InputError if one of them cannot be read.
    """
    content = {
        "scenario": scenario.resolved(),
        "model": scenario.shape.model_dump(mode="json"),
        "cluster": _machines(scenario),
        "files": {name: _digest(scenario.path(name)) for name in _files(scenario)},
        "uncertainty": uncertainty,
        **({"engine_draws": engine_draws} if engine_draws else {}),
        **({"defaults": chosen} if (chosen := [item.key for item in scenario.defaults]) else {}),
    }
    text = json.dumps(content, sort_keys=True, default=str)
    hashes = [profile_hash(profile) for profile in scenario.calibrations]
    return Key(hashlib.sha256(text.encode()).hexdigest(), joined_hash(hashes), __version__)


def _machines(scenario: Scenario) -> Any:
    """The cluster as plain data, or the list of the clusters of a fleet's pools."""
    found = [machine.model_dump(mode="json") for machine in scenario.machines]
    return found if scenario.fleet is not None else found[0]


def _files(scenario: Scenario) -> list[str]:
    """Names of the further files that a scenario reads: its schedule and its recorded expert counts."""
    named = [getattr(scenario.routing.load, "file", None), scenario.schedule]
    return [name for name in named if name and is_there(Path(scenario.path(name)))]


def _digest(path: str) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None


def evaluate(scenario: Scenario, uncertainty: bool = False) -> PointOutcome:
    """Predict one scenario; a refused scenario becomes an outcome with the reason."""
    began = time.perf_counter()
    outcome = _outcome(scenario, uncertainty)
    return replace(outcome, work_s=time.perf_counter() - began)


def evaluate_group(scenarios: Sequence[Scenario], uncertainty: bool = False) -> list[PointOutcome]:
    """Predict scenarios one after the other, so that each uses what the ones before it left to share."""
    return [evaluate(scenario, uncertainty) for scenario in scenarios]


def _outcome(scenario: Scenario, uncertainty: bool) -> PointOutcome:
    try:
        result = with_uncertainty(scenario) if uncertainty else simulate(scenario)
    except InfeasibleError as error:
        return PointOutcome("infeasible", str(error), {}, "")
    except InputError as error:
        return PointOutcome("illegal", str(error), {}, "")
    except Exception as error:
        return PointOutcome("failed", f"{type(error).__name__}: {error}", {}, "")
    row: dict[str, Any] = figures(result)
    for name, band in result.uncertainty.bands.items() if result.uncertainty else ():
        row |= {f"{name}_p10": band.p10, f"{name}_p50": band.p50, f"{name}_p90": band.p90}
    memory, gib = result.memory, 2.0**30
    if memory.fits:
        return PointOutcome("ok", memory.risk or "", row, result.model_dump_json())
    short = f"needs {memory.total_bytes / gib:.1f} GiB of {memory.capacity_bytes / gib:.1f} GiB a GPU"
    return PointOutcome("does not fit", short, row, result.model_dump_json())
