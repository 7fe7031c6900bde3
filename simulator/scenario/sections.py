"""The sections of a scenario: batch, communication, stages, routing, faults, fleet, variation."""

from __future__ import annotations

from math import exp
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, PositiveInt, model_validator

from moesim.hwmodels import ranges
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.frozen import Section
from moesim.hwmodels.provenance import SourcedCount, SourcedFraction
from moesim.hwmodels.ranges import PartLeft
from moesim.hwmodels.validation import nearest
from moesim.simulator.dispatchers.registry import dispatcher
from moesim.simulator.scenario import defaults as rules
from moesim.simulator.scenario.outline import AnyCluster
from moesim.simulator.schedules.spec import default_order
from moesim.simulator.schedules.template import OVERLAP_ORDERS, OverlapOrder, joined_weight_gradients

# -- routing -----------------------------------------------------------------------------------------
# The `routing` section of a scenario: popularity of the experts, capacity, replicas.

Policy = Literal["hierarchical", "global"]


class UniformLoad(Section):
    """All experts equally popular."""

    kind: Literal["uniform"]
    """All experts equal; as without `routing.load`, but drawn expert by expert."""


class ZipfLoad(Section):
    """The r-th most popular expert has a share proportional to 1 / r^exponent."""

    kind: Literal["zipf"]
    exponent: Annotated[SourcedFraction, ranges.EXPONENT]
    """Exponent of the popularity."""
    shuffle_per_layer: bool = True
    """Every layer has its own order; false: expert 0 is the most popular one in all of them."""


class HistogramLoad(Section):
    """Recorded counts, a row a layer (or one row for all), or that for each of several steps."""

    kind: Literal["histogram"]
    file: str
    """Recorded counts: .csv, .npy or .json."""
    step: int = Field(0, ge=0)
    """Which recorded step is predicted."""


class BiasLoad(Section):
    """Auxiliary-loss-free balancing simulated up to a training step."""

    kind: Literal["bias"]
    affinity_spread: Annotated[SourcedFraction, ranges.LOAD_SPREAD]
    """Standard deviation of the experts' mean affinity, in that of one token's affinity to one expert."""
    drift_steps: SourcedCount
    """Steps over which those means are forgotten."""
    step: PositiveInt
    """Training step that is predicted, counted from unbiased routing at 0."""
    gamma: Annotated[SourcedFraction, ranges.SHARE] = SourcedFraction(
        value=0.001,
        kind="published",
        source="DeepSeek-V3 technical report, arXiv 2412.19437, section 4.2: bias update speed for the first "
        "14.3T tokens (0.0 for the last 500B)",
        date="2024-12",
    )
    """Update speed of the bias."""


class MaxVioLoad(Section):
    """Popularity whose busiest expert has a published excess (MaxVio), which may fall while training."""

    kind: Literal["maxvio"]
    max_vio: Annotated[SourcedFraction, ranges.MAX_VIO]
    """Rows of a layer's busiest expert over the mean, less 1 (arXiv 2408.15664, eq. 4), once training has
    settled."""
    start: Annotated[SourcedFraction, ranges.MAX_VIO] | None = None
    """The same at step 0; absent: it does not change."""
    settling_steps: SourcedCount | None = None
    """Steps after which the difference between `start` and `max_vio` has fallen to 1/e."""
    step: int = Field(0, ge=0, le=1_000_000_000)
    """Training step that is predicted."""

    @model_validator(mode="after")
    def _both_or_none(self) -> MaxVioLoad:
        if (self.start is None) != (self.settling_steps is None):
            raise ValueError("start and settling_steps belong together: give both, or neither")
        if self.step and self.start is None:
            raise ValueError(f"step={self.step} makes no difference without start and settling_steps")
        return self

    @property
    def now(self) -> float:
        """MaxVio at the step that is predicted (docs/model.md, eq. R10)."""
        if self.start is None or self.settling_steps is None:
            return self.max_vio.value
        left = exp(-self.step / self.settling_steps.value)
        return self.max_vio.value + (self.start.value - self.max_vio.value) * left


Load = Annotated[UniformLoad | ZipfLoad | HistogramLoad | BiasLoad | MaxVioLoad, Field(discriminator="kind")]


class Capacity(Section):
    """Rows above `factor` times the mean of an expert (or of a rank's experts together) are dropped."""

    factor: Annotated[SourcedFraction, ranges.CAPACITY]
    """Rows above this multiple of the mean are dropped; the share dropped is a warning of the result."""
    per: Literal["expert", "rank"] = "expert"
    """Whether the rows of an expert or those of a rank are counted."""


