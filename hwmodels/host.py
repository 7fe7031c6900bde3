"""Time that the host needs to launch work on a GPU, in seconds of one framework call by kind."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import Field, model_validator

from moesim.hwmodels import ranges
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.frozen import Frozen
from moesim.hwmodels.provenance import DateText, Kind, Source, SourcedFraction
from moesim.hwmodels.units import Seconds
from moesim.hwmodels.yaml_io import load_described, shipped_names

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
    "module cast",  # each expert's rows cast to FP8 with their own current scale
    "part",  # view and copy of one rank's part of a collective over a list of tensors
    "blocked",  # return of a launch that waits for its kernel, behind the kernel's end
    "checkpoint",  # a checkpointed function inside a block
    "recomputed",  # extra cost of every call in a block that is checkpointed whole
    "selective",  # extra cost of every call in a block that is checkpointed by operator
    "policy",  # such a block's extra cost beside that of its calls
    "fsdp",  # hooks, copies and collectives of FSDP2 around a whole block
    "fsdp kept",  # its hooks in a micro-batch that finds the parameters gathered
    "dtensor",  # tensor parallelism of a whole block through PyTorch's DTensor, with its collectives
    "graph",  # replay of one captured part of a block through autograd
    "pipeline action",  # PyTorch's pipeline schedules of one stage a rank, around a forward or a backward
    "runtime action",  # the same of its runtime for several stages a rank
    "split weights",  # a parameter's gradient in the second part of PyTorch's split backward
    "megatron layer",  # Megatron core's own Python around the modules of a layer
    "megatron router",  # the same around the product and the choice of a router
    "megatron dispatcher",  # the same around permutations and all-to-alls
    "megatron flex",  # the same of its flex dispatcher, around DeepEP's calls
    "megatron latent attention",  # what MLA adds to a layer's Python
    "megatron shared expert",  # the same of a shared expert
    "megatron tensor",  # a tensor-parallel collective with its linear layer's Python
    "megatron checkpoint",  # a routed layer that Megatron core checkpoints whole
    "megatron module",  # a module that it checkpoints by itself
    "megatron parameter",  # hook of a parameter's gradient in Megatron core's buckets
    "megatron micro-batch",  # what its schedule without a pipeline adds to a micro-batch
    "megatron action",  # what its pipeline schedules add to a forward or a backward
]
"""Kinds of framework calls; each has a host time in the forward and one in the backward."""

BlockFamily = Literal["dense", "routed", "latent routed", "other"]
"""Kinds of blocks: softmax attention with a dense or a routed FFN, latent attention (MLA) with routed
experts, and every other block."""


class CompiledCall(Frozen):
    """Host seconds of a call around a whole block that `torch.compile` compiled."""

    forward: Seconds = Field(le=1.0)
    backward: Seconds = Field(le=1.0)
    kind: Kind
    source: Source
    date: DateText
    note: str | None = None


class HostCall(Frozen):
    """Host seconds of one call in the forward, and of its autograd part in the backward."""

    forward: Seconds = Field(le=1.0)
    backward: Seconds = Field(le=1.0)
    whole: bool = False
    """The time was measured inside whole blocks, so `in_block` does not lengthen it."""
    compiled: CompiledCall | None = None
    """The same call around a compiled block; None where it was not measured, which then takes as long."""
    kind: Kind
    source: Source
    date: DateText
    note: str | None = None


class InBlock(Frozen):
    """Ratio of call times inside a model's code to those in a loop that repeats one call.

    A measured block has its own ratio, with which the sum of its calls is the block's measured time.
    """

    forward: float = Field(ge=1.0, le=100.0)
    backward: float = Field(ge=1.0, le=100.0)
    kind: Kind
    source: Source
    date: DateText
    note: str | None = None


class CompiledBlock(Frozen):
    """Ratio of a compiled block's host time to that of the same block run eagerly, one after the other."""

    forward: float = Field(ge=0.01, le=100.0)
    backward: float = Field(ge=0.01, le=100.0)
    kind: Kind
    source: Source
    date: DateText
    note: str | None = None


class GarbageCollector(Frozen):
    """Python's automatic garbage collection while a model trains."""

    share: float = Field(ge=0.0, le=1.0)
    """Time of the collections over the host time of the calls that cause them."""
    full: Seconds = Field(le=100.0)
    """One collection of all generations."""
    kind: Kind
    source: Source
    date: DateText
    note: str | None = None


class Host(Frozen):
    """Data of one kind of host and its framework (`data/hosts/*.yaml`).

    `like` names another host, whose times multiplied by `factor` are those of this one, but for the `calls`
    that were measured here (`moesim calibrate --model`); both hosts have the same ratios inside blocks.
    """

    name: str
    title: str
    cpu: str
    software: str
    calls: dict[CallKind, HostCall] = Field(default_factory=dict)
    in_block: dict[BlockFamily, InBlock] = Field(default_factory=dict)
    """Ratios by kind of block; `other` for the kinds that it leaves out."""
    compiled: dict[BlockFamily, CompiledBlock] = Field(default_factory=dict)
    """Further ratios of blocks that `torch.compile` compiled; `other` for the kinds that it leaves out."""
    spread: Annotated[SourcedFraction, ranges.SLOWNESS] | None = None
    """1, with the range of measured blocks' times over what calls and `other` give for them."""
    collector: GarbageCollector | None = None
    like: str | None = None
    factor: Annotated[SourcedFraction, ranges.SLOWNESS] | None = None
    """Time of a call here over its time on the host `like`."""
    note: str | None = None

    @model_validator(mode="after")
    def _has_times(self) -> Host:
        if (self.like is None) != (self.factor is None) or not (self.calls or self.like):
            raise ValueError("give either all calls, or like and factor, with those calls that were measured")
        missing = [kind for kind in get_args(CallKind) if self.like is None and kind not in self.calls]
        if missing:
            raise ValueError(f"calls has no time for {', '.join(missing)}; give one for every kind of call")
        return self

    def call_s(
        self, kind: CallKind, forward: bool, family: BlockFamily = "other", compiled: bool = False
    ) -> float:
        """Host seconds of one call in a block, or in a compiled one; raises InputError for unknown `like`."""
        base = self.measured()
        if self.factor is not None and kind not in self.calls:
            return self.factor.value * base.call_s(kind, forward, family, compiled)
        call = self.calls[kind]
        own = call.compiled if compiled and call.compiled else call
        seconds = own.forward if forward else own.backward
        if call.whole:
            return seconds
        tables = (base.in_block, base.compiled) if compiled else (base.in_block,)
        for ratios in tables:
            ratio = ratios.get(family, ratios.get("other"))
            if ratio is not None:
                seconds *= ratio.forward if forward else ratio.backward
        return seconds

    def measured(self) -> Host:
        """The host whose calls were all measured, which is this one or the one named by `like`.

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
