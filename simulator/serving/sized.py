"""What a sizing found: plans that were served, and the frontier of throughput against speed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field

from moesim.hwmodels.frozen import Documented, Frozen
from moesim.hwmodels.summary_text import count, short, table_lines
from moesim.simulator.common.tables import Row, TableResult
from moesim.simulator.scenario import Scenario
from moesim.simulator.scenario.inputs import Inputs
from moesim.simulator.scenario.serving import ServingLimits, ServingPool

MODES = ("aggregated", "disaggregated")
"""One pool that does all work, or pools for prompts and for decodes."""
FINEST = 0.85
"""Printed points of a frontier are at least so far apart in the speed of a user."""


def pool_text(pool: ServingPool, replicas: int) -> str:
    """A pool in words, such as `4 x TP1 DP8 EP8, 128 sequences`."""
    degrees = [
        f"{name}{n}"
        for name, n in (("TP", pool.tp), ("DP", pool.dp), ("PP", pool.pp), ("EP", pool.ep))
        if n > 1
    ]
    more = [f"+{pool.draft_tokens} drafts"] if pool.draft_tokens else []
    more += ["two-batch overlap"] if pool.two_batch_overlap else []
    return ", ".join([f"{replicas} x {' '.join(degrees) or '1 GPU'}", f"{pool.max_num_seqs} seqs", *more])


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


class FrontierPoint(Frozen):
    """Most tokens a GPU for the speed that a user sees, in closed form."""

    plan: str
    accelerator: str
    mode: str
    gpus: int
    tokens_per_s_per_user: float
    output_tokens_per_s_per_gpu: float
    usd_per_million_output_tokens: float | None
    ttft_s: float


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


def front(speed: Sequence[float], throughput: Sequence[float]) -> list[int]:
    """Places of the points that no other beats in both, fastest first, not closer than FINEST."""
    order = sorted(range(len(speed)), key=lambda n: (-speed[n], -throughput[n], n))
    kept: list[int] = []
    for place in order:
        if not kept or throughput[place] > throughput[kept[-1]]:
            kept.append(place)
    spaced = kept[:1]
    for place in kept[1:]:
        if speed[place] <= FINEST * speed[spaced[-1]]:
            spaced.append(place)
    return spaced
