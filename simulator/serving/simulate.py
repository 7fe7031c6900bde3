"""Serves the load of a scenario: pools and requests into events, and what became of them into a result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import ceil

import numpy as np

from moesim.hwmodels.arrays import BoolArray, FloatArray
from moesim.hwmodels.errors import InputError
from moesim.simulator.common.processes import default_workers
from moesim.simulator.run.report import rates
from moesim.simulator.scenario import AnyScenario, Scenario, load_scenario
from moesim.simulator.scenario.inputs import inputs_of
from moesim.simulator.scenario.serving import Serving, ServingLimits
from moesim.simulator.serving.deployment import Deployment, deployments, notes_of
from moesim.simulator.serving.exchange import Fabric, cache_transfer
from moesim.simulator.serving.operators import cache_bytes_per_token
from moesim.simulator.serving.replicas import (
    PaceModel,
    PromptChunk,
    ReplicaPool,
    Served,
    StepPace,
    serve_requests,
)
from moesim.simulator.serving.requests import NS_PER_S, Requests, load_requests
from moesim.simulator.serving.results import (
    Goodput,
    Moment,
    PoolUse,
    ServingCost,
    ServingResult,
    Window,
    ended_within,
    latency,
    window_of,
)
from moesim.simulator.serving.scheduler import StepBatch
from moesim.simulator.serving.step import StepModel
from moesim.simulator.serving.typical import step_basis
from moesim.version import __version__

Times = Callable[[Deployment], PaceModel]
"""Gives the step times of a pool; tests and studies may give others than the step model's."""

MOMENTS = 200
"""Most moments of a result's time line."""
FIRST_INTERVAL_NS = 1_000_000
MANY = 100_000
"""Requests from which replicas that have nothing in common run in several processes."""
MOST_PLACES = 10_000
"""Most sequences that run at once where the highest stable rate is looked for."""


@dataclass(frozen=True)
class Service:
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
        self, requests: Requests | None = None, watch: Callable[[PromptChunk], None] | None = None
    ) -> Served:
        """Serve the load, or another one; `watch` is told every chunk of a prompt."""
        load = self.requests if requests is None else requests
        span = int(load.arrival_ns[-1])
        return serve_requests(
            load,
            self.pools[0],
            prefill=self.pools[1] if len(self.pools) > 1 else None,
            transfer_ns=self._transfer_ns,
            route=self.serving.router,
            sample_ns=max(span // MOMENTS, FIRST_INTERVAL_NS),
            most_samples=2 * MOMENTS,
            concurrency=self.concurrency if requests is None else None,
            front_ns=self._front_ns if self.serving.load.tokeniser_s_per_token else None,
            workers=default_workers() if len(load) >= MANY else 1,
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
    longest = int((requests.input_tokens + requests.output_tokens).max())
    for one in found:
        one.check_context(longest)
    pools = tuple(
        ReplicaPool(
            one.pool.replicas,
            one.policy,
            times(one),
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
) -> ServingResult:
    """Serve a load on the replicas of a scenario's `serving` section, request by request.

    `scenario` and overrides: as for `moesim.load`. `requests`: instead of the scenario's load. `times`: step
    times of a pool instead of the step model's. Raises InputError for what cannot be served as stated,
    InfeasibleError where weights or requests do not fit.
    """
    service = prepare(load_scenario(scenario, overrides), requests, times)
    return result_of(service, service.run())


class Stretched:
    """Step times at an end of the step model's 80 % interval, all steps of a run alike."""

    def __init__(self, deployment: Deployment, high: bool) -> None:
        """`high`: the slow end."""
        self._model, self._high = StepModel(deployment), high
        self._ratios: dict[tuple[bool, int], float] = {}

    def pace(self, now_ns: int, ranks: Sequence[StepBatch]) -> StepPace:
        """The model's pace, times the ratio of a batch of about that size."""
        pace, most = self._model.pace(now_ns, ranks), max(rank.decodes for rank in ranks)
        key = any(rank.prefill_tokens for rank in ranks), most.bit_length()
        if (ratio := self._ratios.get(key)) is None:
            cost = self._model.cost(ranks)
            ratio = self._ratios[key] = (cost.high if self._high else cost.low) / cost.seconds
        return StepPace(pace.first_ns * ratio, pace.growth_ns * ratio, pace.steps)


def serve_ends(scenario: AnyScenario, *overrides: str) -> tuple[ServingResult, ServingResult]:
    """Serve a load with all steps at the fast, and at the slow end of their 80 % interval.

    Raises as `serve` does.
    """
    loaded = load_scenario(scenario, overrides)
    fast, slow = (serve(loaded, times=partial(Stretched, high=high)) for high in (False, True))
    return fast, slow


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
    times = service.pools[0].times
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
        timeline=_moments(served),
        decode_step=step_basis(times, served) if isinstance(times, StepModel) and tpot.size else None,
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
    if service.concurrency is not None or not span:
        return None
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


def _moments(served: Served) -> tuple[Moment, ...]:
    every = -(-len(served.counts) // MOMENTS) or 1
    return tuple(
        Moment(time_s=time / NS_PER_S, running=running, waiting=waiting)
        for time, running, waiting in served.counts[::every]
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
