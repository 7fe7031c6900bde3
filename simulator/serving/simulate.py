"""Serves the load of a scenario: pools and requests into events, and what became of them into a result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cached_property, partial
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from moesim.hwmodels.arrays import BoolArray, FloatArray
from moesim.hwmodels.errors import InfeasibleError, InputError
from moesim.hwmodels.summary_text import count, table_lines
from moesim.simulator.common.tables import cell
from moesim.simulator.engine.registry import request_loop
from moesim.simulator.run.bill import rates
from moesim.simulator.scenario import AnyScenario, Scenario, load_scenario
from moesim.simulator.scenario.inputs import inputs_of
from moesim.simulator.scenario.serving import Serving, ServingLimits
from moesim.simulator.serving.compiled import serve_compiled, why_not
from moesim.simulator.serving.deployment import Deployment, deployments, notes_of
from moesim.simulator.serving.exchange import Fabric, cache_transfer
from moesim.simulator.serving.operators import cache_bytes_per_token
from moesim.simulator.serving.replicas import (
    Count,
    PaceModel,
    PromptChunk,
    ReplicaPool,
    Served,
    check_all_served,
    serve_requests,
)
from moesim.simulator.serving.requests import NS_PER_S, Requests, load_requests
from moesim.simulator.serving.results import (
    ExpertBalance,
    Goodput,
    Imbalance,
    Intervals,
    Moment,
    PoolUse,
    ServingCost,
    ServingResult,
    Window,
    ended_within,
    intervals_of,
    latency,
    window_of,
)
from moesim.simulator.serving.scheduler import StepBatch
from moesim.simulator.serving.step import StepModel
from moesim.simulator.serving.typical import Drifting, Stretched, step_basis, typical_step
from moesim.simulator.studies.space import Space
from moesim.simulator.studies.store import PointOutcome
from moesim.simulator.studies.sweep import MOST_PRINTED, Progress, Sweep, SweepPoint, sweep
from moesim.version import __version__

Times = Callable[[Deployment], PaceModel]
"""Gives the step times of a pool; tests and studies may give others than the step model's."""

MOMENTS = 200
"""Most moments of a result's time line."""
FIRST_INTERVAL_NS = 1_000_000
MOST_PLACES = 10_000
"""Most sequences that run at once where the highest stable rate is looked for."""


