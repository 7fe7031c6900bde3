"""Plans served request by request, with more or fewer replicas until the limits are just met (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import Any

import numpy as np

from moesim.simulator.scenario import Scenario
from moesim.simulator.scenario.serving import ServingPool
from moesim.simulator.serving.candidates import BY_LIMIT, FORMATS, Option
from moesim.simulator.serving.closed_form import LoadMoments
from moesim.simulator.serving.requests import NS_PER_S
from moesim.simulator.serving.results import window_of
from moesim.simulator.serving.simulate import prepare

RESIDENCES, MOST_REQUESTS, LEAST_REQUESTS = 5, 20_000, 500
"""The simulated load lasts so many times as long as a request stays, within these numbers of requests."""
MOST_TRIES = 8
"""Most simulations of one family of plans, each with other numbers of replicas."""


@dataclass(frozen=True)
class ServedFamily:
    """A plan to serve with more or fewer replicas; `counts`: of the decoding pool, then of prompts."""

    scenario: Scenario
    changes: dict[str, Any]
    prompts: dict[str, Any] | None
    counts: tuple[int, ...]
    gpus: tuple[int, ...]
    most: int

    def changed(self, counts: tuple[int, ...]) -> dict[str, Any]:
        """Keys of the scenario with these numbers of replicas."""
        prefill = None if self.prompts is None else {**self.prompts, "replicas": counts[1]}
        return {**self.changes, "serving.replicas": counts[0], "serving.prefill": prefill}

    def size(self, counts: tuple[int, ...]) -> int:
        """GPUs of all replicas."""
        return sum(n * gpus for n, gpus in zip(counts, self.gpus, strict=True))


@dataclass(frozen=True)
class Tried:
    """What the events said of a family with these numbers of replicas; times at the percentile."""

    counts: tuple[int, ...]
    met: bool
    slow_tokens: bool
    share: float | None
    ttft_s: float
    tpot_s: float
    output_tokens_per_s: float


def family_of(
    scenario: Scenario, option: Option, varied: Sequence[str], load: LoadMoments, most: int
) -> ServedFamily:
    """A plan of the closed form to serve, with as many requests as make a steady state."""
    serving = option.decode.deployment.serving
    pool = option.decode.deployment.pool
    pool_keys = tuple(
        dict.fromkeys(("tp", "dp", "pp", "ep", *BY_LIMIT, *(k for k in varied if k not in FORMATS)))
    )
    changes = {f"serving.{key}": getattr(pool, key) for key in pool_keys}
    changes |= {f"serving.{key}": getattr(serving, key) for key in FORMATS if key in varied}
    stated = scenario.serving.load if scenario.serving else None
    if stated is not None and stated.log is None:
        stay = load.outputs * option.tpot_s + option.ttft_s
        wanted = ceil(RESIDENCES * stay * load.rate_per_s / 500) * 500
        changes["serving.load.requests"] = max(
            stated.requests or 0, min(max(wanted, LEAST_REQUESTS), MOST_REQUESTS)
        )
    prompts = None
    if option.prefill is not None:
        other = option.prefill.deployment.pool
        prompts = {
            k: v for k, v in other.model_dump(include=set(ServingPool.model_fields)).items() if v is not None
        }
    counts = (option.replicas, *((option.prefill_replicas,) if option.prefill else ()))
    gpus = (option.decode.gpus, *((option.prefill.gpus,) if option.prefill else ()))
    return ServedFamily(scenario, changes, prompts, counts, gpus, most)


def _served(family: ServedFamily, counts: tuple[int, ...]) -> Tried:
    """Serve the load with these numbers of replicas."""
    service = prepare(family.scenario.replace(**family.changed(counts)))
    served, limits = service.run(), service.serving.limits
    outputs = served.requests.output_tokens
    ttft = (served.first_token_ns - served.arrival_ns) / NS_PER_S
    later = outputs > 1
    tpot = np.zeros(len(ttft))
    tpot[later] = (served.last_token_ns - served.first_token_ns)[later] / NS_PER_S / (outputs[later] - 1)
    whole = (served.last_token_ns - served.arrival_ns) / NS_PER_S
    kept = np.ones(len(ttft), dtype=bool)
    for values, limit in ((ttft, limits.ttft_s), (tpot, limits.tpot_s), (whole, limits.end_to_end_s)):
        kept &= values <= (inf if limit is None else limit)
    stated = any((limits.ttft_s, limits.tpot_s, limits.end_to_end_s))
    window = window_of(served)
    slow = float(np.percentile(tpot, limits.percentile))
    return Tried(
        counts,
        bool(kept.mean() >= limits.percentile / 100),
        limits.tpot_s is not None and slow > limits.tpot_s,
        float(kept.mean()) if stated else None,
        float(np.percentile(ttft, limits.percentile)),
        slow,
        window.output_tokens / window.seconds,
    )


def settle(family: ServedFamily) -> list[Tried]:
    """All that was tried: more replicas until the limits are met, then fewer while they are."""
    tried: list[Tried] = [_served(family, family.counts)]

    def other(counts: tuple[int, ...]) -> Tried | None:
        known = any(one.counts == counts for one in tried)
        if known or len(tried) >= MOST_TRIES or family.size(counts) > family.most or min(counts) < 1:
            return None
        tried.append(_served(family, counts))
        return tried[-1]

    now = tried[0]
    while not now.met:
        pool = 0 if len(now.counts) == 1 or now.slow_tokens else 1
        step = max(1, now.counts[pool] * len(tried) // 10)
        more = other(_with(now.counts, pool, step))
        if more is None:
            return tried
        now = more
    for pool in range(len(now.counts)):
        step = max(1, now.counts[pool] // 10)
        while (less := other(_with(now.counts, pool, -step))) is not None:
            if less.met:
                now = less
            elif step == 1:
                break
            else:
                step = max(1, step // 2)
    return tried


def _with(counts: tuple[int, ...], pool: int, more: int) -> tuple[int, ...]:
    return tuple(n + more if place == pool else n for place, n in enumerate(counts))
