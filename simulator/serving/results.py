"""What a served load comes to: latencies, rates, goodput, money and energy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from pydantic import Field

from moesim.hwmodels.arrays import BoolArray, FloatArray, IntArray
from moesim.hwmodels.frozen import Documented, Section
from moesim.hwmodels.summary_text import count, percent, titled
from moesim.simulator.common.tables import Row, TableResult
from moesim.simulator.scenario.inputs import Inputs
from moesim.simulator.scenario.serving import ServingLimits
from moesim.simulator.serving.replicas import Served
from moesim.simulator.serving.requests import NS_PER_S
from moesim.simulator.serving.typical import StepBasis

SCHEMA_VERSION = 1


class Latency(Section):
    """A time over all requests, in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float

    def __str__(self) -> str:
        """The four figures, in ms or s."""
        return ", ".join(f"{name} {_time(getattr(self, name))}" for name in ("p50", "p90", "p99", "mean"))


def latency(seconds: FloatArray) -> Latency:
    """Mean and percentiles of times in seconds, at least one."""
    p50, p90, p99 = np.percentile(seconds, (50, 90, 99))
    return Latency(mean=float(seconds.mean()), p50=float(p50), p90=float(p90), p99=float(p99))


FULL = 0.98
"""Share of the most sequences that run at once, from which a house counts as full."""
LEAST_ENDED = 10
"""Requests that end in a steady window, at least."""


class Window(Section):
    """Time over which rates, money and energy are taken, and the work done in it."""

    steady: bool
    """False: there is no steady part, and this is the whole run."""
    start_s: float
    end_s: float
    requests: int
    """Requests that end in it."""
    input_tokens: float
    output_tokens: float

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end_s - self.start_s


def window_of(served: Served) -> Window:
    """The steady part of a run, without ramp and tail; the whole run where there is none.

    From when 98 % of the most sequences run, or the first requests have ended (the 99th percentile of
    stays), whichever is first, until the last arrival. It lasts for a median stay at least.
    """
    stays, end = served.last_token_ns - served.arrival_ns, int(served.arrival_ns.max())
    start = int(np.percentile(stays, 99))
    before = [row for row in served.counts if row[0] <= end]
    most = max((row[1] for row in before), default=0)
    start = min([start, *(row[0] for row in before if row[1] >= FULL * most > 0)])
    if end - start >= max(float(np.median(stays)), 1.0):
        window = _work(served, start, end, True)
        if window.requests >= LEAST_ENDED and window.input_tokens and window.output_tokens:
            return window
    return _work(served, 0, max(int(served.last_token_ns.max()), 1), False)


def ended_within(served: Served, window: Window) -> BoolArray:
    """Which requests end in a window."""
    ends = served.last_token_ns / NS_PER_S
    return (ends >= window.start_s) & (ends <= window.end_s)


def _work(served: Served, start: int, end: int, steady: bool) -> Window:
    """Work of a span; a prompt is spread over the time to its first token, an answer to its last."""
    requests, first, last = served.requests, served.first_token_ns, served.last_token_ns

    def share(begun: IntArray, ended: IntArray) -> FloatArray:
        inside = np.minimum(ended, end) - np.maximum(begun, start)
        moments = (ended >= start) & (ended <= end)
        return np.where(ended > begun, inside.clip(0) / np.maximum(ended - begun, 1), moments)

    inputs = requests.input_tokens @ share(served.scheduled_ns, first)
    outputs = share(first, first).sum() + (requests.output_tokens - 1) @ share(first, last)
    return Window(
        steady=steady,
        start_s=start / NS_PER_S,
        end_s=end / NS_PER_S,
        requests=int(((last >= start) & (last <= end)).sum()),
        input_tokens=float(inputs),
        output_tokens=float(outputs),
    )


class Goodput(Section):
    """Requests that keep the stated limits."""

    limits: ServingLimits
    share: float
    """Of all requests."""
    requests_per_s: float
    met: bool
    """Whether the share of `limits.percentile` keeps them."""
    nearest: ServingLimits
    """The tightest limits of the stated kinds that the promised share would keep, each by itself."""


