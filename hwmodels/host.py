"""Time that the host needs to launch work on a GPU, in seconds of one framework call by kind."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import Field, model_validator

from moesim.hwmodels import ranges
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.frozen import Frozen
from moesim.hwmodels.library import load_described, shipped_names
from moesim.hwmodels.provenance import DateText, Kind, Source, SourcedFraction
from moesim.hwmodels.units import Seconds

FOLDER = "hosts"

CallKind = Literal[
    "product",
    "grouped product",
    "attention",
    "norm",
    "pointwise",
    "copy",
    "index",
    "put",
    "rope",
    "gate",  # one operator of the router's chain
    "collective",
    "exchange",  # all-to-all of rows with split sizes, inside autograd
    "counts",  # exchange of token counts that the host reads back, which drains the queue
    "module product",  # linear layer of a module library such as Transformer Engine
    "module attention",
    "module expert",  # each further expert inside a grouped layer of such a library
    "checkpoint",  # recomputation of a whole block
    "selective",  # extra cost of every call under selective recompute
]
"""Kinds of framework calls; each has a host time in the forward and one in the backward."""


class HostCall(Frozen):
    """Host seconds of one call in the forward, and of its autograd part in the backward."""

    forward: Seconds = Field(le=1.0)
    backward: Seconds = Field(le=1.0)
    kind: Kind
    source: Source
    date: DateText
    note: str | None = None


class InBlock(Frozen):
    """Ratio of call times inside a model's code to those in a loop that repeats one call."""

    forward: float = Field(ge=1.0, le=100.0)
    backward: float = Field(ge=1.0, le=100.0)
    kind: Kind
    source: Source
    date: DateText
    note: str | None = None


class Host(Frozen):
    """Data of one kind of host and its framework (`data/hosts/*.yaml`).

    `like` names another host, whose times multiplied by `factor` are those of this one.
    """

    name: str
    title: str
    cpu: str
    software: str
    calls: dict[CallKind, HostCall] = Field(default_factory=dict)
    in_block: InBlock | None = None
    like: str | None = None
    factor: Annotated[SourcedFraction, ranges.SLOWNESS] | None = None
    """Time of a call here over its time on the host `like`."""
    note: str | None = None

    @model_validator(mode="after")
    def _has_times(self) -> Host:
        if bool(self.calls) == (self.like is not None) or (self.like is None) != (self.factor is None):
            raise ValueError("give either calls, or like and factor")
        missing = [kind for kind in get_args(CallKind) if self.calls and kind not in self.calls]
        if missing:
            raise ValueError(f"calls has no time for {', '.join(missing)}; give one for every kind of call")
        return self

    def call_s(self, kind: CallKind, forward: bool) -> float:
        """Host seconds of one call; raises InputError where the host `like` is unknown or has no calls."""
        if self.factor is not None:
            return self.factor.value * self.measured().call_s(kind, forward)
        call, block = self.calls[kind], self.in_block
        if forward:
            return call.forward * (block.forward if block else 1.0)
        return call.backward * (block.backward if block else 1.0)

    def measured(self) -> Host:
        """The host whose calls were measured, which is this one or the one named by `like`.

        Raises InputError where the other is unknown or has a `like` of its own.
        """
        if self.like is None:
            return self
        base = load_host(self.like)
        if base.like is not None:
            raise InputError(
                f"host {self.name}: like={self.like} has no calls of its own, it is like {base.like}; "
                "name the host that has calls"
            )
        return base


def list_hosts() -> tuple[str, ...]:
    """Names of the shipped hosts."""
    return shipped_names(FOLDER)


def load_host(name: str, base: Path | None = None) -> Host:
    """The host of a shipped name or a file path; raises InputError for an unknown one."""
    return load_described(Host, FOLDER, name, "host", base)
