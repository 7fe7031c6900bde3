"""What a sizing gives: plans that were served with as few replicas as meet the limits, and the frontier."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, inf
from typing import Any

import numpy as np
from msgspec import Struct
from pydantic import Field

from moesim.hwmodels.frozen import Documented, Frozen
from moesim.hwmodels.summary_text import count, short, table_lines
from moesim.simulator.common.tables import Row, TableResult
from moesim.simulator.scenario import Scenario
from moesim.simulator.scenario.inputs import Inputs
from moesim.simulator.scenario.serving import ServingLimits, ServingPool
from moesim.simulator.serving.candidates import BY_LIMIT, FORMATS, FrontierPoint, Option
from moesim.simulator.serving.closed_form import LoadMoments
from moesim.simulator.serving.requests import NS_PER_S
from moesim.simulator.serving.results import window_of
from moesim.simulator.serving.simulate import prepare


class FigureRange(Frozen):
    """A figure with the best and worst end of its 80 % interval."""

    value: float
    low: float
    high: float | None
    """Null where the replicas do not take the load if steps take so long."""


class SizedRow(Frozen):
    """A plan: what it is, and what the events said of it; times at the percentile of the limits, in s."""

    plan: str
    accelerator: str
    cluster: str
    mode: str
    gpus: int
    gpus_low: int
    gpus_high: int
    """GPUs that the closed form asks for where steps take the best or the worst of their interval."""
    replicas: int
    prefill_replicas: int | None
    changes: dict[str, Any]
    """Keys of the scenario that make it this plan."""
    usd_per_hour: float | None
    usd_per_million_tokens: float | None
    """Price of all GPUs over input and output tokens together."""
    ttft_s: FigureRange
    tpot_s: FigureRange
    output_tokens_per_s_per_gpu: float
    tokens_per_s_per_user: float
    share_in_limits: float | None
    """Requests that keep all limits; null without limits."""
    limited_by: str
    """What would not be met with a replica less."""
    closed_gpus: int
    """GPUs that the closed form asks for."""
    closed_ttft_s: float
    closed_tpot_s: float
    first_ttft_s: float
    """By the events, with the replicas that the closed form asks for."""
    first_tpot_s: float
    simulations: int
    scenario: Scenario = Field(exclude=True, repr=False)

    def row(self) -> Row:
        """Figures by name, without the scenario."""
        return self.model_dump(mode="json")


class ServingPlan(TableResult, Documented):
    """A finished sizing; any number of workers gives the same bytes. `serve plan --json` prints it."""

    scenario: str
    inputs: Inputs
    objective: str
    rate_per_s: float
    limits: ServingLimits
    considered: int
    """Candidates that were judged in closed form."""
    feasible: int
    """Those that meet the limits by it."""
    kinds: int
    """Kinds of replicas whose steps were priced."""
    simulated: int
    """Plans that were served request by request."""
    plans: tuple[SizedRow, ...]
    """Best first, by the events."""
    frontier: tuple[FrontierPoint, ...]
    pairs: int
    """Pairs of served plans whose objective differs by the events."""
    pairs_in_order: int
    """Those that the closed form orders alike."""
    closed_tpot_error: float | None
    closed_ttft_error: float | None
    """Median relative difference of the closed form from the events, over all simulations."""
    refused: dict[str, int]
    """Candidates that cannot be, by reason."""
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> SizedRow:
        """The best plan."""
        return self.plans[0]

    def rows(self) -> list[Row]:
        """One row a plan."""
        return [plan.row() for plan in self.plans]

    def __str__(self) -> str:
        """What was searched, the plans and the frontier, about thirty lines."""
        lines = [f"serving plan of {self.scenario}, least {self.objective}", *self.inputs.lines(plan=False)]
        lines.append(f"  {limits_text(self.limits)} at {short(self.rate_per_s)} requests/s")
        lines += [f"  {line}" for line in self.counts()]
        lines += table_lines([plan_heads(), *(plan_cells(plan) for plan in self.plans)])
        if self.frontier:
            lines.append("frontier: most tokens/s a GPU for the speed of a user (closed form)")
            lines += table_lines([frontier_heads(), *(frontier_cells(point) for point in self.frontier)])
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])

    def counts(self) -> list[str]:
        """How many candidates there were, and how the closed form agrees with the events, in sentences."""
        lines = [
            f"{self.considered:,} candidates of {count(self.kinds, 'kind')} of replica in closed form, "
            f"{self.feasible:,} meet the limits; {count(self.simulated, 'plan')} served request by request"
        ]
        if self.pairs:
            lines.append(
                f"order: {self.pairs_in_order} of {self.pairs} pairs as in closed form; its TPOT is off by "
                f"{self.closed_tpot_error or 0:.0%}, its TTFT by {self.closed_ttft_error or 0:.0%} (median)"
            )
        lines += [f"no candidates: {number:,}, because {reason}" for reason, number in self.refused.items()]
        return lines


def limits_text(limits: ServingLimits) -> str:
    """Limits in words."""
    stated = [("TTFT", limits.ttft_s), ("TPOT", limits.tpot_s), ("end to end", limits.end_to_end_s)]
    texts = [f"{name} {_ms(value)} ms" for name, value in stated if value is not None]
    return f"{' and '.join(texts)} for {limits.percentile:g} % of requests" if texts else "no limits"


def _ms(seconds: float) -> str:
    """Milliseconds, never rounded to nothing."""
    return f"{1e3 * seconds:,.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.3g}"


def plan_heads() -> tuple[str, ...]:
    """Heads of the table of plans."""
    return (
        "GPUs",
        "of",
        "plan",
        "$/M tokens",
        "TTFT ms",
        "TPOT ms",
        "out tok/s/GPU",
        "limited by",
        "closed form",
    )


def plan_cells(row: SizedRow) -> tuple[str, ...]:
    """A plan as a row of its table; the closed form as GPUs, TTFT and TPOT."""
    gpus = (
        f"{row.gpus}" if row.gpus_low == row.gpus_high else f"{row.gpus} ({row.gpus_low} to {row.gpus_high})"
    )
    return (
        gpus,
        row.accelerator,
        row.plan,
        "no price" if row.usd_per_million_tokens is None else f"{row.usd_per_million_tokens:.3f}",
        _times(row.ttft_s),
        _times(row.tpot_s),
        f"{row.output_tokens_per_s_per_gpu:,.0f}",
        row.limited_by,
        f"{row.closed_gpus}, {1e3 * row.closed_ttft_s:,.0f}, {1e3 * row.closed_tpot_s:.1f}",
    )


def _times(time: FigureRange) -> str:
    digits = 0 if time.value >= 0.1 else 1
    high = "overload" if time.high is None else f"{1e3 * time.high:,.{digits}f}"
    return f"{1e3 * time.value:,.{digits}f} ({1e3 * time.low:,.{digits}f} to {high})"


def frontier_heads() -> tuple[str, ...]:
    """Heads of the table of the frontier."""
    return ("tok/s/user", "out tok/s/GPU", "$/M output", "TTFT ms", "GPUs", "of", "plan")


def frontier_cells(point: FrontierPoint) -> tuple[str, ...]:
    """A point of the frontier as a row of its table."""
    usd = point.usd_per_million_output_tokens
    return (
        f"{point.tokens_per_s_per_user:.1f}",
        f"{point.output_tokens_per_s_per_gpu:,.0f}",
        "no price" if usd is None else f"{usd:.3f}",
        f"{1e3 * point.ttft_s:,.0f}",
        str(point.gpus),
        point.accelerator,
        point.plan,
    )


# -- served with more or fewer replicas until the limits are just met ------------------------------------

RESIDENCES, MOST_REQUESTS, LEAST_REQUESTS = 5, 20_000, 500
"""The simulated load lasts so many times as long as a request stays, within these numbers of requests."""
MOST_TRIES = 8
"""Most simulations of one family of plans, each with other numbers of replicas."""


class ServedFamily(Struct, frozen=True):
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


class Tried(Struct, frozen=True):
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
