"""Scores served loads against measured runs: order of plans first, then errors and coverage of TTFT and TPOT.

A run is served request by request as its benchmark did: a closed loop with lengths drawn as there. Runs of
one deployment share its step model. Errors are predicted / measured - 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from pydantic import Field

from moesim.hwmodels.errors import InfeasibleError, InputError
from moesim.hwmodels.frozen import Frozen
from moesim.simulator.common.processes import worker_pool
from moesim.simulator.scenario import Scenario, load_scenario
from moesim.simulator.scoring.order import OrderScore, TimedPlan, order_score
from moesim.simulator.scoring.serving_rows import ServedRun, ServingRow, recipes, run_of, serving_rows
from moesim.simulator.serving.deployment import Deployment
from moesim.simulator.serving.requests import NS_PER_S, Requests, requests_of
from moesim.simulator.serving.scheduler import StepBatch
from moesim.simulator.serving.simulate import prepare
from moesim.simulator.serving.step import StepCost, StepModel

MOST_REQUESTS = 4096
"""Requests of a run at most; a loop with more slots than half of it runs for two requests a slot."""
METRICS = ("tpot", "ttft")
SEED = 0


class Interval(NamedTuple):
    """A predicted time in seconds and its 80 % interval."""

    seconds: float
    low: float
    high: float


class ScoredServing(Frozen):
    """A measured run beside its prediction, in seconds; `refused` says why there is none.

    `known`: whether it is known that drafts were used or not; only such rows count in the totals. `warmed`:
    whether requests warmed the server up.
    `steady`: TTFT and TPOT of the closed form of a loop in its steady state.
    """

    id: str
    title: str
    model: str
    hardware: str
    engine: str
    release: str
    precision: str
    plan: str
    prefill: str = ""
    gpus: int
    isl: int
    osl: int
    concurrency: int
    drafts: int = 0
    known: bool = True
    warmed: bool = True
    measured: dict[str, float]
    predicted: dict[str, Interval] = Field(default_factory=dict)
    steady: dict[str, float] = Field(default_factory=dict)
    notes: tuple[str, ...] = ()
    refused: str = ""

    def error(self, metric: str) -> float | None:
        """Predicted / measured - 1; None without either."""
        if metric not in self.predicted or metric not in self.measured:
            return None
        return self.predicted[metric].seconds / self.measured[metric] - 1.0

    def covered(self, metric: str) -> bool | None:
        """Whether the measured time is inside the 80 % interval."""
        if self.error(metric) is None:
            return None
        found = self.predicted[metric]
        return found.low <= self.measured[metric] <= found.high


class ErrorScore(Frozen):
    """Errors of a set of runs as fractions, by metric, and shares of runs in the 80 % interval."""

    name: str
    rows: int
    refused: int
    median: dict[str, float]
    absolute: dict[str, float]
    covered: dict[str, float]
    width: dict[str, float]


class ServingBoard(Frozen):
    """Scored runs, their order, and their errors by set."""

    runs: tuple[ScoredServing, ...]
    order: tuple[OrderScore, ...]
    totals: tuple[ErrorScore, ...]
    groups: tuple[ErrorScore, ...]


# -- a run --------------------------------------------------------------------------------------------


def scenario_of(run: ServedRun) -> Scenario:
    """The scenario of a run: a cluster of its accelerator, the pools, and a load of its longest request."""
    load = {
        "arrivals": "concurrency", "concurrency": run.concurrency, "input_tokens": run.lengths[0],
        "output_tokens": run.lengths[1], "tokeniser_s_per_token": recipes().load.tokeniser_s_per_token,
    }  # fmt: skip
    return load_scenario(
        {
            "name": "serving run",
            "model": run.model,
            "cluster": run.cluster,
            "serving": {**run.setup, "load": load},
        }
    )


def closed_loop(run: ServedRun, seed: int = SEED) -> Requests:
    """The requests of a run's benchmark: lengths uniform from a share of the stated ones to these."""
    load = recipes().load
    count = min(load.requests_per_slot * run.concurrency, max(MOST_REQUESTS, 2 * run.concurrency))
    draw = np.random.default_rng(seed)
    inputs, outputs = (
        draw.integers(int(load.shortest * most), most, count, endpoint=True) for most in run.lengths
    )
    return requests_of(np.zeros(count, dtype=np.int64), inputs, outputs)


