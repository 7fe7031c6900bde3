"""A served load in closed form, for arrays of candidates: steps and queues in the steady state (pure).

A rank of data-parallel attention holds b sequences that decode. By Little's law its rate is b / (O x token
time), O output tokens a request; each token brings b x F / O prompt tokens, F fresh ones a request, which
lengthen the steps of the whole replica. Queues are M/G/c (Sakasegawa 1977), percentiles those of a gamma
distribution with the same mean and variance (Wilson and Hilferty 1931). The request simulator is the
reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log, sqrt
from statistics import NormalDist
from typing import Literal

import numpy as np
from msgspec import Struct

from moesim.hwmodels.arrays import BoolArray, FloatArray
from moesim.simulator.cost.layer_collectives import expected_maximum
from moesim.simulator.scenario.serving import ServingLimits
from moesim.simulator.serving.deployment import Deployment
from moesim.simulator.serving.operators import cache_bytes_per_token
from moesim.simulator.serving.requests import NS_PER_S, Requests
from moesim.simulator.serving.scheduler import IDLE, StepBatch
from moesim.simulator.serving.step import StepModel

Level = Literal[0, 1, 2]
"""Step times as predicted, at the best and at the worst end of their 80 % interval."""

POINTS = 48
"""Numbers of decoding sequences at which a candidate's steady state is computed, in a geometric grid."""

BUSIEST = 0.95
"""Most prompt tokens of the steps, as a share of what they may have: above it queues grow without end."""


class LoadMoments(Struct, frozen=True):
    """What the closed form knows of a load; tokens a request, rate in requests a second over all replicas.

    `fresh`: prompt tokens that an unlimited prefix cache does not hold. `context`: keys that a decoding
    sequence sees, mean over steps. `pairs`: keys that a fresh prompt token sees, mean. `spread`: squared
    coefficient of variation of the fresh tokens. `longest`: most tokens of a request.
    """

    rate_per_s: float
    inputs: float
    fresh: float
    outputs: float
    context: float
    pairs: float
    spread: float
    uneven: float
    """Mean of the output tokens times the mean of their inverse: 1 where all are equal."""
    longest: int


def moments(requests: Requests, rate_per_s: float | None, prefix_caching: bool) -> LoadMoments:
    """Moments of a load; `rate_per_s` None takes the log's own mean rate.

    A log with one moment of arrival for all requests has no rate; it counts as one request a second.
    """
    inputs, outputs = requests.input_tokens.astype(float), requests.output_tokens.astype(float)
    span = float(requests.arrival_ns[-1]) / NS_PER_S
    rate = rate_per_s or (len(requests) / span if span > 0 else 1.0)
    hit = 0.0
    if prefix_caching and len(requests.blocks):
        hit = 1.0 - len(np.unique(requests.blocks)) / len(requests.blocks)
    fresh = inputs * (1.0 - hit) * (1.0 - requests.cached_share)
    return LoadMoments(
        rate_per_s=rate,
        inputs=float(inputs.mean()),
        fresh=float(fresh.mean()),
        outputs=float(outputs.mean()),
        context=float((outputs * (inputs + outputs / 2)).sum() / outputs.sum()),
        pairs=float((fresh * (inputs - fresh / 2)).sum() / fresh.sum()),
        spread=float(fresh.var() / fresh.mean() ** 2),
        uneven=float(outputs.mean() * (1.0 / outputs).mean()),
        longest=int((requests.input_tokens + requests.output_tokens).max()),
    )


# -- steps of a kind of replica ----------------------------------------------------------------------


PLACES, SHARES = np.array([-sqrt(3.0), 0.0, sqrt(3.0)]), np.array([1.0, 4.0, 1.0]) / 6.0
"""Standard deviations of a normal number that stand for all, and their shares (Gauss-Hermite)."""


class StepTable(Struct, frozen=True):
    """Step times of one kind of replica, in s; the first axis of arrays is the level.

    `batches`: decoding sequences a rank at which `decode` holds a step. `one`, `every` [level, 2]: what
    `chunk` prompt tokens on one rank, or on every rank, add to it, at the fewest and at the most sequences;
    `full` what the most prompt tokens of a step on every rank add. They are means over log-normal
    lengths at `PLACES`: host time is a floor of short prompts, so that the mean prompt is quicker than the
    mean of prompts. `prompt`: the seconds of a prompt at these places over their mean.
    """

    batches: tuple[int, ...]
    decode: FloatArray
    chunk: float
    one: FloatArray
    every: FloatArray
    full: FloatArray
    prompt: FloatArray

    @property
    def varied(self) -> float:
        """Squared coefficient of variation of a prompt's seconds."""
        return float(SHARES @ (self.prompt - 1.0) ** 2)


