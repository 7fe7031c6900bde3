"""The `serving` section of a scenario: pools of an inference engine, the load and the limits of its users."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field, PositiveInt, model_validator

from moesim.hwmodels.frozen import Section
from moesim.simulator.model.shape import WeightFormat

Format = WeightFormat
"""Format of weights, routed experts or keys and values."""

Share = Annotated[float, Field(gt=0, le=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def _is_default(section: Section, key: str) -> bool:
    """Whether a key has the value that it has where nobody states it, as in what `to_dict` writes."""
    return bool(getattr(section, key) == type(section).model_fields[key].default)


class ServingPool(Section):
    """Equal replicas of an engine. A replica has `tp` x `dp` x `pp` GPUs, which step together."""

    replicas: PositiveInt = 1
    tp: PositiveInt = 1
    """GPUs that split attention and dense layers."""
    dp: PositiveInt = 1
    """Data-parallel attention ranks of a replica: each has its own sequences, cache and queue."""
    pp: PositiveInt = 1
    """Pipeline stages."""
    ep: PositiveInt = 1
    """GPUs that share out the routed experts; `tp` x `dp` / `ep` GPUs split each expert."""
    redundant_experts: int = Field(0, ge=0)
    """Replicas of experts over a whole group (EPLB)."""
    exchange: Literal["allgather", "deepep"] | None = None
    """How tokens of data-parallel attention reach the experts. Absent: the engine's default."""
    max_num_seqs: PositiveInt = 256
    """Most sequences that run on one rank of `dp`."""
    max_num_batched_tokens: PositiveInt = 8192
    """Most tokens of a step on one rank of `dp`."""
    two_batch_overlap: bool = False
    """Two micro-batches, one computing while the other's tokens travel."""
    cuda_graphs: bool = True
    """Decode steps replay a CUDA graph of the next bucket of the engine."""
    graph_prefill_tokens: int | None = Field(None, ge=0, le=10_000_000)
    """Most tokens of a step with prompts of which graphs hold all but attention. Absent: the engine's."""
    draft_tokens: int = Field(0, ge=0, le=16)
    """Tokens drafted a step (MTP, EAGLE) and checked in the next one."""
    memory_fraction: Share = 0.9
    """Share of the GPU's memory that weights, buffers and cache may take."""
    wait_steps: int = Field(0, ge=0, le=10_000)
    """Decode steps between looks at new requests (SGLang's scheduler-recv-interval); 0: every step."""
    wait_for_ranks: bool = False
    """Requests wait until every rank of `dp` has one, at most `wait_steps` (TensorRT-LLM enable_balance)."""

    @property
    def gpus(self) -> int:
        """GPUs of one replica."""
        return self.tp * self.dp * self.pp

    @property
    def expert_tp(self) -> int:
        """GPUs that split each routed expert."""
        return self.tp * self.dp // self.ep

    @model_validator(mode="after")
    def _ranks_wait_for_others(self) -> ServingPool:
        if self.wait_for_ranks and (self.wait_steps < 2 or self.dp < 2):
            raise ValueError(
                f"wait_for_ranks has nothing to wait for with wait_steps={self.wait_steps} and dp={self.dp}; "
                "state 2 or more of both, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _experts_are_spread_evenly(self) -> ServingPool:
        if (self.tp * self.dp) % self.ep:
            raise ValueError(
                f"ep={self.ep} does not divide tp x dp = {self.tp * self.dp}; take a divisor of it"
            )
        return self


MOST_REQUESTS = 10_000_000
"""Most requests of a load."""


class ServingLoad(Section):
    """Requests: those of a log, or drawn from a rate and lengths."""

    log: str | None = None
    """Mooncake's JSON lines, Azure's CSV, or a CSV of arrival_s, input_tokens, output_tokens; gzipped too."""
    block_tokens: PositiveInt = 512
    """Tokens of a block of a log's `hash_ids`."""
    requests: PositiveInt | None = None
    """Number of requests; more than a log has repeat it with other times. Absent: the log's, or 1,000."""
    rate_per_s: Positive | None = None
    """Mean arrivals a second; a log is stretched to it. Absent: as logged."""
    arrivals: Literal["poisson", "even", "bursts", "concurrency"] = "poisson"
    """How drawn requests arrive. `concurrency`: a new one when one ends, `concurrency` at a time."""
    burstiness: Positive = 1.0
    """Squared coefficient of variation of the gaps of `bursts` (1: Poisson), gamma distributed."""
    concurrency: PositiveInt | None = None
    """Requests under way at a time (closed loop)."""
    input_tokens: PositiveInt = 1024
    """Mean of drawn prompts."""
    output_tokens: PositiveInt = 1024
    """Mean of drawn answers."""
    length_spread: float = Field(0.0, ge=0, le=5)
    """Standard deviation of the logarithm of drawn lengths; 0: all are equal."""
    tokeniser_s_per_token: float = Field(0.0, ge=0, le=1e-3)
    """Tokeniser, a prompt at a time, with the engine's server: 2.6e-6 for English, 5.2e-6 for random ids."""
    cached_share: float = Field(0.0, ge=0, lt=1)
    """Share of each drawn prompt that a cache outside of the replicas holds, such as one on disks."""

    @model_validator(mode="after")
    def _every_key_counts(self) -> ServingLoad:
        if (self.requests or 0) > MOST_REQUESTS:
            raise ValueError(
                f"requests={self.requests:,} is above {MOST_REQUESTS:,}, hours of work; state at most that: "
                "a load of some times as long as a request stays settles, and other seeds give more of it"
            )
        closed = self.arrivals == "concurrency"
        if closed != (self.concurrency is not None):
            raise ValueError("`arrivals: concurrency` and `concurrency` go together; state both or neither")
        unread = {
            "rate_per_s": closed,
            "burstiness": self.arrivals != "bursts",
            "block_tokens": self.log is None,
            "arrivals": self.log is not None and not closed,
            **dict.fromkeys(
                ("input_tokens", "output_tokens", "length_spread", "cached_share"), self.log is not None
            ),
        }
        if stated := [key for key, idle in unread.items() if idle and not _is_default(self, key)]:
            what = (
                "a log says when requests come and how long they are"
                if self.log
                else f"arrivals={self.arrivals}"
            )
            remedy = (
                f'; on a preset, --set "serving.load={{log: {self.log}}}" replaces it' if self.log else ""
            )
            raise ValueError(f"{', '.join(stated)} would not be read: {what}; leave it out{remedy}")
        return self


class ExpertPeriod(Section):
    """How uneven the load of experts is from a time of the run on."""

    from_s: float = Field(ge=0, allow_inf_nan=False)
    """Seconds after the first arrival."""
    expert_load_cv: float = Field(ge=0, le=10)
    """Coefficient of variation of an expert's rows, in place of `routing.expert_load_cv`."""


class ServingLimits(Section):
    """What users are promised, for the share `percentile` of requests."""

    ttft_s: Positive | None = None
    """Time to the first token."""
    tpot_s: Positive | None = None
    """Mean time between a request's tokens after the first."""
    end_to_end_s: Positive | None = None
    percentile: float = Field(90.0, gt=0, lt=100)
    """Per cent of the requests that are promised to keep each limit."""

    @model_validator(mode="after")
    def _limits_something(self) -> ServingLimits:
        if not (self.ttft_s or self.tpot_s or self.end_to_end_s or _is_default(self, "percentile")):
            raise ValueError(
                "percentile would not be read without ttft_s, tpot_s or end_to_end_s; state one of them"
            )
        return self


class Serving(ServingPool):
    """How the model is served. With `prefill`, the pool of this section decodes only."""

    engine: str = "vllm-0.19"
    """Release of an inference engine; an unknown one is refused with those there are."""
    prefill: ServingPool | None = None
    """Replicas that work on prompts only and hand keys and values over (disaggregation)."""
    weights: Format | None = None
    """Format of linear layers. Absent: that in which the model was published."""
    experts: Format | None = None
    """Format of routed experts. Absent: as `weights`."""
    cache: Format = "bf16"
    """Format of keys and values."""
    prefix_caching: bool = True
    router: Literal["least_loaded", "round_robin", "prefix_aware"] = "least_loaded"
    """Who gets a request: the rank with least waiting x 4 + running, each in turn, or the longest prefix."""
    expert_drift: tuple[ExpertPeriod, ...] = ()
    """A trace of the experts' load, as it drifts and is balanced again; absent: the same all the time."""
    acceptance: tuple[Share, ...] | None = None
    """Chance that each draft is accepted, given the one before it. Absent: measured defaults."""
    load: ServingLoad = ServingLoad()
    limits: ServingLimits = ServingLimits()

    @model_validator(mode="after")
    def _drift_is_in_order(self) -> Serving:
        times = [period.from_s for period in self.expert_drift]
        if times and (times[0] != 0 or any(b <= a for a, b in pairwise(times))):
            raise ValueError(
                f"expert_drift begins at from_s={times[0]:g} with {len(times)} periods; the first begins at "
                "0, and each later one after that before it"
            )
        if times and all(pool.ep == 1 for pool in (self, *([self.prefill] if self.prefill else []))):
            raise ValueError(
                "expert_drift would not be read: with ep=1 every GPU has all experts; raise ep, or drop it"
            )
        return self

    @model_validator(mode="after")
    def _drafts_are_accepted(self) -> Serving:
        if self.acceptance is not None and not self.draft_tokens:
            raise ValueError(
                "acceptance would not be read: draft_tokens is 0; state draft_tokens, or leave it out"
            )
        if self.prefill is not None and self.prefill.draft_tokens:
            raise ValueError("prefill.draft_tokens would not be read: prompts need no drafts; leave it out")
        return self