class Eplb(Section):
    """Expert-parallel load balancing: how many replicas, and how they are placed."""

    redundant_experts: int = Field(ge=0)
    """Replicas beyond one an expert, over one expert-parallel group; a multiple of `parallel.ep`."""
    policy: Policy = "hierarchical"
    """Groups of experts stay on one node, or all experts go anywhere."""
    groups: PositiveInt | None = None
    """Groups of experts that stay on one node (hierarchical); absent: those of the model's gate."""


# -- sections ----------------------------------------------------------------------------------------
# The sections of a scenario: batch, communication kernels, stages, routing, variation.


class Batch(Section):
    """Global batch of one step."""

    sequences: int = Field(gt=0, le=10_000_000_000)
    """Sequences of one step over the whole cluster."""
    sequence_length: int = Field(gt=0, le=100_000_000)
    """Tokens of one sequence."""


InNetwork: TypeAlias = Literal["none", "scale-up", "all"]
"""Where switches add up all-reduces."""


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
        description="Dispatcher that moves tokens to experts: deepep-2025-02, deepep-2025-04, hybridep, "
        "uccl-ep, deepep-low-latency and uccl-ep-low-latency (a copy straight to each expert), nccl "
        "(all-to-all), nccl-allgather, or kernels of one's own that the calibration profile names under "
        "`dispatchers`; other names are refused. Absent: deepep-2025-02, in NVLink domains of more than 8 "
        "GPUs hybridep, and nccl where DeepEP does not run.",
    )
    fused_permutation: bool = False
    """`hybridep` also permutes rows into the order of the experts, and back, inside its own kernels
    (`moe_permute_fusion_into_hybridep` of Megatron core)."""
    permutation_stream: Literal["compute", "communication"] | None = None
    """Stream on which rows are put into the order of the experts and back. Absent: `communication` where the
    dispatcher's own call does it (`hybridep`), else `compute`."""
    library_sms: int | None = Field(
        None,
        ge=0,
        le=1000,
        description="SMs that the library's data-parallel collectives hold beside compute: 1 to 6 with "
        "registered user buffers on switches that reduce (Megatron-FSDP's `nccl_ub`). Absent: as measured, "
        "with 24.",
    )
    in_network: InNetwork = "none"
    """All-reduces that switches add up: `scale-up`, inside a domain (NCCL's NVLS); `all`, in the switches of
    the network too (NVLS and SHARP). Gathers and scatters move the same bytes either way."""
    overlap: str | OverlapOrder = "schedule"
    """Order of the phases inside an overlapped pair: a name, or the two lists with their source. `schedule`:
    that of the framework whose schedule it is (`megatron` for interleaved-1f1b-overlapped, else
    `deepseek-v3`)."""
    delay_weight_gradients: bool = True
    """In pairs, weight gradients are computed apart from input gradients, so that transfers do not wait for
    them (Megatron core's `delay_wgrad_compute`)."""
    overlap_shared_experts: bool = False
    """Outside of pairs, shared experts run beside the transfers of routed ones, on the SMs that these leave
    (Megatron core's `moe_shared_expert_overlap`)."""
    gemm_margin: int | None = Field(
        None,
        ge=0,
        le=100_000,
        description="SMs that every GEMM leaves free at all times, also where no transfer runs "
        "(`NVTE_EXT_MARGIN_SM`). Absent: `sms` inside pairs and none elsewhere, as in DeepSeek-V3.",
    )

    @property
    def permutes_on_stream(self) -> bool:
        """Whether the kernels that permute rows run on the stream of the transfers."""
        if self.permutation_stream is None:
            return dispatcher(self.kernels).permutes_in_call
        return self.permutation_stream == "communication"

    def order_of(self, schedule: str) -> OverlapOrder:
        """The overlap order in the pairs of a schedule. Raises InputError for an unknown name."""
        order = self.overlap if isinstance(self.overlap, OverlapOrder) else self._named(schedule)
        if self.delay_weight_gradients:
            return order
        return order.model_copy(
            update={"weight_gradients": "with-input", "compute": joined_weight_gradients(order.compute)}
        )

    def _named(self, schedule: str) -> OverlapOrder:
        name = default_order(schedule) if self.overlap == "schedule" else self.overlap
        if name not in OVERLAP_ORDERS:
            hint = nearest(str(name), list(OVERLAP_ORDERS))
            raise InputError(
                f"communication.overlap={name!r} is not known{hint}; "
                f"known: schedule, {', '.join(OVERLAP_ORDERS)}, or give compute and communication lists"
            )
        return OVERLAP_ORDERS[str(name)]