def step_tables(options: Sequence[Deployment], load: LoadMoments) -> list[StepTable]:
    """Price the steps of one kind of replica, in one role, under each of several limits of its scheduler."""
    if not options:
        return []
    model, role = StepModel(options[0]), options[0].role
    most = max(one.pool.max_num_seqs for one in options)
    batches = (0,) if role == "prefill" else (*(4**n for n in range(6) if 4**n < most), most)
    dp = options[0].pool.dp
    decode = np.stack([_step(model, [_decoding(count, load)] * dp) for count in batches], axis=1)
    nothing = np.zeros((3, 2))
    tables = {}
    for budget in dict.fromkeys(one.pool.max_num_batched_tokens for one in options):
        chunk = min(load.fresh, float(budget))
        one, every, full, prompt = nothing, nothing, nothing, np.ones(3)
        if role != "decode":
            beside = [(_decoding(batches[n], load), decode[:, n]) for n in (0, -1)]
            if role == "prefill" or not options[0].engine.mixed:
                beside = [(IDLE, np.zeros(3))]
            # A chunk as long as the budget is one of several of a prompt, and varies no more.
            wide = sqrt(log(1.0 + load.spread)) if chunk < budget else 0.0
            lengths = np.clip(chunk * np.exp(wide * PLACES - 0.5 * wide**2), 1.0, budget)
            alone, together = (
                np.stack([_added(model, load, tokens, 1, beside, ranks) for tokens in lengths])
                for ranks in (1, dp)
            )
            one, every = (np.tensordot(SHARES, some, 1) for some in (alone, together))
            prompt = alone[:, 0, 0] / max(one[0, 0], 1e-12) if wide else _several(load)
            full = (
                every if chunk >= budget else _added(model, load, float(budget), budget / chunk, beside, dp)
            )
        tables[budget] = StepTable(batches, decode, chunk, one, every, full, prompt)
    return [tables[one.pool.max_num_batched_tokens] for one in options]


def _several(load: LoadMoments) -> FloatArray:
    """Prompts of several steps at `PLACES` over their mean: as their lengths."""
    wide = sqrt(log(1.0 + load.spread))
    lengths: FloatArray = np.exp(wide * PLACES - 0.5 * wide**2)
    return lengths


def _added(
    model: StepModel,
    load: LoadMoments,
    tokens: float,
    prompts: float,
    beside: Sequence[tuple[StepBatch, FloatArray]],
    ranks: int,
) -> FloatArray:
    """What prompt tokens on so many ranks add to steps of other work [level, work (2)]."""
    dp, n = model.deployment.pool.dp, max(round(tokens), 1)
    added = []
    for work, seconds in beside:
        prompt = work._replace(
            prefills=max(round(prompts), 1), prefill_tokens=n, prefill_pairs=round(n * load.pairs)
        )
        added.append(_step(model, [*[prompt] * ranks, *[work] * (dp - ranks)]) - seconds)
    return np.stack(added if len(added) == 2 else added * 2, axis=1)


def _step(model: StepModel, ranks: Sequence[StepBatch]) -> FloatArray:
    if not any(rank.decodes or rank.prefill_tokens for rank in ranks):
        return np.zeros(3)
    cost = model.cost(ranks)
    return np.array([cost.seconds, cost.low, cost.high])


def _decoding(count: int, load: LoadMoments) -> StepBatch:
    return StepBatch(count, round(count * load.context), 0, 0, 0)


# -- steady states -----------------------------------------------------------------------------------


class Candidate(Struct, frozen=True):
    """A kind of replica with its limits; `most`: sequences of a rank, by max_num_seqs and cache."""

    deployment: Deployment
    table: StepTable
    most: float
    memory_bound: bool

    @property
    def gpus(self) -> int:
        """GPUs of one replica."""
        return self.deployment.pool.gpus


def candidate(deployment: Deployment, table: StepTable, load: LoadMoments) -> Candidate:
    """A candidate with the sequences that fit its cache; raises InfeasibleError where none do."""
    kept = load.inputs + load.outputs if getattr(deployment.policy, "reserve_new", 0.0) else load.context
    held, most = deployment.cache_tokens / max(kept, 1.0), float(deployment.pool.max_num_seqs)
    return Candidate(deployment, table, min(held, most), held < most)


class Steady(Struct, frozen=True):
    """Steady states, one entry a candidate; times are inf where the replicas do not take the load.

    `sequences`: decoding, mean a rank. `tpot_s`, `ttft_s`: at the percentile of the limits. `why`: place in
    WHY of what is not met, 0 where all is.
    """

    sequences: FloatArray
    tpot_s: FloatArray
    ttft_s: FloatArray
    why: FloatArray