class PoolUse(Section):
    """One pool of replicas."""

    role: str
    """`both`, `prefill` or `decode`."""
    gpus: int
    replicas: int
    utilisation: float
    """Share of the time in which a replica works, mean over replicas."""
    steps: int
    """Steps of all replicas."""
    preemptions: int
    """Sequences that lost their keys and values and were computed again."""
    cached_tokens: int
    """Prompt tokens that were found in the prefix cache."""
    cache_tokens: int | None
    """Tokens whose keys and values one rank holds; null for no limit."""
    peak_cache: float | None
    """Largest share of a rank's cache that was in use; null for no limit."""


class Moment(Section):
    """Sequences at one time, all replicas together."""

    time_s: float
    running: int
    waiting: int
    fullest_rank: int
    """Running sequences on the fullest rank of the pool that decodes."""
    fullest_over_mean: float | None
    """The same over the mean of its ranks; null where none runs."""


class ExpertBalance(Section):
    """Experts of the pool that decodes, in a period of `serving.expert_drift` (or the whole run)."""

    from_s: float
    expert_load_cv: float
    fullest_over_mean: float
    """Rows of the fullest rank of `ep` over the mean, in the load's typical decode step (eq. Q10)."""
    decode_step_s: float
    """That step, with the load of this period."""


class Imbalance(Section):
    """How uneven replicas and experts are, and what it costs."""

    ranks: int
    """Ranks of the pool that decodes, of all replicas."""
    fullest_over_mean: float | None
    """Sequences of the fullest rank over the mean rank: mean over the window's moments."""
    fullest_over_mean_p90: float | None
    fullest_rank_step_s: float | None
    """Decode step of a rank with that many more sequences than the typical one."""
    experts: tuple[ExpertBalance, ...]
    """Without experts on several GPUs empty."""


class FigureInterval(Section):
    """Ends of a figure where all steps of the load are at the fast, or the slow end of their 80 %."""

    low: float
    high: float


class Intervals(Section):
    """80 % intervals of a served load: it is served twice more, with all steps at an end of their own."""

    figures: dict[str, FigureInterval]
    """By the key of the figure in the result, such as `ttft_s.p90`."""
    slow_drains: bool
    """Whether the replicas keep up with the load at the slow end; if not, that end depends on its length."""


WITH_INTERVALS = (
    *(f"{time}.{part}" for time in ("ttft_s", "tpot_request_s", "end_to_end_s", "queue_s", "transfer_s")
      for part in Latency.model_fields),
    "tpot_token_s", "requests_per_s", "input_tokens_per_s_per_gpu", "output_tokens_per_s_per_gpu",
    "cached_share", "goodput.requests_per_s", "goodput.share",
    *(f"cost.{key}" for key in (
        "usd_per_million_input_tokens", "usd_per_million_output_tokens", "usd_per_million_tokens",
        "joules_per_input_token", "joules_per_output_token", "joules_per_token",
    )),
)  # fmt: skip
"""Keys of the figures that have intervals."""


def figure(result: ServingResult, key: str) -> float | None:
    """A figure of a result by its key, such as `ttft_s.p90`; None where the result has none."""
    found: object = result
    for part in key.split("."):
        found = getattr(found, part, None)
    return float(found) if isinstance(found, int | float) else None


def intervals_of(fast: ServingResult, slow: ServingResult) -> Intervals:
    """The intervals between the results at both ends of the step times."""
    figures = {}
    for key in WITH_INTERVALS:
        ends = figure(fast, key), figure(slow, key)
        if ends[0] is not None and ends[1] is not None:
            figures[key] = FigureInterval(low=min(ends[0], ends[1]), high=max(ends[0], ends[1]))
    return Intervals(figures=figures, slow_drains=slow.drains)


class ServingCost(Section):
    """Money and energy. With one pool each kind of token carries all of it: do not add them up.

    With a pool for prompts, input tokens carry that pool and output tokens the other.
    """

    usd_per_gpu_hour: float | None
    usd_per_million_input_tokens: float | None
    usd_per_million_output_tokens: float | None
    usd_per_million_tokens: float | None
    """All GPUs over input and output tokens together."""
    board_watts: float | None
    """Limit of a GPU's board, drawn all the time; host, network and cooling are not in it."""
    joules_per_input_token: float | None
    joules_per_output_token: float | None
    joules_per_token: float | None