def predict(run: ServedRun, models: dict[str, StepModel]) -> tuple[dict[str, Interval], dict[str, float]]:
    """TTFT and TPOT of a run with their intervals, and those of the closed form.

    `models`: step models of the run's deployment by role, filled here. Raises InputError and InfeasibleError
    as `serve` does.
    """
    scenario = scenario_of(run)

    def times(deployment: Deployment) -> StepModel:
        return models.setdefault(deployment.role, StepModel(deployment))

    service = prepare(scenario, closed_loop(run), times)
    served = service.run()
    outputs = served.requests.output_tokens
    tpot = (served.last_token_ns - served.first_token_ns) / NS_PER_S / (outputs - 1)
    ttft = (served.first_token_ns - served.arrival_ns) / NS_PER_S
    average = np.mean if recipes().load.statistic == "mean" else np.median
    mid = {"ttft": float(average(ttft)), "tpot": float(average(tpot))}
    steady, low, high = (steady_state(run, models, pick) for pick in (_seconds, _low, _high))
    found = {
        name: Interval(mid[name], mid[name] * low[name] / steady[name], mid[name] * high[name] / steady[name])
        for name in METRICS
    }
    if not run.warmed:
        load, first = recipes().load, found["ttft"]
        found["ttft"] = first._replace(high=first.high + load.cold_s / load.requests_per_slot)
    return found, steady


def _seconds(cost: StepCost) -> float:
    return cost.seconds


def _low(cost: StepCost) -> float:
    return cost.low


def _high(cost: StepCost) -> float:
    return cost.high


def steady_state(
    run: ServedRun, models: dict[str, StepModel], of: Callable[[StepCost], float]
) -> dict[str, float]:
    """TTFT and TPOT in seconds of a closed loop in its steady state, where prompts come one at a time.

    A sequence waits for its decode steps and, where one pool does both, for the prompts of all others that
    come in its life; a prompt waits for the step under way. `of` picks the best, mean or worst seconds.
    """
    decode, prompts = models.get("both") or models["decode"], models.get("both") or models["prefill"]
    one = decode.deployment
    share = 0.5 * (1.0 + recipes().load.shortest)
    tokens, steps = round(share * run.lengths[0]), share * run.lengths[1] / one.tokens_per_step
    ranks = one.pool.replicas * one.pool.dp
    batch = max(min(run.concurrency / ranks, one.pool.max_num_seqs), 1.0)
    count = round(batch)
    work = StepBatch(count, count * round(tokens + 0.5 * share * run.lengths[1]), 0, 0, 0)
    step = of(decode.cost([work] * one.pool.dp))
    prompt = _prompt(prompts, tokens, work if prompts is decode else None, of)
    if prompts is not decode:
        return {"ttft": prompt, "tpot": step * steps / (share * run.lengths[1] - 1)}
    extra = prompt - step if one.policy.mixed else prompt
    stall = extra * max(batch * one.pool.dp - 1, 0)
    return {
        "ttft": 0.5 * step + prompt,
        "tpot": (step * steps + stall) / (share * run.lengths[1] - 1),
    }