WHY = ("", "memory", "max_num_seqs", "prompts", "TPOT", "TTFT")
"""What a candidate does not meet with fewer replicas."""


class DecodingPool:
    """Replicas that decode, and work on prompts beside it unless another pool does (eq. Q12)."""

    def __init__(
        self, candidates: Sequence[Candidate], load: LoadMoments, limits: ServingLimits, level: Level = 0
    ) -> None:
        """Prepare the grid of each candidate; `level`: which end of the step times."""
        self.load, self.limits, self._z = load, limits, _z(limits)
        pools = [one.deployment.pool for one in candidates]
        self.ranks = np.array([float(pool.dp) for pool in pools])
        self.gpus = np.array([float(one.gpus) for one in candidates])
        self._prompts = np.array([one.deployment.role == "both" for one in candidates])
        self._memory = np.array([one.memory_bound for one in candidates])
        self._budget = np.array([float(pool.max_num_batched_tokens) for pool in pools])[:, None]
        self._chunk = np.array([one.table.chunk for one in candidates])[:, None]
        self._transfer = np.array([transfer_s(one.deployment, load) for one in candidates])
        self.most = np.array([max(one.most, 0.05) for one in candidates])
        self.b = 0.02 * (self.most[:, None] / 0.02) ** np.linspace(0.0, 1.0, POINTS)
        decode = [
            np.interp(b, one.table.batches, one.table.decode[level])
            for b, one in zip(self.b, candidates, strict=True)
        ]
        self._ahead = _ahead(candidates)
        self._varied = np.array([one.table.varied for one in candidates])
        self._own = np.array([np.interp(self._z, PLACES, one.table.prompt) for one in candidates])
        self._gain = np.array([one.deployment.tokens_per_step for one in candidates])[:, None]
        self.extra, self.step = self._with_prompts(candidates, np.stack(decode), level)
        self.token, self.extra = (np.stack(decode) + self.extra) / self._gain, self.extra / self._gain
        self.rate = np.maximum.accumulate(self.b / (load.outputs * self.token), axis=1)

    def _with_prompts(
        self, candidates: Sequence[Candidate], decode: FloatArray, level: Level
    ) -> tuple[FloatArray, FloatArray]:
        """Seconds that prompts add to a step on average, and a step with a prompt in it."""
        ends = np.array(
            [[one.table.one[level], one.table.every[level], one.table.full[level]] for one in candidates]
        )
        last = np.array([max(one.table.batches[-1], 2.0) for one in candidates])[:, None]
        share = np.clip((self.b - 1.0) / (last - 1.0), 0.0, 1.0)
        one, every, full = (ends[:, n, :1] * (1 - share) + ends[:, n, 1:] * share for n in range(3))
        d = self.ranks[:, None]
        more = (every - one) / np.maximum(d - 1, 1)
        fresh = self._gain * self.load.fresh / self.load.outputs * self._prompts[:, None]
        self.busy = self.b * fresh / self._budget
        tokens = self.busy * self._budget
        prompting = np.minimum(tokens / self._chunk, 1.0)
        some = 1.0 - (1.0 - prompting) ** d
        several = np.clip((tokens - self._chunk) / np.maximum(self._budget - self._chunk, 1.0), 0.0, None)
        extra = some * (one - more) + d * prompting * more + several * (full - every)
        added = one + (d - 1) * prompting * more
        self.full_step = decode + added * full / np.maximum(every, 1e-12)
        return extra, decode + added

    def at(self, replicas: FloatArray) -> Steady:
        """Steady states with so many replicas of each candidate."""
        servers = np.maximum(replicas, 1.0) * self.ranks
        return self.state(self.load.rate_per_s / servers, servers)

    def state(self, want: FloatArray, servers: FloatArray) -> Steady:
        """Steady states where each of `servers` ranks gets `want` requests a second."""
        load = self.load
        b = _read(self.rate, self.b, want)
        token, extra, step, busy = (
            _read(self.b, grid, b) for grid in (self.token, self.extra, self.step, self.busy)
        )
        full_step = _read(self.b, self.full_step, b)
        # Over its life a request sees two thirds of the variance of a Poisson number, shared by all ranks.
        crowd = np.minimum(b + self._z * np.sqrt(2 * b / (3 * servers)), self.most)
        crowd = _read(self.b, self.token, crowd) - token
        met = np.maximum(want * self.ranks * load.outputs * token, 1e-9)  # prompts beside it in its life
        varied = (1 + self._varied) * load.uneven / met
        tpot = token + np.copysign(np.hypot(crowd, self._z * extra * np.sqrt(varied)), self._z)
        own = np.maximum(load.fresh / self._chunk[:, 0], 1.0) * step
        whole = load.fresh / self._budget[:, 0] * full_step
        prompts = np.where(self._prompts, _wait(busy, servers, whole, self._varied), 0.0)
        full = b / self.most
        places = _wait(full, servers * self.most, load.outputs * token, 1.0)
        step_s = token * self._gain[:, 0]
        times = [
            (step_s * (0.5 + self._ahead), step_s**2 / 12),
            _queued(prompts, busy),
            _queued(places, full),
        ]
        ttft = _with_own(_percentile(self._z, times), sum(time[0] for time in times), own, self._own)
        # Without prompts a sequence that waits for a place has its first token already.
        tpot = np.where(self._prompts, tpot, tpot + (places + self._transfer) / load.outputs)
        ttft = np.where(self._prompts, ttft, 0.0)
        return self._judged(b, tpot, ttft, want > self.rate[:, -1] * (1 + 1e-9), busy > BUSIEST)

    def _judged(
        self, b: FloatArray, tpot: FloatArray, ttft: FloatArray, full: BoolArray, crowded: BoolArray
    ) -> Steady:
        most_tpot, most_ttft = self.limits.tpot_s or np.inf, self.limits.ttft_s or np.inf
        tpot, ttft = (np.where(full | crowded, np.inf, values) for values in (tpot, ttft))
        why = [full & self._memory, full, crowded, tpot > most_tpot, ttft > most_ttft]
        return Steady(b, tpot, ttft, np.select(why, [1.0, 2.0, 3.0, 4.0, 5.0], 0.0))


