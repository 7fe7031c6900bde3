"""The parts of a result: step, breakdown, memory, run, provenance."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from math import fsum, isfinite
from typing import TYPE_CHECKING, Any, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    computed_field,
    model_serializer,
    model_validator,
)

from moesim.hwmodels.confidence import Confidence
from moesim.hwmodels.frozen import Frozen
from moesim.hwmodels.summary_text import percent, short
from moesim.hwmodels.units import format_quantity, in_unit
from moesim.simulator.common.processes import without_cyclic_collection
from moesim.simulator.engine.program import Program
from moesim.simulator.frameworks.software import Software
from moesim.simulator.memory.gpu import Verdict, verdict_of
from moesim.simulator.run.report import RunReport


class Finite(Frozen, allow_inf_nan=False):
    """Figures of a result. They must be finite; anything else is a fault of the program and never shown."""


Part = TypeVar("Part", bound="Later")


class Later(Frozen):
    """A result some of whose fields are worked out when they are first read.

    Whatever needs the whole (printing, comparing, copying, another process) works out all of them first.
    """

    _later: dict[str, Callable[[], Any]] = PrivateAttr(default_factory=dict)

    @classmethod
    def of(cls: type[Part], now: Mapping[str, Any], later: Mapping[str, Callable[[], Any]]) -> Part:
        """A result from fields that are known and from functions that work out the others.

        The values are of the fields' own types; raises ValueError for a number that is not finite.
        """
        made = cls.__new__(cls)
        values = {name: _finite(name, value) for name, value in now.items()}
        object.__setattr__(made, "__dict__", values)
        object.__setattr__(made, "__pydantic_fields_set__", {*now, *later})
        object.__setattr__(made, "__pydantic_extra__", None)
        object.__setattr__(made, "__pydantic_private__", {"_later": dict(later)})
        return made

    if not TYPE_CHECKING:  # so that a misspelt field stays an error of types

        def __getattr__(self, name: str) -> Any:
            """A field that is not there yet."""
            private = object.__getattribute__(self, "__pydantic_private__")
            make = None if private is None else private.get("_later", {}).get(name)
            if make is None:  # which another thread may just have worked out
                return self.__dict__[name] if name in self.__dict__ else super().__getattr__(name)
            with without_cyclic_collection():
                value = self.__dict__[name] = _finite(name, make())
            self._later.pop(name, None)
            return value

    def completed(self) -> Self:
        """The same result with all its fields and those of its parts, in their order."""
        if self._later:
            whole = {}
            with without_cyclic_collection():
                for name in type(self).model_fields:  # bounds first, with which come sums that others read
                    part = whole[name] = getattr(self, name)
                    if isinstance(part, Later):
                        part.completed()
            object.__setattr__(self, "__dict__", whole)
        return self

    @model_serializer(mode="wrap")
    def _whole(self, serialize: SerializerFunctionWrapHandler):  # type: ignore[no-untyped-def]  # keeps the schema
        return serialize(self.completed())

    def __eq__(self, other: object) -> bool:
        """Whether all fields are equal."""
        if isinstance(other, Later):
            other.completed()
        return BaseModel.__eq__(self.completed(), other)

    def __hash__(self) -> int:
        """Hash of all fields."""
        return hash(tuple(self.completed().__dict__.values()))

    def __copy__(self) -> Self:
        """A copy of the whole."""
        return BaseModel.__copy__(self.completed())

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """A deep copy of the whole."""
        return BaseModel.__deepcopy__(self.completed(), memo)

    def __iter__(self) -> Iterator[tuple[str, Any]]:  # type: ignore[override]
        """All fields, as pydantic's models give them."""
        return BaseModel.__iter__(self.completed())

    def __getstate__(self) -> dict[Any, Any]:
        """The whole, for another process."""
        return BaseModel.__getstate__(self.completed())


def _finite(name: str, value: Any) -> Any:
    if isinstance(value, float) and not isfinite(value):
        raise ValueError(f"{name}={value} is no figure of a result")
    return value


class StepResult(Later, Finite):
    """One training step. Rates are per second or day (docs/model.md, eq. F4), MFU is a fraction of the BF16
    datasheet peak (eq. F5)."""

    time_s: float
    tokens: int
    tokens_per_s: float
    tokens_per_s_per_gpu: float
    tokens_per_day: float
    tflops_per_gpu_causal: float
    tflops_per_gpu_noncausal: float
    mfu_causal: float
    mfu_noncausal: float
    lower_bound_s: float
    upper_bound_s: float


class Breakdown(Finite):
    """Seconds of a pipeline rank's step by category; the first six sum to the step and contain the last."""

    forward: float
    backward_input: float
    backward_weight: float
    forward_backward: float
    bubble: float
    optimizer: float
    exposed_communication: float