class ServingResult(TableResult, Documented):
    """What became of a load; its fields are the keys that `serve simulate --json` prints (times in s)."""

    scenario: str
    """Name of the scenario."""
    inputs: Inputs
    """What the result is of; `moesim.load` reads it."""
    engine: str
    """Release of the inference engine."""
    deployment: str
    """The pools in words."""
    gpus: int
    requests: int
    duration_s: float
    """From the first arrival to the last token."""
    ttft_s: Latency
    """From arrival to the first token."""
    tpot_request_s: Latency | None
    """Per request: mean over its tokens after the first. Null where no request has a second token."""
    tpot_token_s: float | None
    """Mean between tokens over all requests: long answers count more than short ones."""
    end_to_end_s: Latency
    """From arrival to the last token."""
    queue_s: Latency
    """From arrival to the first step that works on the request."""
    input_tokens: int
    output_tokens: int
    window: Window
    """Rates, goodput a second and cost are of it; times and shares are of all requests."""
    requests_per_s: float
    offered_per_s: float | None
    """Mean arrivals a second; null in a closed loop, and for one moment without a stated rate."""
    input_tokens_per_s_per_gpu: float
    output_tokens_per_s_per_gpu: float
    cached_tokens: int
    """Prompt tokens found in the prefix cache."""
    cached_share: float
    """Of all prompt tokens."""
    preemptions: int
    pools: tuple[PoolUse, ...]
    transfer_s: Latency | None = Field(None, exclude_if=lambda value: value is None)
    """Hand-over of keys and values, waiting for the link included; left out without a pool for prompts."""
    goodput: Goodput | None = Field(None, exclude_if=lambda value: value is None)
    """Left out where no limits are stated."""
    cost: ServingCost
    drains: bool
    """Whether the replicas keep up with the load."""
    highest_stable_per_s: float | None = Field(None, exclude_if=lambda value: value is None)
    """Requests a second that they keep up with, where they do not keep up with the load."""
    timeline: tuple[Moment, ...] = ()
    """Running and waiting sequences over time."""
    imbalance: Imbalance | None = Field(None, exclude_if=lambda value: value is None)
    """Of replicas and experts; left out where one rank decodes, without experts on several GPUs."""
    intervals: Intervals | None = Field(None, exclude_if=lambda value: value is None)
    """Left out where they were not asked for."""
    decode_step: StepBasis | None = Field(None, exclude_if=lambda value: value is None)
    """The typical decode step and what prices it; left out without a second token, and where step times are
    not the step model's."""
    warnings: tuple[str, ...] = ()
    """What makes the result less reliable, in sentences."""
    seed: int
    version: str
    schema_version: int = SCHEMA_VERSION

    def rows(self) -> list[Row]:
        """One row with the main figures."""
        row: Row = {"scenario": self.scenario, "gpus": self.gpus, "requests_per_s": self.requests_per_s}
        for name in ("ttft_s", "tpot_request_s", "end_to_end_s", "queue_s"):
            one = getattr(self, name)
            row |= {f"{name}_{key}": getattr(one, key, None) for key in Latency.model_fields}
        for name in (
            "tpot_token_s", "input_tokens_per_s_per_gpu", "output_tokens_per_s_per_gpu", "cached_share",
            "drains",
        ):  # fmt: skip
            row[name] = getattr(self, name)
        row["goodput_per_s"] = None if self.goodput is None else self.goodput.requests_per_s
        row["usd_per_million_output_tokens"] = self.cost.usd_per_million_output_tokens
        return [row]

    def _ends(self, key: str, text: Callable[[float], str]) -> str:
        """The interval of a figure in words, after the figure; empty without one."""
        known = self.intervals.figures.get(key) if self.intervals else None
        of = f" of {key.partition('.')[2]}" if "." in key else ""
        return "" if known is None else f" (80 %{of}: {text(known.low)} to {text(known.high)})"

    def __str__(self) -> str:
        """The main figures with their units, in about fifteen lines."""
        figures = {
            "deployment": self.deployment,
            "load": _load_text(self),
            "TTFT": str(self.ttft_s) + self._ends("ttft_s.p50", _time),
            "TPOT": "no request has a second token" if self.tpot_request_s is None else
            f"{self.tpot_request_s}{self._ends('tpot_request_s.p50', _time)} (by request); "
            f"{_time(self.tpot_token_s or 0.0)} mean over all tokens",
            "end to end": str(self.end_to_end_s) + self._ends("end_to_end_s.p50", _time),
            "queue": str(self.queue_s),
            "transfer": "" if self.transfer_s is None else str(self.transfer_s),
            "per GPU": f"{_number(self.input_tokens_per_s_per_gpu)} input and "
            f"{_number(self.output_tokens_per_s_per_gpu)} output tokens/s"
            + self._ends("output_tokens_per_s_per_gpu", _number),
            "cache": f"{percent(self.cached_share)} of input tokens were there, "
            f"{count(self.preemptions, 'preemption')}",
            "busy": ", ".join(f"{pool.role} {percent(pool.utilisation)}" for pool in self.pools),
            "imbalance": "" if self.imbalance is None else _imbalance_text(self.imbalance),
            "goodput": "" if self.goodput is None else goodput_text(self.goodput),
            "cost": _cost_text(self.cost),
            **({} if self.decode_step is None else self.decode_step.lines(_time)),
            "more": "; ".join(self.warnings),
        }  # fmt: skip
        rows = {name: text for name, text in figures.items() if text}
        return titled("\n".join([self.scenario, *self.inputs.lines()]), rows)