class PromptPool:
    """Replicas that only work on prompts; `level` of the step times."""

    def __init__(
        self, candidates: Sequence[Candidate], load: LoadMoments, limits: ServingLimits, level: Level = 0
    ) -> None:
        """Prepare the grid of each candidate; `level`: which end of the step times."""
        self.load, self.limits, self._z = load, limits, _z(limits)
        self.ranks = np.array([float(one.deployment.pool.dp) for one in candidates])
        self.gpus = np.array([float(one.gpus) for one in candidates])
        self._one = np.array([one.table.one[level, 0] for one in candidates])
        every = np.array([one.table.every[level, 0] for one in candidates])
        full = np.array([one.table.full[level, 0] for one in candidates])
        self._ahead = _ahead(candidates)
        self._varied = np.array([one.table.varied for one in candidates])
        self._prompt = [one.table.prompt for one in candidates]
        self._own = np.array([np.interp(self._z, PLACES, one.table.prompt) for one in candidates])
        self._more, self._wide = (every - self._one) / np.maximum(self.ranks - 1, 1), full / every
        chunk = np.array([one.table.chunk for one in candidates])
        budget = np.array([float(one.deployment.pool.max_num_batched_tokens) for one in candidates])
        self._steps, self._full = np.maximum(load.fresh / chunk, 1.0), load.fresh / budget
        self.most_rate = 1.0 / (self._full * full)
        """Requests a second of a rank whose steps are all full of prompts."""

    def at(self, replicas: FloatArray) -> Steady:
        """Steady states with so many replicas of each candidate; no TPOT."""
        servers = np.maximum(replicas, 1.0) * self.ranks
        return self.state(self.load.rate_per_s / servers, servers)

    def state(self, want: FloatArray, servers: FloatArray) -> Steady:
        """Steady states where each of `servers` ranks gets `want` requests a second."""
        want = want * self._full * self._wide  # full steps a second on each rank
        rest = 1.0 - want * (self.ranks - 1) * self._more
        busy = np.where(rest > 0, want * self._one / np.maximum(rest, 1e-9), np.inf)
        crowded = busy > BUSIEST
        busy = np.minimum(busy, BUSIEST)
        step = self._one + (self.ranks - 1) * busy * self._more
        wait = _wait(busy, servers, self._full * self._wide * step, self._varied)
        step = step * self._slowest(1 + (self.ranks - 1) * busy)
        own = self._steps * step
        # Rest of the step under way, and the one behind it, which was planned where prompts waited then.
        under_way = 1.0 - (1.0 - busy) ** self.ranks
        rest = step * (0.5 + self._ahead * under_way) * under_way
        waits = _percentile(self._z, [(rest, rest**2 / 3), _queued(wait, busy)])
        ttft = _with_own(waits, rest + wait, own, self._own)
        ttft = np.where(crowded, np.inf, ttft)
        most = self.limits.ttft_s or np.inf
        why = np.select([crowded, ttft > most], [3.0, 5.0], 0.0)
        return Steady(busy, np.zeros_like(ttft), ttft, why)

    def _slowest(self, ranks: FloatArray) -> FloatArray:
        """The longest of the prompts of so many ranks, which all wait for it, over the mean of prompts."""
        places = [expected_maximum(n) for n in range(1, int(self.ranks.max()) + 1)]
        at = np.interp(ranks, np.arange(1, len(places) + 1), places)
        more = [np.interp(z, PLACES, kinds) - kinds[1] for z, kinds in zip(at, self._prompt, strict=True)]
        return 1.0 + np.array(more)