class MemoryResult(Finite):
    """Bytes of the fullest GPU.

    `total_bytes`: bytes in use at the peak. `fits`: whether these fit. `range_bytes`: least and most bytes
    that the process may take on the device, depending on the framework's own memory and its allocator
    (docs/model.md, eq. M10). `verdict` weighs both: `fits` only if the most fits, `at risk` if only the bytes
    in use do, else `does not fit`.
    `active_bytes` and `reserved_bytes`: peaks of PyTorch's allocator in a replay of the steps, as torch
    counts them (eq. M43); None unless `software.allocator` asks for them and the replay describes the plan.
    """

    total_bytes: float
    range_bytes: tuple[float, float]
    capacity_bytes: float
    fits: bool
    by_kind_bytes: dict[str, float]
    active_bytes: float | None = None
    reserved_bytes: float | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_verdict(cls, data: Any) -> Any:
        """Drop the verdict of a printed result, which follows from its bytes."""
        return {k: v for k, v in data.items() if k != "verdict"} if isinstance(data, Mapping) else data

    @computed_field  # type: ignore[prop-decorator]
    @property
    def verdict(self) -> Verdict:
        """Whether the plan fits; it is `at risk` where that depends on the framework and its allocator."""
        return verdict_of(self.total_bytes, self.range_bytes[1], self.capacity_bytes)

    @property
    def risk(self) -> str | None:
        """Why the plan is at risk, and what lowers it; None where it is not."""
        if self.verdict != "at risk":
            return None
        most, has = (
            f"{in_unit(b, 'GiB', 'bytes'):.1f} GiB" for b in (self.range_bytes[1], self.capacity_bytes)
        )
        return (
            f"at risk: its tensors fit, but framework and allocator may take up to {most} of {has}; an "
            "allocator at its limit frees and takes memory in every step, which is slow (the interval of the "
            "step allows for it), or fails"
        )

    @property
    def shortage(self) -> str | None:
        """Why the plan does not fit and which changes need less memory; None where it fits."""
        if self.fits:
            return None
        largest, size = max(self.by_kind_bytes.items(), key=lambda item: item[1])
        needed, has, part = (
            f"{in_unit(b, 'GiB', 'bytes'):.1f} GiB" for b in (self.total_bytes, self.capacity_bytes, size)
        )
        return (
            f"does not fit: the fullest GPU needs {needed} and has {has}; the largest part is "
            f"{largest.replace('_', ' ')} with {part}. More parallel.pp, ep or tp, a higher zero_stage, or "
            "recompute=full needs less"
        )


class RunResult(Finite):
    """The main phase at constant batch, without interruptions (docs/model.md, eq. F6).

    `report`: the whole run, where the run plan states more than tokens (docs/model.md, section 13).
    """

    tokens: float
    steps: int
    days: float
    gpu_hours: float
    cost_usd: float | None
    price_term: str = Field("", exclude_if=lambda term: not term)
    """Term of the cluster's price in words; empty without a price."""
    report: RunReport | None = None

    def __str__(self) -> str:
        """Duration, GPU-hours and cost, and those of the whole run with its interruptions where reported."""
        lines = [
            f"{short(self.tokens)} tokens in {self.steps:,} steps: {self.days:.1f} days, "
            f"{short(self.gpu_hours)} GPU-hours{_dollars(self.cost_usd)}"
            f"{f' ({self.price_term})' if self.price_term else ''}"
        ]
        if self.report is not None:
            days, cost = self.report.days, self.report.cost_usd
            lines.append(
                f"with interruptions {days.predicted:.1f} days{_dollars(cost.predicted if cost else None)}"
            )
        return "\n".join(lines)

    def __repr__(self) -> str:
        """The text of `str`."""
        return str(self)


def _dollars(value: float | None) -> str:
    return ", no price known" if value is None else f", ${short(value)}"


class Utilisation(Finite):
    """Busy fractions over the step, averaged over pipeline ranks.

    For links: bytes of `Result.moved_bytes` over what the nominal rate of one direction carries in the step.
    """

    compute_partition: float
    communication_partition: float
    """SMs that dispatch and combine; collectives of a library run on SMs of their own."""
    scale_up: float
    nic: float


class MovedBytes(Finite):
    """Bytes that an average GPU of a pipeline rank sends in a step, and as many that it receives."""

    rank: int
    what: str
    nic_bytes: float
    scale_up_bytes: float


class UseOfPower(Finite):
    """Mean seconds of a board's step in one use, and its power meanwhile."""

    use: str
    seconds: float
    board_w: float


