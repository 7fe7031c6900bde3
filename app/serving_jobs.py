"""What job processes do for the pages Serving and Serving sizing; plain arguments, found by name."""

from __future__ import annotations

import gzip
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from moesim.app.components.timeline.packing import PackedStep, packed_lives
from moesim.app.predictions import Progress, read_below
from moesim.hwmodels.errors import InputError, MoesimError
from moesim.simulator.scenario import Scenario
from moesim.simulator.serving import trace as traces
from moesim.simulator.serving.deployment import deployments
from moesim.simulator.serving.replicas import PromptChunk
from moesim.simulator.serving.requests import load_requests
from moesim.simulator.serving.results import Intervals, ServingResult
from moesim.simulator.serving.simulate import Service, intervals, prepare, result_of
from moesim.simulator.serving.sized import ServingPlan
from moesim.simulator.serving.sizing import serve_plan
from moesim.simulator.serving.step import StepModel
from moesim.simulator.serving.typical import TypicalStep, typical_step

MOST_REQUESTS = 20_000
MOST_RANKS = 4_096
"""Largest load and deployment that the dashboard serves; the command line has no such limits."""
MOST_LIVES = 5_000
"""Requests that the page draws, the first ones."""
TP = (1, 2, 4, 8, 16, 32, 64)
"""Degrees that are tried for a scenario that says nothing of serving."""

TraceKind = Literal["requests", "step"]


class ServedView(Struct, frozen=True):
    """What the page Serving shows of a load: the result, its typical decode step, and lives of requests.

    `step`: None where no request has a second token. `shown`: requests in `lives`.
    """

    result: ServingResult
    step: TypicalStep | None
    lives: PackedStep
    shown: int


def admitted(scenario: Scenario) -> Service:
    """Pools and load of a scenario; raises InputError above the dashboard's limits."""
    serving = scenario.serving
    if serving is not None:
        ranks = sum(p.replicas * p.dp * p.tp for p in (serving, serving.prefill) if p is not None)
        _limit(ranks, MOST_RANKS, "GPUs", "serving.replicas")
        _limit(serving.load.requests or 0, MOST_REQUESTS, "requests", "serving.load.requests")
    service = prepare(scenario)
    _limit(len(service.requests), MOST_REQUESTS, "requests", "serving.load.requests")
    return service


def _limit(value: int, most: int, what: str, key: str) -> None:
    if value > most:
        raise InputError(
            f"{value:,} {what} are more than the {most:,} that the dashboard serves: set {key} lower, or use "
            "the command line (moesim serve simulate)",
            key=key,
            nearest=[most],
        )


def served(folder: str, scenario: Scenario) -> ServedView:
    """Serve a load request by request."""
    read_below(folder)
    service = admitted(scenario)
    found = service.run()
    step = None
    if (found.requests.output_tokens > 1).any():
        step = typical_step(StepModel(service.deployments[0]), found)
    shown = min(len(found.arrival_ns), MOST_LIVES)
    lives = {traces.title(found, n): traces.phases(found, n) for n in range(shown)}
    return ServedView(result_of(service, found), step, packed_lives(lives), shown)


def ends(folder: str, scenario: Scenario) -> Intervals:
    """The intervals of the load's figures."""
    read_below(folder)
    admitted(scenario)
    return intervals(scenario)


def trace(folder: str, scenario: Scenario, kind: TraceKind) -> bytes:
    """A Perfetto trace of the load's requests, or of its typical decode step, gzipped."""
    read_below(folder)
    service, chunks = admitted(scenario), list[PromptChunk]()
    found = service.run(watch=chunks.append)
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "trace.json"
        if kind == "requests":
            traces.write_request_trace(path, service, found, chunks)
        else:
            traces.write_step_trace(path, service, found)
        return gzip.compress(path.read_bytes(), mtime=0)


def fitting(folder: str, scenario: Scenario) -> Scenario:
    """The scenario served by one replica of the fewest GPUs whose memory holds weights and a cache.

    Raises InfeasibleError where no degree does, InputError for a model that cannot be served.
    """
    read_below(folder)
    problem: MoesimError | None = None
    for tp in TP:
        found = scenario.replace(serving={"tp": tp, "load": {"rate_per_s": 1}})
        try:
            deployments(found)
        except MoesimError as error:
            problem = problem or error
        else:
            return found
    assert problem is not None
    raise problem


def sized(folder: str, scenario: Scenario, options: Mapping[str, Any], progress: Progress) -> ServingPlan:
    """The plans that serve a load within its limits."""
    read_below(folder)
    if scenario.serving is not None:
        requests = load_requests(scenario.serving.load, scenario.seed, scenario.path)
        _limit(len(requests), MOST_REQUESTS, "requests", "serving.load.requests")
    return serve_plan(scenario, workers=1, progress=lambda text: progress(None, text), **options)
