"""Published throughput of serving and two request-level vLLM runs, beside what is predicted for them."""

from __future__ import annotations

import json
import lzma
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

import numpy as np
from msgspec.structs import replace

from moesim.hwmodels.arrays import FloatArray
from moesim.hwmodels.errors import InfeasibleError, InputError
from moesim.hwmodels.frozen import Frozen
from moesim.hwmodels.validation import validate_model
from moesim.hwmodels.yaml_io import parse_mapping
from moesim.simulator.scenario import load_scenario
from moesim.simulator.scoring import published_text
from moesim.simulator.serving.deployment import Deployment, Spreads, deployments
from moesim.simulator.serving.replicas import PaceModel, Served, StepPace
from moesim.simulator.serving.requests import NS_PER_S, Requests, requests_of
from moesim.simulator.serving.scheduler import StepBatch
from moesim.simulator.serving.simulate import prepare
from moesim.simulator.serving.step import StepModel

FIGURES, RUNS = "serving-figures.yaml", "vllm-runs.json.xz"
CARD = "rtx-pro-6000-published"
"""Calibration of the card of the logged runs."""
OVERLAP_TOKENS = (256, 32)
"""Decode tokens a rank at which two micro-batches must gain, and lose."""


class ScoredFigure(Frozen):
    """A measured figure beside its prediction, with the 80 % interval where there is one.

    `within`: largest error that the comparison allows, as a fraction; None where it only shows.
    """

    name: str
    what: str
    measured: float
    predicted: float | None = None
    low: float | None = None
    high: float | None = None
    within: float | None = None
    source: str = ""
    remark: str = ""
    refused: str = ""

    @property
    def error(self) -> float | None:
        """Predicted / measured - 1."""
        return None if self.predicted is None else self.predicted / self.measured - 1.0


# -- published throughput -----------------------------------------------------------------------------


class Step(Frozen):
    """The step of one rank: `tokens` of prompts of `prompt` tokens (`cached` known), or `sequences`."""

    tokens: int = 0
    prompt: int = 1
    cached: int = 0
    sequences: int = 0
    context: int = 0

    @property
    def batch(self) -> StepBatch:
        """As the step model takes it."""
        if not self.tokens:
            return StepBatch(self.sequences, self.sequences * self.context, 0, 0, 0)
        new = self.prompt - self.cached
        prompts = max(round(self.tokens / new), 1)
        return StepBatch(0, 0, prompts, self.tokens, round(self.tokens * (self.cached + (new + 1) / 2)))


class ServedFigure(Frozen):
    """A published throughput and the step that is predicted for it; `balanced`: experts get equal rows."""

    name: str
    model: str
    cluster: str
    setup: str = ""
    serving: dict[str, Any]
    batch: Step
    measured: float
    unit: str
    source: str
    remark: str = ""
    balanced: bool = False


class ServedFigures(Frozen):
    """The shipped figures, and the keys of `serving` that several of them share, by name."""

    setups: dict[str, dict[str, Any]]
    figures: tuple[ServedFigure, ...]


def figures() -> tuple[ServedFigure, ...]:
    """The shipped figures; raises InputError for a malformed file."""
    found = validate_model(ServedFigures, parse_mapping(published_text(FIGURES), FIGURES), FIGURES)
    return tuple(
        one.model_copy(update={"serving": {**found.setups.get(one.setup, {}), **one.serving}})
        for one in found.figures
    )


def deployment_of(model: str, cluster: Any, serving: Mapping[str, Any]) -> Deployment:
    """The first pool of a scenario of these parts."""
    data = {"name": "published", "model": model, "cluster": cluster, "serving": dict(serving)}
    return deployments(load_scenario(data))[0]


def score_figures(within: float = 0.15) -> list[ScoredFigure]:
    """Every published throughput beside that of its step."""
    scored = []
    for one in figures():
        common: dict[str, Any] = {
            "name": one.name, "what": one.unit, "measured": one.measured, "source": one.source,
            "remark": one.remark, "within": within,
        }  # fmt: skip
        try:
            deployment = deployment_of(one.model, one.cluster, one.serving)
            spreads = Spreads.usual(deployment.cluster.accelerator.architecture)
            deployment = replace(
                deployment,
                role="prefill" if one.batch.tokens else "decode",
                spreads=spreads._replace(expert_load=0.0) if one.balanced else spreads,
            )
            cost = StepModel(deployment).cost([one.batch.batch] * deployment.pool.dp)
        except (InputError, InfeasibleError) as error:
            scored.append(ScoredFigure(**common, refused=str(error)))
            continue
        gained = one.batch.tokens or one.batch.sequences * deployment.tokens_per_step
        per_gpu = gained * deployment.pool.dp / deployment.pool.gpus
        tokens = per_gpu * (1 if one.unit.endswith("GPU") else deployment.cluster.node.n_gpus)
        scored.append(
            ScoredFigure(
                **common, predicted=tokens / cost.seconds, low=tokens / cost.high, high=tokens / cost.low
            )
        )
    return scored


def overlap_gains() -> dict[int, float]:
    """Speed-up by two micro-batches of DeepSeek's decode on 144 GPUs, by tokens a rank."""
    decode = next(one for one in figures() if one.name == "DeepSeek online decode")
    found = {}
    for tokens in OVERLAP_TOKENS:
        seconds = []
        for overlap in (False, True):
            serving = {**decode.serving, "two_batch_overlap": overlap}
            deployment = deployment_of(decode.model, decode.cluster, serving)
            batch = StepBatch(tokens, tokens * decode.batch.context, 0, 0, 0)
            seconds.append(StepModel(deployment).cost([batch] * deployment.pool.dp).seconds)
        found[tokens] = seconds[0] / seconds[1]
    return found