class StepEnergy(Finite):
    """Energy of a step (eq. C34), averaged over all boards.

    `board_w`: mean power of a board; `limit_w`: the board's limit or the cap set on it. `by_use` adds up to
    the step. `joules_per_token`: of the boards; `..._node`: with the rest of the node, None where no power
    of the node is known; `..._site`: times the PUE, None without an energy site. `law`: what power is read
    from. `assumed`: the law is that of another card, or the board is taken to draw its limit.
    """

    board_w: float
    limit_w: float
    capped: bool
    by_use: tuple[UseOfPower, ...]
    joules_per_token: float
    joules_per_token_node: float | None
    joules_per_token_site: float | None
    pue: float | None
    waiting_w: float
    law: str
    assumed: bool

    def at_site(self, pue: float | None) -> StepEnergy:
        """The same step at a site with another PUE; None for none."""
        node = self.joules_per_token_node
        total = None if node is None or pue is None else node * pue
        return self.model_copy(update={"pue": pue, "joules_per_token_site": total})

    def __str__(self) -> str:
        """Power by use and joules per token."""
        uses = ", ".join(f"{u.use} {u.board_w:,.0f} W for {u.seconds:.2f} s" for u in self.by_use)
        cap = " (capped)" if self.capped else ""
        joules = [f"{self.joules_per_token:.3f} J a token on the boards"]
        if self.joules_per_token_node is not None:
            joules.append(f"{self.joules_per_token_node:.3f} J with the rest of the nodes")
        if self.joules_per_token_site is not None:
            joules.append(f"{self.joules_per_token_site:.3f} J with the site's PUE")
        return (
            f"{self.board_w:,.0f} of {self.limit_w:,.0f} W a board{cap}: {uses}; {', '.join(joules)}"
            f"{f' (assumed: {self.law})' if self.assumed else ''}"
        )


class TierCost(Finite):
    """What a limited level of the network costs the step (eq. N6): an oversubscribed layer, or the link
    between buildings.

    `gpus`: GPUs of a domain. `bytes_per_s`: what a domain can send to the others (for buildings, to each).
    `crossed_by`: what crosses it. `busy`: share of the step in which pipeline sends fill the fullest border.
    `step_without_s`: the step on the same network without this limit and its latency.
    """

    tier: str
    gpus: int
    bytes_per_s: float
    latency_s: float
    crossed_by: tuple[str, ...]
    busy: float | None
    step_without_s: float
    cost_s: float

    def __str__(self) -> str:
        """The cost with its share of the step, and what crosses."""
        rate = format_quantity(self.bytes_per_s, "bytes_per_s")
        step_s = self.step_without_s + self.cost_s
        crossed = ", ".join(self.crossed_by) or "nothing"
        busy = "" if self.busy is None else f"; sends fill it {percent(self.busy)} of the step"
        return (
            f"{self.tier} costs {self.cost_s:.3f} s of the step ({percent(self.cost_s / step_s)}): "
            f"{self.gpus:,} GPUs a side, {rate} each way, {self.latency_s * 1e6:,.1f} us; crossed by "
            f"{crossed}{busy}"
        )


class CauseRow(Finite):
    """Seconds of the critical path due to one cause."""

    cause: str
    seconds: float


class PhaseSpan(Finite):
    """Mean duration in seconds of one phase of MoE blocks inside overlapped pairs.

    `wait_s`: mean time of the members at the barrier of a transfer before its payload; 0 for compute.
    """

    phase: str
    seconds: float
    wait_s: float


class ProvenanceEntry(Finite):
    """One number or curve behind the prediction."""

    path: str
    value: float | None
    unit: str
    kind: str
    source: str
    date: str


class PoolResult(Finite):
    """A pool's part of a step on a fleet.

    `layer_s`: compute of a MoE layer (a dense layer in models without one) for one micro-batch, forward and
    backward, alone on a GPU of the pool (docs/model.md, eq. S1). `bubble_s`: mean over the pool's pipeline
    ranks. `memory`: memory of the fullest of these ranks.
    """

    accelerator: str
    n_gpus: int
    first_rank: int
    last_rank: int
    layers: int
    layer_s: float
    bubble_s: float
    memory: MemoryResult
    profile: str
    confidence: Confidence
    confidence_reason: str


# -- host report -------------------------------------------------------------------------------------
# Reports the launch stalls of a step.

BOUND_SHARE = 0.10
"""Share of launch stalls in a step from which a run is called bound by the host."""


class HostReport(BaseModel):
    """Launch stalls of a step, averaged over pipeline ranks; `bound`: they are at least a tenth of it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str
    wait_s: float
    share: float
    bound: bool


def host_report(software: Software, program: Program, step_s: float) -> HostReport | None:
    """Report of the launch stalls of a step; None where the scenario names no host."""
    if software.host is None:
        return None
    codes = {id(step.code): step.code for steps in program.ranks for step in steps}
    stalls = {key: [task.price.host_s for task in code.tasks] for key, code in codes.items()}
    waits = [fsum(chain.from_iterable(stalls[id(step.code)] for step in steps)) for steps in program.ranks]
    wait_s = fsum(waits) / len(waits)
    share = wait_s / step_s
    return HostReport(host=software.host, wait_s=wait_s, share=share, bound=share >= BOUND_SHARE)
