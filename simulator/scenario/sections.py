"""The sections of a scenario: batch, communication kernels, stages, routing, variation."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt, model_validator

from moesim.hwmodels import ranges
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.frozen import Section
from moesim.hwmodels.provenance import SourcedFraction
from moesim.hwmodels.validation import nearest
from moesim.simulator.model.dispatchers import dispatcher
from moesim.simulator.scenario import defaults as rules
from moesim.simulator.scenario.routing import Capacity, Eplb, Load
from moesim.simulator.schedules.template import OVERLAP_ORDERS, OverlapOrder


class Batch(Section):
    """Global batch of one step."""

    sequences: int = Field(gt=0, le=10_000_000_000)
    """Sequences of one step over the whole cluster."""
    sequence_length: int = Field(gt=0, le=100_000_000)
    """Tokens of one sequence."""


class Communication(Section):
    """Communication kernels: how many SMs they hold, which generation, what they overlap with."""

    sms: int = Field(
        rules.SMS,
        ge=0,
        description="SMs or compute units reserved for communication kernels. Absent: 20, and 0 on "
        "accelerators whose collectives a dedicated engine moves.",
    )
    kernels: str = Field(
        rules.KERNELS,
        description="Dispatcher that moves tokens to experts: deepep-2025-02, deepep-2025-04, hybridep, nccl "
        "(all-to-all), nccl-allgather, or a generation of one's own, which names the profile curve "
        "ep.nic_fraction.<kernels>. Absent: deepep-2025-02, in NVLink domains of more than 8 GPUs hybridep, "
        "and nccl where DeepEP does not run.",
    )
    fused_permutation: bool = False
    """`hybridep` also permutes rows into the order of the experts, and back, inside its own kernels
    (`moe_permute_fusion_into_hybridep` of Megatron core)."""
    overlap: str | OverlapOrder = "deepseek-v3"
    """Order of the phases inside an overlapped pair: a name or the two lists."""

    @property
    def by_nccl(self) -> bool:
        """Whether NCCL's collectives move the tokens of experts, in the place of expert-parallel kernels."""
        return dispatcher(self.kernels).transport in ("all-to-all", "all-gather")

    @property
    def order(self) -> OverlapOrder:
        """The overlap order itself."""
        if isinstance(self.overlap, OverlapOrder):
            return self.overlap
        if self.overlap not in OVERLAP_ORDERS:
            hint = nearest(self.overlap, list(OVERLAP_ORDERS))
            raise InputError(
                f"communication.overlap={self.overlap!r} is not known{hint}; "
                f"known: {', '.join(OVERLAP_ORDERS)}, or give compute and communication lists"
            )
        return OVERLAP_ORDERS[self.overlap]


class Stages(Section):
    """Which layers each pipeline stage holds.

    `layers`: decoder layers per stage, embedding on the first and MTP and head on the last; absent =
    balanced by the stages' compute. An inner stage with 0 layers only passes activations on. `mtp`: the
    stage of the MTP modules. `blocks`: explicit block kinds per stage ("moe*4"), which may be
    only a part of the model, as for a kernel-level test.
    """

    layers: tuple[int, ...] | None = None
    """Decoder layers per stage, 0 allowed; embedding on the first, MTP and head on the last; absent:
    balanced."""
    mtp: int | None = Field(
        None,
        ge=-10_000,
        le=10_000,
        description="With `layers`: the stage that holds the MTP modules, negative from the end (-2: the one "
        "before the loss). Absent: the last.",
    )
    blocks: tuple[str, ...] | None = None
    """Block kinds per stage ("moe*4") of embedding, dense, moe, mtp, head; may be a part of the model."""

    @model_validator(mode="after")
    def _one_way(self) -> Stages:
        if self.layers is not None and self.blocks is not None:
            raise ValueError("stages.layers and stages.blocks exclude each other: give one")
        if self.mtp is not None and self.layers is None:
            raise ValueError("stages.mtp needs stages.layers: give the layers of every stage")
        return self


class Routing(Section):
    """Which experts tokens go to: the gate, and how uneven the load is."""

    gate: Literal["model", "best", "top2-sum", "unlimited"] = "model"
    """`model`: as the model's config says; the others replace the score by which groups are ranked."""
    groups_per_token: PositiveInt | None = None
    """Expert groups (nodes, where a group is one) that a token reaches; absent: as the model's gate says."""
    expert_load_cv: Annotated[SourcedFraction, ranges.LOAD_SPREAD] = Field(
        default_factory=rules.default_spread("routing.expert_load_cv"),
        description="Coefficient of variation of the load of one expert within one micro-batch of one group. "
        "Absent: carried over from a published timeline, with a range; 0 without routed experts.",
    )
    load: Load | None = None
    """Lasting popularity of the experts of a layer; absent: all equal."""
    capacity: Capacity | None = None
    """Rows above it are dropped; absent: nothing is dropped."""
    eplb: Eplb | None = None
    """Redundant experts and their placement; absent: experts in order, one replica each."""

    @property
    def redundant_experts(self) -> int:
        """Replicas beyond one for each expert, in every layer of one expert-parallel group."""
        return 0 if self.eplb is None else self.eplb.redundant_experts


class Variation(Section):
    """What else makes ranks differ."""

    clock_cv: Annotated[SourcedFraction, ranges.SPEED_SPREAD] = Field(
        default_factory=rules.default_spread("variation.clock_cv"),
        description="Relative spread of the GPUs' sustained speed. Absent: as measured on H200, with a "
        "range.",
    )
    jitter_cv: Annotated[SourcedFraction, ranges.JITTER] = Field(
        default_factory=rules.default_spread("variation.jitter_cv"),
        description="Relative spread of one phase's duration from run to run on one GPU. Absent: as in a "
        "published timeline of an H800, with a range.",
    )