# -- vLLM runs ----------------------------------------------------------------------------------------


class LoggedRun(Frozen):
    """A run of which every request is known; `each_second` has the engine's own counters."""

    name: str
    model: str
    pool: dict[str, Any]
    requests: dict[str, tuple[int, ...]]
    each_second: dict[str, tuple[float, ...]]


class LoggedRuns(Frozen):
    """Runs of one source on one machine."""

    source: str
    cluster: str
    runs: tuple[LoggedRun, ...]


def logged_runs() -> LoggedRuns:
    """The shipped runs."""
    path = resources.files("moesim.simulator").joinpath("data", "published", RUNS)
    return validate_model(LoggedRuns, json.loads(lzma.decompress(path.read_bytes())), RUNS)


class LoggedRates:
    """Step times from the tokens/s that a run logged each second, so that only the scheduler is judged."""

    def __init__(self, prompt: Sequence[float], output: Sequence[float]) -> None:
        """Tokens of prompts and of outputs in each second."""
        self._prompt, self._output = prompt, output

    def pace(self, now_ns: int, ranks: Sequence[StepBatch]) -> StepPace:
        """One step: its tokens at the rates of the seconds that it lasts (protocol `replicas.StepTimes`)."""
        decodes = sum(batch.decodes for batch in ranks)
        left = float(decodes or sum(batch.prefill_tokens for batch in ranks))
        rates = self._output if decodes else self._prompt
        last, now = len(rates) - 1, now_ns / NS_PER_S
        at = min(int(now), last)
        while left > 0:
            rate = max(rates[at], 1.0)
            end = now + left / rate
            if at == last or end <= at + 1:
                now = end
                break
            left -= (at + 1 - now) * rate
            now, at = float(at + 1), at + 1
        return StepPace(max(round(now * NS_PER_S) - now_ns, 1), 0.0, 1)


def _own_load(run: LoggedRun) -> Requests:
    requests = run.requests
    return requests_of(requests["queued_ns"], requests["input_tokens"], requests["output_tokens"])


def _serve(run: LoggedRun, cluster: str, times: type[StepModel] | None) -> Served:
    """The run served again, with the step model's times or at its own rates."""
    data = {
        "name": run.name, "model": run.model, "cluster": cluster, "serving": run.pool, "profile": CARD,
    }  # fmt: skip
    series = run.each_second

    def given(deployment: Deployment) -> PaceModel:
        if times is not None:
            return times(deployment)
        return LoggedRates(series["prompt_tokens_per_s"], series["output_tokens_per_s"])

    return prepare(load_scenario(data), _own_load(run), given).run(every_ns=NS_PER_S)


def _latencies(run: LoggedRun, served: Served | None) -> tuple[FloatArray, FloatArray]:
    """TTFT from the queue, and TPOT of a request, in seconds; measured without `served`."""
    requests = run.requests
    start, outputs = np.array(requests["queued_ns"]), np.array(requests["output_tokens"])
    first, last = (np.array(requests[name]) for name in ("first_token_ns", "last_token_ns"))
    if served is not None:
        first, last = served.first_token_ns, served.last_token_ns
    return (first - start) / NS_PER_S, (last - first) / NS_PER_S / np.maximum(outputs - 1, 1)


def counted(run: LoggedRun, served: Served) -> dict[str, float]:
    """Mean absolute error of running and waiting requests each second, over their measured mean.

    Both are what vLLM reports (v1/core/sched/scheduler.py, make_stats): a request runs from the plan of the
    first step that works on it, one step before that step begins where steps are planned ahead.
    """
    found = {}
    for name in ("running", "waiting"):
        measured = np.array(run.each_second[name])
        model = np.zeros(len(measured))
        counts = [getattr(count, name) for count in served.counts[: len(measured)]]
        model[: len(counts)] = counts
        found[name] = float(np.abs(model - measured).mean() / max(measured.mean(), 1.0))
    return found


def score_logged(own: bool = True) -> list[ScoredFigure]:
    """Median TTFT and TPOT of the runs with own step times, and with the rates of the run given."""
    scored, logged = [], logged_runs()
    for run in logged.runs:
        measured = _latencies(run, None)
        for times, limits in ((None, (0.10, None)), *([(StepModel, (0.30, 0.15))] if own else [])):
            kind = "rates given" if times is None else "own step times"
            served = _serve(run, logged.cluster, times)
            for name, known, found, within in zip(
                ("TTFT", "TPOT"), measured, _latencies(run, served), limits, strict=True
            ):
                if within is not None:
                    scored.append(
                        ScoredFigure(
                            name=f"{run.name}, {kind}", what=f"median {name} (s)", within=within,
                            measured=float(np.median(known)), predicted=float(np.median(found)),
                            source=logged.source,
                        )
                    )  # fmt: skip
            if times is None:
                for what, error in counted(run, served).items():
                    scored.append(
                        ScoredFigure(
                            name=f"{run.name}, {kind}", what=f"{what} requests, mean error over time",
                            measured=1.0, predicted=1.0 + error, within=0.10, source=logged.source,
                        )
                    )  # fmt: skip
    return scored
