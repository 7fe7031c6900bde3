"""How long the host takes to launch work on a GPU: seconds of one framework call by kind."""

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
    "counts",  # token counts exchanged and read by the host; drains the queue
    "module product",  # a linear layer of a module library, as Transformer Engine's
    "module attention",
    "module expert",  # what one more expert costs inside a grouped layer of such a library
    "checkpoint",  # a block that is computed again
    "selective",  # what selective recompute costs on top of every call
]
"""What the framework is asked to do; each kind has a host time forward and backward."""


class HostCall(Frozen):
    """Host seconds of one call in the forward, and of what autograd runs for it in the backward."""

    forward: Seconds = Field(le=1.0)
    backward: Seconds = Field(le=1.0)
    kind: Kind
    source: Source
    date: DateText
    note: str | None = None


class InBlock(Frozen):
    """How much longer calls take inside a model's code than in a row of the same call."""

    forward: float = Field(ge=1.0, le=100.0)
    backward: float = Field(ge=1.0, le=100.0)
    kind: Kind
    source: Source
    date: DateText
    note: str | None = None


class Host(Frozen):
    """Data of one kind of host and its framework (`data/hosts/*.yaml`).

    `like`: another host whose times are taken `factor` times as long.
    """

    name: str
    title: str
    cpu: str
    software: str
    calls: dict[CallKind, HostCall] = Field(default_factory=dict)
    in_block: InBlock | None = None
    like: str | None = None
    factor: Annotated[SourcedFraction, ranges.SLOWNESS] | None = None
    """Time of a call over that on the host `like`."""
    note: str | None = None

    @model_validator(mode="after")
    def _has_times(self) -> Host:
        if bool(self.calls) == (self.like is not None) or (self.like is None) != (self.factor is None):
            raise ValueError("give either calls, or like and factor")
        missing = [kind for kind in get_args(CallKind) if self.calls and kind not in self.calls]
        if missing:
            raise ValueError(f"calls leaves out {', '.join(missing)}: the host would do these in no time")
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
        """The host whose own calls these times are: itself, or the one that it is like.

        Raises InputError where that one is unknown or is like another itself.
        """
        if self.like is None:
            return self
        base = load_host(self.like)
        if base.like is not None:
            raise InputError(
                f"host {self.name}: like={self.like} is itself like {base.like}; name the host that has calls"
            )
        return base


def list_hosts() -> tuple[str, ...]:
    """Names of the shipped hosts."""
    return shipped_names(FOLDER)


def load_host(name: str, base: Path | None = None) -> Host:
    """The host of a shipped name or a file path; raises InputError for an unknown one."""
    return load_described(Host, FOLDER, name, "host", base)