def _load_text(result: ServingResult) -> str:
    offered = "" if result.offered_per_s is None else f", {_number(result.offered_per_s)}/s offered"
    text = (
        f"{count(result.requests, 'request')} in {_time(result.duration_s)}: "
        f"{_number(result.requests_per_s)}/s served{offered}"
    )
    window = result.window
    text += (
        f" (rates and cost: the steady {_time(window.start_s)} to {_time(window.end_s)})"
        if window.steady
        else " (rates and cost: the whole run, as none of it is steady; raise serving.load.requests)"
    )
    return text if result.drains else f"{text}; it never drains, {stable_text(result)}"


def _imbalance_text(one: Imbalance) -> str:
    parts = []
    if one.fullest_over_mean is not None:
        parts.append(
            f"the fullest of {one.ranks} ranks has {one.fullest_over_mean:.2f} x the mean's sequences"
        )
    if one.experts:
        ratios = [period.fullest_over_mean for period in one.experts]
        steps = [period.decode_step_s for period in one.experts]
        text = f"the fullest experts' rank {max(ratios):.2f} x the mean's rows"
        if len(ratios) > 1:
            text += f" at most, {min(ratios):.2f} at least"
            text += f" (decode step {_time(min(steps))} to {_time(max(steps))})"
        parts.append(text)
    return "; ".join(parts)


def stable_text(result: ServingResult) -> str:
    """The highest rate that the replicas keep up with, in words."""
    if result.highest_stable_per_s is None:
        return "whatever the rate"
    return f"the highest stable rate is {_number(result.highest_stable_per_s)} requests/s"


def goodput_text(goodput: Goodput) -> str:
    """The goodput, and the limits that would be met where these are not, in words."""
    limits, wanted = _limits_text(goodput.limits), f"{goodput.limits.percentile:g} %"
    text = f"{_number(goodput.requests_per_s)}/s, {percent(goodput.share)} of requests keep {limits}"
    if goodput.met:
        return text
    return f"{text}; promised are {wanted}, which would keep each of {_limits_text(goodput.nearest)}"


def _limits_text(limits: ServingLimits) -> str:
    names = {"ttft_s": "TTFT", "tpot_s": "TPOT", "end_to_end_s": "end to end"}
    stated = [f"{name} {_time(getattr(limits, key))}" for key, name in names.items() if getattr(limits, key)]
    return ", ".join(stated)


def _cost_text(cost: ServingCost) -> str:
    parts = []
    if cost.usd_per_million_output_tokens is not None and cost.usd_per_million_input_tokens is not None:
        parts.append(
            f"${_number(cost.usd_per_million_input_tokens)} a million input tokens, "
            f"${_number(cost.usd_per_million_output_tokens)} output"
        )
    if cost.joules_per_output_token is not None:
        parts.append(f"{_number(cost.joules_per_output_token)} J an output token (board power)")
    return "; ".join(parts) or "no price and no board power are known"


def _time(seconds: float) -> str:
    return f"{_number(seconds * 1e3)} ms" if seconds < 1 else f"{_number(seconds)} s"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
