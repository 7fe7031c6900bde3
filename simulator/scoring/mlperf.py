"""DeepSeek-V3 671B in MLPerf Training v6.0: nine runs as scenarios, from `mlperf-v6.yaml`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from pydantic import PositiveInt

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.frozen import Frozen
from moesim.hwmodels.node import load_node
from moesim.hwmodels.validation import nearest, validate_model
from moesim.simulator.scenario import Scenario
from moesim.simulator.scoring import published_data

FILE = "mlperf-v6.yaml"
GROUP = "mlperf-v6-deepseek"
"""Group of the open rows on the scoreboard."""


class SubmittedRun(Frozen):
    """One run of the round."""

    name: str
    system: str
    gpus: PositiveInt
    sequences: PositiveInt
    submitter: str
    row: str = ""
    """Its row on the open scoreboard; empty for a run whose time nobody has looked at."""


class Submission(Frozen):
    """The file `mlperf-v6.yaml`."""

    common: dict[str, Any]
    systems: dict[str, dict[str, Any]]
    runs: tuple[SubmittedRun, ...]


@lru_cache(maxsize=1)
def _file() -> Submission:
    return published_data(Submission, FILE)


def runs() -> tuple[SubmittedRun, ...]:
    """The nine runs, in the file's order."""
    return _file().runs


def run_named(name: str) -> SubmittedRun:
    """The run of this name; raises InputError with the valid names for any other."""
    for run in runs():
        if name in (run.name, run.row):
            return run
    names = [run.name for run in runs()]
    raise InputError(f"{FILE}: no run {name!r}{nearest(name, names)}; runs: {', '.join(names)}")


def is_run(row: str, gpus: int, sequences: int) -> bool:
    """Whether a row of the scoreboard is one of the runs, by its id and its size."""
    return any(run.row == row and (run.gpus, run.sequences) == (gpus, sequences) for run in runs())


def scenario_of(name: str, overrides: Sequence[str] = ()) -> Scenario:
    """The scenario of a run, with `key=value` overrides as for `load_scenario`.

    Raises InputError for an unknown run and for GPUs that do not fill racks.
    """
    run, file = run_named(name), _file()
    data = _merged(file.common, file.systems[run.system])
    cluster = dict(data["cluster"])
    per_rack = load_node(cluster["node"]).n_gpus
    if run.gpus % per_rack:
        raise InputError(f"{FILE}: {run.name}: {run.gpus} GPUs do not fill racks of {per_rack}")
    data["cluster"] = {**cluster, "nodes": run.gpus // per_rack}
    data["batch"] = {**data["batch"], "sequences": run.sequences}
    data["name"] = f"mlperf-v6-{run.name}"
    data["description"] = f"DeepSeek-V3 671B on {run.gpus} GPUs, MLPerf Training v6.0, {run.submitter}"
    return validate_model(Scenario, data, f"{FILE}: {run.name}").overridden(*overrides)


def _merged(base: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the keys of `more`, section by section."""
    out = dict(base)
    for key, value in more.items():
        both = isinstance(value, Mapping) and isinstance(out.get(key), Mapping)
        out[key] = _merged(out[key], value) if both else value
    return out