def _prompt(
    model: StepModel, tokens: int, beside: StepBatch | None, of: Callable[[StepCost], float]
) -> float:
    """Seconds of the steps of one prompt, on one rank; decodes go on in them where the engine mixes them."""
    policy, dp = model.deployment.policy, model.deployment.pool.dp
    chunk = max(min(tokens, policy.max_num_batched_tokens), 1)
    total, done = 0.0, 0
    while done < tokens:
        count = min(chunk, tokens - done)
        own = StepBatch(0, 0, 1, count, count * done + count * (count + 1) // 2)
        idle = StepBatch(0, 0, 0, 0, 0)
        if beside is not None and policy.mixed:
            own, idle = own._replace(decodes=beside.decodes, context=beside.context), beside
        total += of(model.cost([own, *[idle] * (dp - 1)]))
        done += count
    return total


# -- all runs -----------------------------------------------------------------------------------------


def score_serving(rows: Sequence[ServingRow] | None = None, workers: int = 1) -> ServingBoard:
    """Score every run (the shipped ones by default); the result does not depend on `workers`."""
    rows = serving_rows() if rows is None else tuple(rows)
    plain: dict[int, ScoredServing] = {}
    grouped: dict[str, list[tuple[int, ServingRow, ServedRun]]] = {}
    for at, row in enumerate(rows):
        try:
            run = run_of(row, rows)
        except InputError as error:
            plain[at] = _scored(row, None, refused=str(error))
        else:
            grouped.setdefault(run.key, []).append((at, row, run))
    groups = sorted(grouped.values(), key=lambda group: -sum(run.concurrency for _, _, run in group))
    for scored in _mapped(groups, workers):
        plain |= scored
    return board_of([plain[at] for at in range(len(rows))])


def _mapped(
    groups: Sequence[list[tuple[int, ServingRow, ServedRun]]], workers: int
) -> Iterator[dict[int, ScoredServing]]:
    if workers == 1:
        yield from map(_score_group, groups)
        return
    with worker_pool(workers) as pool:
        yield from pool.map(_score_group, groups)


def _score_group(group: Sequence[tuple[int, ServingRow, ServedRun]]) -> dict[int, ScoredServing]:
    """Runs of one deployment; equal loads are served once."""
    models: dict[str, StepModel] = {}
    known: dict[tuple[Any, ...], tuple[dict[str, Interval], dict[str, float]] | str] = {}
    scored = {}
    for at, row, run in group:
        load = run.lengths, run.concurrency, run.warmed
        if load not in known:
            try:
                known[load] = predict(run, models)
            except (InputError, InfeasibleError) as error:
                known[load] = str(error)
        found = known[load]
        if isinstance(found, str):
            scored[at] = _scored(row, run, refused=found)
        else:
            scored[at] = _scored(row, run, predicted=found[0], steady=found[1])
    return scored


def _scored(row: ServingRow, run: ServedRun | None, **outcome: Any) -> ScoredServing:
    pools = [row.plan, *([row.prefill] if row.prefill else [])]
    drafts = int(run.setup["draft_tokens"]) if run else 0
    plan = row.plan
    if run is not None:
        plan = plan._replace(**{name: run.setup[name] for name in ("tp", "dp", "ep")})
    return ScoredServing(
        id=row.id, title=row.title, model=run.model if run else row.model, hardware=row.hardware,
        engine=row.engine, release=row.release, precision=row.precision, plan=str(plan),
        prefill=str(row.prefill or ""), gpus=sum(one.replicas * one.tp * one.dp for one in pools),
        isl=row.isl, osl=row.osl, concurrency=row.concurrency, drafts=drafts,
        known=run.known if run else True, warmed=run.warmed if run else True,
        measured={name: value for name in METRICS if (value := getattr(row, f"{name}_s")) is not None},
        notes=run.notes if run else (), **outcome,
    )  # fmt: skip


def board_of(runs: Sequence[ScoredServing]) -> ServingBoard:
    """Order and errors of scored runs."""
    known = [run for run in runs if run.known]
    sets: dict[str, list[ScoredServing]] = {
        "all rows": known,
        "one pool": [run for run in known if not run.prefill],
        "prefill and decode apart": [run for run in known if run.prefill],
        "with drafts": [run for run in known if run.drafts],
        "server warmed up": [run for run in known if run.warmed],
        "server not warmed up": [run for run in known if not run.warmed],
        "drafts not stated": [run for run in runs if not run.known],
    }
    groups: dict[str, list[ScoredServing]] = {}
    for run in known:
        name = f"{run.model} {run.precision}, {run.hardware}, {run.engine}"
        groups.setdefault(name, []).append(run)
    return ServingBoard(
        runs=tuple(runs),
        order=tuple(_order(known)),
        totals=tuple(error_score(name, some) for name, some in sets.items() if some),
        groups=tuple(error_score(name, some) for name, some in sorted(groups.items())),
    )


def error_score(name: str, runs: Sequence[ScoredServing]) -> ErrorScore:
    """Errors of TTFT and TPOT over a set of runs."""
    figures: dict[str, dict[str, float]] = {"median": {}, "absolute": {}, "covered": {}, "width": {}}
    for metric in METRICS:
        errors = [error for run in runs if (error := run.error(metric)) is not None]
        if not errors:
            continue
        figures["median"][metric] = median(errors)
        figures["absolute"][metric] = median(map(abs, errors))
        inside = [found for run in runs if (found := run.covered(metric)) is not None]
        figures["covered"][metric] = sum(inside) / len(inside)
        figures["width"][metric] = median(
            (p.high - p.low) / p.seconds for run in runs if (p := run.predicted.get(metric)) is not None
        )
    return ErrorScore(name=name, rows=len(runs), refused=sum(bool(run.refused) for run in runs), **figures)


def _order(runs: Iterable[ScoredServing]) -> Iterator[OrderScore]:
    """Order of plans for one model, machine and lengths: by TPOT, and by GPU seconds of a token."""
    known = [run for run in runs if len(run.predicted) == len(run.measured) == len(METRICS)]
    for name, of, loads in (
        ("TPOT, one load", _tpot, True),
        ("GPU time a token, one load", _gpu_seconds, True),
        ("TPOT, any load", _tpot, False),
        ("GPU time a token, any load", _gpu_seconds, False),
    ):
        plans = [_timed(run, of, loads) for run in known]
        if (score := order_score(name, plans)) is not None:
            yield score


def _timed(run: ScoredServing, of: Callable[[ScoredServing, float, float], float], loads: bool) -> TimedPlan:
    family = run.model, run.hardware, f"{run.isl}/{run.osl}", *([f"x {run.concurrency}"] if loads else [])
    plan = run.engine, run.precision, run.plan, run.prefill, run.drafts, run.concurrency
    predicted = {name: found.seconds for name, found in run.predicted.items()}
    measured_s, predicted_s = (of(run, times["ttft"], times["tpot"]) for times in (run.measured, predicted))
    return TimedPlan(run.id, family, plan, measured_s, predicted_s)


def _tpot(run: ScoredServing, ttft: float, tpot: float) -> float:
    return tpot


def _gpu_seconds(run: ScoredServing, ttft: float, tpot: float) -> float:
    """GPU seconds of an output token in a loop that is always full."""
    return run.gpus * (ttft / run.osl + tpot) / run.concurrency