class Service(Struct, frozen=True, dict=True):
    """A scenario's pools and load, ready for events: that which decodes first, that for prompts after it."""

    scenario: Scenario
    serving: Serving
    deployments: tuple[Deployment, ...]
    pools: tuple[ReplicaPool, ...]
    requests: Requests

    @property
    def concurrency(self) -> int | None:
        """Requests under way in a closed loop."""
        load = self.serving.load
        return load.concurrency if load.arrivals == "concurrency" else None

    def run(
        self,
        requests: Requests | None = None,
        watch: Callable[[PromptChunk], None] | None = None,
        every_ns: int | None = None,
    ) -> Served:
        """Serve the load, or another one; `watch` is told every chunk of a prompt.

        Sequences are counted at all multiples of `every_ns`; absent: at some 200 to 400 moments.
        """
        load = self.requests if requests is None else requests
        route, pool = self.serving.router, self.pools[0]
        most = 2 * MOMENTS if every_ns is None else 1 << 30
        every = every_ns or max(int(load.arrival_ns[-1]) // MOMENTS, FIRST_INTERVAL_NS)
        concurrency = self.concurrency if requests is None else None
        front = self._front_ns if self.serving.load.tokeniser_s_per_token else None
        if len(self.pools) == 1 and front is None and watch is None and not why_not(load, pool, route):
            code = request_loop(len(load))
            if code is not None:
                served, left = serve_compiled(code, load, pool, route, every, most, concurrency)
                check_all_served(left, len(load))
                return served
        return serve_requests(
            load,
            pool,
            prefill=self.pools[1] if len(self.pools) > 1 else None,
            transfer_ns=self._transfer_ns,
            route=route,
            sample_ns=every,
            most_samples=most,
            concurrency=concurrency,
            front_ns=front,
            watch=watch,
        )

    def _front_ns(self, tokens: int) -> int:
        """How long server and tokeniser work on a prompt."""
        server_s = self.deployments[0].engine.request_s.value
        return round((server_s + tokens * self.serving.load.tokeniser_s_per_token) * NS_PER_S)

    @cached_property
    def _link(self) -> tuple[Fabric, float, bool]:
        """(links, bytes of a token on a GPU, whether over NICs, as where a node does not hold all pools)."""
        prompts = self.deployments[-1]
        token = cache_bytes_per_token(prompts.shape, prompts.split) / prompts.pool.pp
        gpus = sum(one.pool.gpus * one.pool.replicas for one in self.deployments)
        fabric = Fabric(prompts.cluster, prompts.profile)
        return fabric, token, gpus > prompts.cluster.node.n_gpus

    def _transfer_ns(self, tokens: int) -> int:
        """Hand-over of a prompt's keys and values, every GPU of its rank its own shard."""
        fabric, token, across = self._link
        return ceil(cache_transfer(fabric, tokens * token, across_nodes=across).seconds * NS_PER_S)

    def highest_stable_per_s(self) -> float | None:
        """Requests a second when they never run out: completions around the middle of a full house.

        As many as find a place come at once, with answers cut as if begun some time ago, and as many
        again behind them.
        """
        requests, pool, one = self.requests, self.pools[0], self.deployments[0]
        mean = float((requests.input_tokens + requests.output_tokens).mean())
        places = (
            min(pool.policy.max_num_seqs, max(int(one.cache_tokens / mean), 1)) * pool.ranks * pool.replicas
        )
        places = min(max(places, 4), MOST_PLACES)
        full = requests.some(np.arange(2 * places) % len(requests))
        ages = np.random.default_rng(self.scenario.seed).permutation(places)
        outputs = full.output_tokens.copy()
        outputs[:places] = np.ceil(outputs[:places] * (ages + 1) / places)
        served = self.run(replace(full, arrival_ns=np.zeros_like(outputs), output_tokens=outputs))
        ends = np.sort(served.last_token_ns)
        low, high = places // 2, places // 2 + places
        span = int(ends[high] - ends[low])
        return (high - low) * NS_PER_S / span if span else None


def prepare(scenario: Scenario, requests: Requests | None = None, times: Times = StepModel) -> Service:
    """Pools and load of a scenario; `requests` instead of its own load.

    Raises InputError for what cannot be served as stated, InfeasibleError where weights or requests do not
    fit.
    """
    found = deployments(scenario)
    serving = found[0].serving
    if requests is None:
        requests = load_requests(serving.load, scenario.seed, scenario.path)
    lengths = requests.input_tokens + requests.output_tokens
    longest = int(lengths.argmax())
    for one in found:
        one.check_context(int(lengths[longest]), f"request {longest + 1:,}, in order of arrival,")
    pools = tuple(
        ReplicaPool(
            one.pool.replicas,
            one.policy,
            Drifting(one, times) if one.serving.expert_drift else times(one),
            one.pool.dp,
        )
        for one in found
    )
    return Service(scenario, serving, found, pools, requests)


def serve(
    scenario: AnyScenario,
    *overrides: str,
    requests: Requests | None = None,
    times: Times = StepModel,
    with_intervals: bool = False,
) -> ServingResult:
    """Serve a load on the replicas of a scenario's `serving` section, request by request.

    `scenario` and overrides: as for `moesim.load`. `requests`: instead of the scenario's load. `times`: step
    times of a pool instead of the step model's. `with_intervals`: serve it twice more for them. Raises
    InputError for what cannot be served as stated, InfeasibleError where weights or requests do not fit.
    """
    loaded = load_scenario(scenario, overrides)
    service = prepare(loaded, requests, times)
    result = result_of(service, service.run())
    if not with_intervals:
        return result
    return result.model_copy(update={"intervals": intervals(loaded, requests, times)})


def intervals(scenario: Scenario, requests: Requests | None = None, times: Times = StepModel) -> Intervals:
    """Serve a load twice more, with all steps at the fast and at the slow end of their 80 % interval.

    Raises as `serve` does. Step times that are not the step model's have no interval: InputError.
    """
    if times is not StepModel:
        raise InputError(
            "step times that are not the step model's have no interval; serve with intervals=False"
        )
    ends = (
        serve(scenario, requests=requests, times=partial(Stretched, high=high), with_intervals=False)
        for high in (False, True)
    )
    return intervals_of(*ends)


# -- the result --------------------------------------------------------------------------------------


def result_of(service: Service, served: Served) -> ServingResult:
    """The result of a load that was served."""
    scenario, requests = service.scenario, served.requests
    duration = max(int(served.last_token_ns.max()), 1) / NS_PER_S
    gpus = sum(one.pool.gpus * one.pool.replicas for one in service.deployments)
    inputs, outputs = int(requests.input_tokens.sum()), int(requests.output_tokens.sum())
    ttft = (served.first_token_ns - served.arrival_ns) / NS_PER_S
    later = requests.output_tokens > 1
    decoding = (served.last_token_ns - served.first_token_ns)[later] / NS_PER_S
    tpot = decoding / (requests.output_tokens[later] - 1)
    moved = served.transfer_ns[served.transfer_ns >= 0] / NS_PER_S
    cached = sum(pool.cached_tokens for pool in served.pools)
    offered = _offered_per_s(service, served)
    stable = None
    if offered is not None and _queue_is_left(served):
        stable = service.highest_stable_per_s()
    drains = stable is None or offered is None or offered <= stable
    window = window_of(served)
    cost, notes = _cost(service, window)
    step = _typical(service, served) if tpot.size else None
    return ServingResult(
        scenario=scenario.name,
        inputs=inputs_of(scenario),
        engine=service.serving.engine,
        deployment="; ".join(map(_words, service.deployments)),
        gpus=gpus,
        requests=len(requests),
        duration_s=duration,
        ttft_s=latency(ttft),
        tpot_request_s=latency(tpot) if tpot.size else None,
        tpot_token_s=float(decoding.sum() / (outputs - len(requests))) if decoding.size else None,
        end_to_end_s=latency((served.last_token_ns - served.arrival_ns) / NS_PER_S),
        queue_s=latency((served.scheduled_ns - served.arrival_ns) / NS_PER_S),
        input_tokens=inputs,
        output_tokens=outputs,
        window=window,
        requests_per_s=window.requests / window.seconds,
        offered_per_s=offered,
        input_tokens_per_s_per_gpu=window.input_tokens / window.seconds / gpus,
        output_tokens_per_s_per_gpu=window.output_tokens / window.seconds / gpus,
        cached_tokens=cached,
        cached_share=cached / inputs,
        preemptions=sum(pool.preemptions for pool in served.pools),
        pools=tuple(_use(service, served, at, duration) for at in range(len(service.pools))),
        transfer_s=latency(moved) if moved.size else None,
        goodput=_goodput(service.serving.limits, ttft, tpot, later, served, window),
        cost=cost,
        drains=drains,
        highest_stable_per_s=None if drains else stable,
        timeline=_moments(service, served),
        imbalance=_imbalance(service, served, window, step),
        decode_step=None if step is None else step_basis(*step),
        warnings=tuple(dict.fromkeys([*requests.notes, *notes, *_taken(service)])),
        seed=scenario.seed,
        version=__version__,
    )


def _taken(service: Service) -> list[str]:
    return [note for one in service.deployments for note in notes_of(one)]


def _words(one: Deployment) -> str:
    pool = one.pool
    degrees = [f"{name}{value}" for name, value in (("TP", pool.tp), ("DP", pool.dp), ("PP", pool.pp), ("EP",
    pool.ep)) if value > 1]  # fmt: skip
    role = "" if one.role == "both" else f"{one.role}: "
    return f"{role}{pool.replicas} x {' '.join(degrees) or '1 GPU'} on {one.cluster.accelerator.name}"


def _offered_per_s(service: Service, served: Served) -> float | None:
    """Mean arrivals a second of an open loop."""
    span = int(served.arrival_ns[-1])
    if service.concurrency is not None:
        return None
    if not span:
        return service.serving.load.rate_per_s  # so high that all come at one moment
    return (len(served.arrival_ns) - 1) * NS_PER_S / span


def _queue_is_left(served: Served) -> bool:
    """Whether more than 1 % of the requests waited when the last one came: perhaps the load never drains."""
    last = int(served.arrival_ns[-1])
    waiting = int((served.scheduled_ns > last).sum())
    waiting = max(waiting, *(row[2] for row in served.counts if 0 <= last - row[0] < last // 20), 0)
    return waiting > 0.01 * len(served.arrival_ns)


def _use(service: Service, served: Served, at: int, duration: float) -> PoolUse:
    one, log, policy = service.deployments[at], served.pools[at], service.pools[at].policy
    return PoolUse(
        role=one.role,
        gpus=one.pool.gpus * one.pool.replicas,
        replicas=one.pool.replicas,
        utilisation=log.busy_ns / NS_PER_S / one.pool.replicas / duration,
        steps=log.steps,
        preemptions=log.preemptions,
        cached_tokens=log.cached_tokens,
        cache_tokens=None if policy.kv_blocks is None else policy.kv_blocks * policy.block_tokens,
        peak_cache=None if policy.kv_blocks is None else log.peak_blocks / policy.kv_blocks,
    )


def _goodput(
    limits: ServingLimits,
    ttft: FloatArray,
    tpot: FloatArray,
    later: BoolArray,
    served: Served,
    window: Window,
) -> Goodput | None:
    every = np.zeros(len(ttft))
    every[later] = tpot
    values = {
        "ttft_s": ttft,
        "tpot_s": every,
        "end_to_end_s": (served.last_token_ns - served.arrival_ns) / NS_PER_S,
    }
    stated = {name: limit for name in values if (limit := getattr(limits, name)) is not None}
    if not stated:
        return None
    kept = np.ones(len(ttft), dtype=bool)
    for name, limit in stated.items():
        kept &= values[name] <= limit
    nearest = {name: float(np.percentile(values[name], limits.percentile)) or None for name in stated}
    return Goodput(
        limits=limits,
        share=float(kept.mean()),
        requests_per_s=float(kept[ended_within(served, window)].sum()) / window.seconds,
        met=bool(kept.mean() * 100 >= limits.percentile),
        nearest=ServingLimits(percentile=limits.percentile, **nearest),
    )


def _moments(service: Service, served: Served) -> tuple[Moment, ...]:
    every = -(-len(served.counts) // MOMENTS) or 1
    return tuple(
        Moment(
            time_s=count.time_ns / NS_PER_S, running=count.running, waiting=count.waiting,
            fullest_rank=count.fullest, fullest_over_mean=_uneven(service, count),
        )
        for count in served.counts[::every]
    )  # fmt: skip


def _uneven(service: Service, count: Count) -> float | None:
    """Sequences of the fullest rank over the mean rank of the pool that decodes."""
    ranks = service.pools[0].replicas * service.pools[0].ranks
    return count.fullest * ranks / count.decoding if count.decoding else None


def _typical(service: Service, served: Served) -> tuple[StepModel, Served] | None:
    """The step model of the typical decode step: with drift, that of its longest period."""
    times = service.pools[0].times
    if isinstance(times, Drifting):
        ends = [*times.begins_ns[1:], int(served.last_token_ns.max())]
        spans = [min(end, ends[-1]) - begin for begin, end in zip(times.begins_ns, ends, strict=True)]
        times = times.models[spans.index(max(spans))]
    return (times, served) if isinstance(times, StepModel) else None


def _imbalance(
    service: Service, served: Served, window: Window, step: tuple[StepModel, Served] | None
) -> Imbalance | None:
    pool, one = service.pools[0], service.deployments[0]
    ranks, times = pool.replicas * pool.ranks, pool.times
    inside = [c for c in served.counts if window.start_s <= c.time_ns / NS_PER_S <= window.end_s]
    uneven = [ratio for ratio in (_uneven(service, count) for count in inside) if ratio is not None]
    mean = float(np.mean(uneven)) if uneven and ranks > 1 else None
    fuller, experts = None, []
    if step is not None:
        typical = typical_step(*step)
        batch = typical.batch
        if mean is not None:
            more = min(round(batch.decodes * mean), one.pool.max_num_seqs)
            full = StepBatch(more, batch.context // batch.decodes * more, 0, 0, 0)
            fuller = step[0].cost([full, *[batch] * (one.pool.dp - 1)]).seconds
        if one.pool.ep > 1:
            periods = times.periods if isinstance(times, Drifting) else [(0, step[0])]
            experts = [_balance(at, model, batch) for at, model in periods if isinstance(model, StepModel)]
    if mean is None and not experts:
        return None
    return Imbalance(
        ranks=ranks,
        fullest_over_mean=mean,
        fullest_over_mean_p90=float(np.percentile(uneven, 90)) if mean is not None else None,
        fullest_rank_step_s=fuller,
        experts=tuple(experts),
    )


def _balance(begin_ns: int, model: StepModel, batch: StepBatch) -> ExpertBalance:
    one = model.deployment
    rows = batch.decodes * (1 + one.pool.draft_tokens) * one.pool.dp
    return ExpertBalance(
        from_s=begin_ns / NS_PER_S,
        expert_load_cv=one.expert_load_cv,
        fullest_over_mean=one.fullest(rows)[0],
        decode_step_s=model.cost([batch] * one.pool.dp).seconds,
    )


def _cost(service: Service, window: Window) -> tuple[ServingCost, list[str]]:
    """Money and board energy of a window, and what is not known."""
    duration, inputs, outputs = window.seconds, window.input_tokens, window.output_tokens
    scenario, cluster = service.scenario, service.deployments[0].cluster
    gpus = [one.pool.gpus * one.pool.replicas for one in service.deployments]
    usd, watts, notes = None, None, []
    rent = cluster.price_per_gpu_hour
    try:
        if scenario.run.price is not None:
            bill = rates(cluster, scenario.run.price, 0)
            usd = None if bill.usd_per_hour is None else sum(bill.usd_per_hour.values()) / bill.gpus
        elif rent is not None:
            usd = rent.value
    except InputError as problem:
        notes.append(f"no price: {problem}")
    try:
        watts = cluster.accelerator.tdp_w
    except InputError as problem:
        notes.append(f"no energy: {problem}")
    on_inputs, on_outputs, everything = gpus[-1] * duration, gpus[0] * duration, sum(gpus) * duration

    def each(rate: float | None, gpu_seconds: float, tokens: float) -> float | None:
        return None if rate is None else rate * gpu_seconds / tokens

    million = None if usd is None else usd / 3600 * 1e6
    cost = ServingCost(
        usd_per_gpu_hour=usd,
        usd_per_million_input_tokens=each(million, on_inputs, inputs),
        usd_per_million_output_tokens=each(million, on_outputs, outputs),
        usd_per_million_tokens=each(million, everything, inputs + outputs),
        board_watts=watts,
        joules_per_input_token=each(watts, on_inputs, inputs),
        joules_per_output_token=each(watts, on_outputs, outputs),
        joules_per_token=each(watts, everything, inputs + outputs),
    )
    return cost, notes


# -- sweeps ----------------------------------------------------------------------------------------------
# The points, workers and stores of `studies.sweep`, with `serve` at every point.

HEADS = {
    "gpus": "GPUs",
    "requests_per_s": "requests/s",
    "ttft_s_p50": "TTFT P50 (s)",
    "ttft_s_p90": "TTFT P90 (s)",
    "tpot_request_s_p50": "TPOT P50 (s)",
    "tpot_request_s_p90": "TPOT P90 (s)",
    "output_tokens_per_s_per_gpu": "out tok/s/GPU",
    "goodput_per_s": "goodput/s",
    "usd_per_million_output_tokens": "$/M output",
}
"""Figures that a printed sweep shows, with their heads."""


class ServingSweep(Sweep):
    """A finished sweep of served loads, in the order of its design."""

    def __str__(self) -> str:
        """The number of points by status, their main figures, and reasons of refusals."""
        by_status = Counter(point.status for point in self.points)
        counted = ", ".join(f"{number:,} {status}" for status, number in by_status.items())
        lines = [f"sweep of {self.scenario}: {count(len(self.points), 'point')} ({counted})"]
        lines += self.inputs.lines(plan=False)
        keys = list(dict.fromkeys(key for point in self.points for key in point.values))
        rows = [[*keys, "status", *HEADS.values()], *(self.cells(point, keys) for point in self.points)]
        lines += table_lines(rows, MOST_PRINTED)
        lines += [f"  {number:,} {status}: {why}" for (status, why), number in self.reasons()[:MOST_PRINTED]]
        return "\n".join(lines)

    @staticmethod
    def cells(point: SweepPoint, keys: list[str]) -> list[str]:
        """A point as a row of the table."""
        figures = [cell(point.figures.get(name)) for name in HEADS]
        return [*(str(point.values.get(key, "")) for key in keys), point.status, *figures]


def served(scenario: Scenario) -> PointOutcome:
    """Serve the load of one point; what cannot be served becomes an outcome with the reason."""
    try:
        result = serve(scenario)
    except InfeasibleError as error:
        return PointOutcome("infeasible", str(error), {}, "")
    except InputError as error:
        return PointOutcome("illegal", str(error), {}, "")
    except Exception as error:
        return PointOutcome("failed", f"{type(error).__name__}: {error}", {}, "")
    row = result.rows()[0]
    figures = {name: value for name, value in row.items() if value is None or isinstance(value, int | float)}
    if not result.drains:
        return PointOutcome("infeasible", "the load never drains", figures, result.model_dump_json())
    return PointOutcome("ok", "", figures, result.model_dump_json())


def serve_sweep(
    scenario: AnyScenario,
    space: Space,
    *overrides: str,
    design: str = "grid",
    count: int | None = None,
    seed: int = 0,
    workers: int | None = None,
    store: str | Path | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> ServingSweep:
    """Serve the load of `scenario` at every point of a space; arguments as those of `moesim.sweep`.

    Raises InputError for a malformed space or store, and for a key that no scenario has.
    """
    options: dict[str, Any] = {"design": design, "count": count, "seed": seed, "workers": workers}
    found = sweep(scenario, space, *overrides, **options, store=store, measure=served, progress=progress)
    return ServingSweep.model_construct(**dict(found))