def transfer_s(deployment: Deployment, load: LoadMoments) -> float:
    """Seconds of the hand-over of a mean prompt; 0 where one pool does both."""
    if deployment.role == "both":
        return 0.0
    cluster = deployment.cluster
    inside = cluster.accelerator.scale_up_bandwidth
    far = cluster.nodes > 1 or inside is None
    rate = cluster.node.scale_out_effective_bytes_per_s if far or inside is None else inside.value
    token = cache_bytes_per_token(deployment.shape, deployment.split) / deployment.pool.pp
    return load.inputs * token / rate


def fewest(pool: DecodingPool | PromptPool, most_gpus: int) -> FloatArray:
    """Fewest replicas of each candidate that meet all; 0 where `most_gpus` GPUs do not."""
    high = np.floor(most_gpus / pool.gpus)
    met = (high >= 1) & (pool.at(high).why == 0)
    low, top = np.zeros_like(high), high.copy()
    while (open_ := met & (top - low > 1)).any():
        middle = np.floor((low + top) / 2)
        fits = pool.at(middle).why == 0
        top, low = np.where(open_ & fits, middle, top), np.where(open_ & ~fits, middle, low)
    return np.where(met, top, 0.0)


def _ahead(candidates: Sequence[Candidate]) -> FloatArray:
    """Whole steps that a request waits because the next step is planned while one runs."""
    return np.array([float(one.deployment.policy.ahead) for one in candidates])


def _z(limits: ServingLimits) -> float:
    return NormalDist().inv_cdf(limits.percentile / 100)


def _read(at: FloatArray, values: FloatArray, where: FloatArray) -> FloatArray:
    """Row by row, `values` [n, points] where `at` (rising) is `where` [n]; flat beyond the ends."""
    place = np.clip((at < where[:, None]).sum(axis=1), 1, at.shape[1] - 1)[:, None]

    def take(grid: FloatArray, n: int) -> FloatArray:
        taken: FloatArray = np.take_along_axis(grid, place + n, axis=1)[:, 0]
        return taken

    low, high = take(at, -1), take(at, 0)
    share = np.clip((where - low) / np.maximum(high - low, 1e-30), 0.0, 1.0)
    read: FloatArray = take(values, -1) * (1 - share) + take(values, 0) * share
    return read


def _wait(
    busy: FloatArray, servers: FloatArray, service: FloatArray, spread: FloatArray | float
) -> FloatArray:
    """Mean wait of an M/G/c queue (eq. Q13); `spread`: squared variation of the service."""
    busy = np.clip(busy, 0.0, BUSIEST)
    queue = busy ** (np.sqrt(2 * (servers + 1)) - 1) / (servers * (1 - busy))
    wait: FloatArray = (1 + spread) / 2 * service * queue
    return wait


def _queued(mean: FloatArray, busy: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Mean and variance of a wait that is exponential for the share `busy` that waits at all."""
    return mean, mean**2 * (2 / np.clip(busy, 0.05, 1.0) - 1)


def _with_own(waits: FloatArray, mean: FloatArray | int, own: FloatArray, place: FloatArray) -> FloatArray:
    """Percentile of waits and own steps from the waits' own, their mean, and `place` of own steps there."""
    apart, other = waits - mean, own * (place - 1.0)
    total: FloatArray = mean + own + np.copysign(np.hypot(apart, other), apart + other)
    return total


def _percentile(z: float, parts: Sequence[tuple[FloatArray, FloatArray]]) -> FloatArray:
    """The percentile of a sum of times from their means and variances, gamma distributed."""
    mean = sum((part[0] for part in parts), np.zeros(1))
    variance = np.maximum(sum((part[1] for part in parts), np.zeros(1)), 1e-18)
    shape = np.maximum(mean**2 / variance, 0.3)
    value: FloatArray = mean * np.maximum(1 - 1 / (9 * shape) + z / (3 * np.sqrt(shape)), 0.0) ** 3
    return value