class Stages(Section):
    """Which layers each pipeline stage holds.

    `layers`: decoder layers per stage, embedding on the first and MTP and head on the last; absent =
    balanced by the stages' compute and transfers. An inner stage with 0 layers only passes activations on.
    `mtp`: the stage of the MTP modules. `blocks`: explicit block kinds per stage ("moe*4"), which may be
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
    power_clock: Literal["load", "full-load"] = "load"
    """Clock of GEMMs and attention, where the profile has a power law: `load`, that which the power of the
    block's own mix of kernels and waits leaves (eq. C33); `full-load`, that of kernels of one class back to
    back."""


# -- faults ------------------------------------------------------------------------------------------
# The `faults` section of a scenario: slow GPUs, slow or dead links, lost nodes and jitter.

Gpus = Annotated[int, Field(ge=0)] | tuple[Annotated[int, Field(ge=0)], ...]


class SlowGpu(Section):
    """GPUs whose compute runs at a fraction of its speed (thermal or power throttling)."""

    kind: Literal["slow-gpu"]
    gpu: Gpus
    """Number of a GPU, or a list."""
    speed: PartLeft
    """Share of its speed."""

    def __str__(self) -> str:
        """For tables."""
        return f"slow-gpu {listed(self.gpu)} at {self.speed:.3g} of its speed"


class Jitter(Section):
    """GPUs whose phases vary in length from run to run, beyond `variation.jitter_cv`."""

    kind: Literal["jitter"]
    gpu: Gpus | Literal["all"]
    """Number, list or `all`."""
    cv: Annotated[float, Field(gt=0.0, le=1.0)]
    """Coefficient of variation added to its phases."""

    def __str__(self) -> str:
        """For tables."""
        return f"jitter of {listed(self.gpu)}, cv {self.cv:.3g}"


class SlowLink(Section):
    """A link, NIC, switch or plane at a fraction of its bandwidth; `link` as in docs/scenario.md."""

    kind: Literal["slow-link"]
    link: str
    """Which link; see below."""
    bandwidth: PartLeft
    """Share of its bandwidth."""

    def __str__(self) -> str:
        """For tables."""
        return f"slow-link {self.link} at {self.bandwidth:.3g} of its bandwidth"


class Down(Section):
    """A link, NIC, switch or plane that carries nothing; traffic goes around it where there is a way."""

    kind: Literal["down"]
    link: str
    """Which link; see below."""

    def __str__(self) -> str:
        """For tables."""
        return f"{self.link} down"


class NodeLoss(Section):
    """A node that stopped: the pipelines through it stop, the others do the step without them."""

    kind: Literal["node-loss"]
    node: Annotated[int, Field(ge=0)]
    """Number of the node."""

    def __str__(self) -> str:
        """For tables."""
        return f"node {self.node} lost"


Fault = Annotated[SlowGpu | Jitter | SlowLink | Down | NodeLoss, Field(discriminator="kind")]


def listed(gpu: int | tuple[int, ...] | str) -> str:
    """Format GPU numbers as text."""
    if gpu == "all":
        return "all GPUs"
    numbers = (gpu,) if isinstance(gpu, int) else gpu
    return "GPU " + ", ".join(map(str, numbers))


# -- fleet -------------------------------------------------------------------------------------------
# The `fleet` section of a scenario, which lists the clusters that share the pipeline of one job.


class Pool(Section):
    """A cluster, or some of its nodes; keys that are left out have the values of the scenario.

    A pool holds pipeline ranks in proportion to its GPUs, because every rank of a job has the same number.
    """

    cluster: AnyCluster = Field(description="As the scenario's cluster.")
    nodes: PositiveInt | None = None
    """Nodes of the cluster that the job has; absent: all."""
    profile: str | None = Field(
        None,
        description="Calibration profile. Absent: the scenario's, or where that is left out too the best "
        "shipped one of this pool's accelerator.",
    )
    communication_sms: int | None = Field(
        None, ge=0, description="SMs of the communication kernels. Absent: communication.sms."
    )


class Fleet(Section):
    """Pools in the order of the pipeline: the first ranks are on the first pool."""

    pools: tuple[Pool, ...] = Field(min_length=2)
    """Two or more pools."""
