"""What a dispatcher answers: bytes, seconds alone, operators around it, buffers, SMs, limits and refusals.

The rest of the simulator asks these questions and knows no dispatcher by name. A dispatcher is a frozen
value, and its methods are pure, apart from the `Meter`, which records what they read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from msgspec import Struct

from moesim.hwmodels.accelerator import Accelerator
from moesim.hwmodels.calibration import CalibrationProfile, MeasuredCurve
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.node import Node
from moesim.hwmodels.provenance import SourcedCount
from moesim.hwmodels.topologies.description import SWITCHED, ScaleUpShares
from moesim.simulator.common.bounded_cache import BoundedCache, Same
from moesim.simulator.model.operator import Operator, Phase
from moesim.simulator.model.precision import Format
from moesim.simulator.model.shape import ModelShape

EpOperation = Literal["dispatch", "combine"]
Collective = Literal["all_to_all", "all_gather", "reduce_scatter"]
Operators = Mapping[Phase, tuple[Operator, ...]]

EFA = ("efa-v2", "efa-v3", "efa-v4")
"""Adapters with curves of their own (`hwmodels/data/calibration/efa-kernels.yaml`)."""
NOTIFY_ROUNDS = 2
"""Latency-bound exchanges before every payload: the counts, then a barrier (DeepEP notify_dispatch)."""

# -- bytes -----------------------------------------------------------------------------------------------


class TargetStatistics(Struct, frozen=True):
    """Expected numbers of targets of one token; a target counts once however many of its experts are chosen.

    `distinct_nodes` and `distinct_gpus` include the token's own node and GPU where they are targets;
    `distinct_remote_nodes` leaves them out. `gpus_per_node` is the number of EP ranks that share a node.
    """

    distinct_nodes: float
    distinct_gpus: float
    distinct_remote_nodes: float
    nodes: int
    gpus_per_node: int


class LinkBytes(Struct, frozen=True):
    """Bytes that one GPU sends in one dispatch, or receives in one combine, per class of link.

    A token crosses IB once for each distinct remote node, to the GPU with the sender's index there,
    and NVLink once for each distinct target GPU with another index (DeepSeek-V3 report, section 3.2.2).
    The `logical` counts are those of DeepEP's own bandwidth figures: local node and own rank included,
    and no IB at all inside one node.
    """

    ib_bytes: float
    nvlink_bytes: float
    local_copy_bytes: float
    """Bytes to the target with the sender's own index in a node, copied in HBM without using a link."""
    logical_ib_bytes: float
    logical_nvlink_bytes: float


def transfer_bytes(targets: TargetStatistics, tokens: float, bytes_per_row: float) -> LinkBytes:
    """Return the bytes of one dispatch or combine of `tokens` tokens per rank, `bytes_per_row` each (eq. X1).

    A combine sends along the paths of a dispatch in reverse, and so does the backward pass of either.
    """
    rows = tokens * targets.distinct_gpus * bytes_per_row
    same_index = 1.0 / targets.gpus_per_node
    return LinkBytes(
        ib_bytes=tokens * targets.distinct_remote_nodes * bytes_per_row,
        nvlink_bytes=rows * (1.0 - same_index),
        local_copy_bytes=rows * same_index,
        logical_ib_bytes=tokens * targets.distinct_nodes * bytes_per_row if targets.nodes > 1 else 0.0,
        logical_nvlink_bytes=rows,
    )


def direct_bytes(tokens: float, top_k: float, ranks: int, per_node: int, bytes_per_row: float) -> LinkBytes:
    """Bytes of one dispatch or combine that sends every chosen expert its own copy of a row (eq. X28).

    `ranks` share the experts evenly, `per_node` of them a node; copies for other nodes leave by RDMA straight
    to their rank.
    """
    rows = tokens * top_k * bytes_per_row
    return LinkBytes(
        ib_bytes=rows * (ranks - per_node) / ranks,
        nvlink_bytes=rows * (per_node - 1) / ranks,
        local_copy_bytes=rows / ranks,
        logical_ib_bytes=rows if ranks > per_node else 0.0,
        logical_nvlink_bytes=rows,
    )


class Links(Struct, frozen=True):
    """Nominal rates per GPU and direction, and one-way latencies, of the links that a transfer may use.

    `nic_bytes_per_s` is 0 where the node has no network (a single node).
    """

    scale_up_bytes_per_s: float
    scale_up_latency_s: float
    nic_bytes_per_s: float
    nic_latency_s: float
    gpus_per_node: int
    curves: str = ""
    """Prefix of the ids of the share curves: "engine." where a dedicated engine moves the payload."""
    wiring: ScaleUpShares = SWITCHED
    """Shares of `scale_up_bytes_per_s` that a group can use."""
    in_network: str = "none"
    """Where switches add up all-reduces (`communication.in_network`)."""
    architecture: str = ""
    """Architecture of the GPUs, for figures of the library that depend on it."""
    ep_per_node: int = 1
    """Members of an expert-parallel group on one node."""
    adapter: str = ""
    """Kind of the NICs where curves of their own describe them, such as `efa-v4`."""


def fastest_seconds(traffic: LinkBytes, links: Links) -> float:
    """Seconds of a transfer at the nominal rates of its links, of which no kernel is faster."""
    nic_s = traffic.ib_bytes / links.nic_bytes_per_s if traffic.ib_bytes else 0.0
    return max(nic_s, traffic.nvlink_bytes / links.scale_up_bytes_per_s)


def notify_seconds(links: Links, nodes: int) -> float:
    """Latency of the notify kernel after the last rank arrived: two exchanges over each fabric it spans.

    Source: latency of one exchange from the network description (ISCA 2025 Table 5); eq. X3.
    """
    return NOTIFY_ROUNDS * (links.scale_up_latency_s + (links.nic_latency_s if nodes > 1 else 0.0))


# -- seconds ---------------------------------------------------------------------------------------------


class Call(Struct, frozen=True):
    """A rank of an expert-parallel group, with what it sends in one dispatch or combine of a micro-batch."""

    ranks: int
    nodes: int
    """NVLink domains of the group."""
    sms: int
    """SMs of the communication kernels (`communication.sms`)."""
    tokens: float = 0.0
    """Tokens that the rank sends or gets back."""
    row: int = 0
    """Elements of a row."""
    row_bytes: float = 0.0
    """Bytes of one row on the wire; with 0, rows cost nothing beyond their bytes."""
    wire: Format = "bf16"
    """Format of a row on the wire."""
    experts: int = 0
    local_experts: float = 1.0
    """Experts of the rank, with replicas."""
    choices: float = 1.0
    """Expert rows that a token becomes."""
    targets: Callable[[], TargetStatistics] | None = None
    """Expected distinct targets of a token, counted where a dispatcher asks; None where bytes are given."""
    fused: bool = False
    """Whether the kernels also permute rows (`communication.fused_permutation`)."""
    phase: Phase = "dispatch F"

    @property
    def operation(self) -> EpOperation:
        """Whether rows go out to the experts, as in the backward of a combine too, or come back."""
        return "dispatch" if self.phase in ("dispatch F", "combine B") else "combine"

    @property
    def local(self) -> int:
        """Ranks of the group in one NVLink domain."""
        return self.ranks // self.nodes


class CollectiveTime(NamedTuple):
    """Seconds of a collective of the library on its two paths, the bytes that a GPU sends, relative error."""

    nic_s: float
    scale_up_s: float
    residual: float
    nic_bytes: float
    scale_up_bytes: float


class TransferTime(NamedTuple):
    """Seconds of a dispatch or combine alone on its links, before compute beside it slows it down."""

    launch_s: float
    """What comes after the last rank arrived and before the payload."""
    nic_s: float
    scale_up_s: float
    """Payload on either path, which run at the same time."""
    best_s: float
    """Payload at the nominal rates of the links, of which no kernel is faster."""
    residual: float
    """Relative error of the payload."""
    call_error_s: float = 0.0
    """Seconds that the call may take longer."""
    before: tuple[tuple[str, CollectiveTime], ...] = ()
    """Collectives inside `launch_s`, by what they move."""


IN_THE_RATE = ("call_time", "token_time", "token_rate", "row_time", "row_rate", "ragged_factor")
"""Figures that the rate of kernels measured as a whole contains."""

_CURVES: BoundedCache[Mapping[str, MeasuredCurve]] = BoundedCache(64)
"""Curves by id of the profiles that were read before."""


class Meter:
    """Reads curves for one dispatcher and records them; `cost` adds the collectives of the library."""

    def __init__(self, kind: Dispatcher, links: Links, profile: CalibrationProfile) -> None:
        """Begin without any curve read."""
        self._kind, self._profile, self.links = kind, profile, links
        self._curves = _CURVES.get(Same(profile), lambda: {entry.id: entry for entry in profile.curves})
        self.used: list[str] = []
        self.reads: list[tuple[str, float]] = []
        self.notes: list[str] = []
        """Assumptions, and readings outside the measured range."""

    def has(self, curve_id: str) -> bool:
        """Whether `read` finds a curve for an id."""
        return self._id(curve_id) is not None

    def curve(self, curve_id: str) -> MeasuredCurve:
        """The curve of the dispatcher itself, else of its family, of any, or of the family that stands in.

        Each is looked for on the job's adapter first. Raises InputError without any of them.
        """
        found = self._id(curve_id)
        return self._profile.curve(curve_id) if found is None else self._curves[found]

    def _id(self, curve_id: str) -> str | None:
        kind, present = self._kind, self._curves
        names = [f"{curve_id}.{kind.name}", *([f"{curve_id}.{kind.curves}"] if kind.curves else []), curve_id]
        operation, _, figure = curve_id.removeprefix("ep.").partition(".")
        rate = f"ep.{operation}.sm_rate"
        whole = f"{rate}.{kind.name}" in present or rate in present
        if kind.stand_in and not (figure in IN_THE_RATE and whole):
            names.append(f"{curve_id}.{kind.stand_in}")
        if self.links.adapter:
            names = [*(f"{name}.{self.links.adapter}" for name in names), *names]
        return next((name for name in names if name in present), None)

    def read(self, curve_id: str, x: float, note: str = "") -> tuple[float, float]:
        """Value at x and the curve's relative error; `note` replaces the usual text for an extrapolation."""
        curve = self.curve(curve_id)
        reading = curve.curve.at(x)
        self.used.append(curve.id)
        self.reads.append((curve.id, x))
        if reading.extrapolated:
            self.notes.append(note or reading.note)
        return reading.value, curve.residual.relative

    def notify_s(self, nodes: int) -> float:
        """Seconds of the exchange of counts before a payload over `nodes` domains (eq. X3)."""
        return notify_seconds(self.links, nodes)

    def nic(self, curve_id: str, moved: LinkBytes, nodes: int) -> tuple[float, float]:
        """Seconds of the bytes between nodes at a curve's share of the NIC rate, and its relative error.

        Both are 0 where nothing leaves the node.
        """
        if not moved.ib_bytes:
            return 0.0, 0.0
        share, residual = self.read(curve_id, nodes)
        return moved.ib_bytes / (share * self.links.nic_bytes_per_s), residual

    def scale_up_s(self, moved: LinkBytes, fraction: float) -> float:
        """Seconds of the bytes inside a domain at a fraction of what its wiring carries in an all-to-all."""
        wired = fraction * self.links.wiring.all_to_all(self.links.ep_per_node)
        return moved.nvlink_bytes / (wired * self.links.scale_up_bytes_per_s)

    def fastest_s(self, moved: LinkBytes) -> float:
        """Seconds at the nominal rates of the links."""
        return fastest_seconds(moved, self.links)

    def collective(self, name: Collective, size: float, call: Call) -> CollectiveTime:
        """A collective of the library over the group (eqs. X5, O6).

        `size`: bytes that a rank sends in an all-to-all, else those of all ranks together.
        """
        raise NotImplementedError


def sm_rate(call: Call, meter: Meter) -> tuple[float, float]:
    """Bytes/s that the communication SMs move, and the relative error of that rate.

    Below the fewest measured SMs the rate is proportional to their number, and a note says so. Raises
    InputError for 0 SMs where the kernels need some (their SM curve does not begin at 0).
    """
    name, sms = f"ep.{call.operation}.sm_rate", call.sms
    rate = meter.curve(name)
    fewest = rate.curve.xs[0]
    if sms < 1 and fewest > 0.0:
        raise InputError(
            f"communication.sms={sms}: expert-parallel kernels need at least 1 communication SM "
            "(DeepEP uses 20 to 24); set communication.sms, or parallel.ep=1"
        )
    if sms >= fewest:
        return meter.read(name, sms)
    note = (
        f"{rate.id}: {sms} communication SMs are below the measured {fewest:g}; each is taken to move as "
        f"much as one of {fewest:g}"
    )
    most, residual = meter.read(name, sms, note)  # the rate of more SMs, which would be too high
    return most * (sms / fewest), residual


# -- operators around a dispatcher -----------------------------------------------------------------------

EXPANDS = ("experts.expand", "experts.expand_gradient")
REDUCES = ("experts.reduce", "experts.reduce_gradient")
INDICES = ("experts.count", "experts.mapping")
LAYOUT = "dispatch.layout"

_STREAM_PHASES: tuple[tuple[Phase, tuple[str, ...], Phase], ...] = (
    ("mlp F", EXPANDS, "dispatch F"),
    ("mlp F", REDUCES, "combine F"),
    ("mlp I", EXPANDS, "combine B"),
    ("mlp I", REDUCES, "dispatch B"),
)
"""Where the permutations of a phase of the experts go that run on the stream of the transfers."""


def on_stream(operators: Operators) -> dict[Phase, tuple[Operator, ...]]:
    """Move the permutations of rows to the transfers whose stream they run on.

    Hybrid-EP permutes behind a dispatch and before a combine. A phase of a transfer holds its kernels before
    the transfer, so those of a dispatch are priced there too: the stream is as long. Repeated ones stay.
    """
    out = dict(operators)
    for source, names, target in _STREAM_PHASES:
        if target in out:
            moved = tuple(op for op in out[source] if op.name in names)
            out[source] = tuple(op for op in out[source] if op.name not in names)
            out[target] = (*out[target], *moved)
    return out


# -- buffers ---------------------------------------------------------------------------------------------


class ExpertBuffers(Struct, frozen=True):
    """Bytes of a dispatcher's two buffers, with a `note` where the ring sizes were extrapolated."""

    nvlink_bytes: int = 0
    rdma_bytes: int = 0
    note: str | None = None

    @property
    def total_bytes(self) -> int:
        """Bytes of both buffers."""
        return self.nvlink_bytes + self.rdma_bytes


def round_up(size: int) -> int:
    """Bytes of a buffer of which every part begins at a multiple of 128."""
    return -(-size // 128) * 128


# -- the dispatcher --------------------------------------------------------------------------------------


class PublishedSms(Struct, frozen=True):
    """Range of SMs with which the authors of a dispatcher tune, test and publish it."""

    least: SourcedCount
    most: SourcedCount
    step: int = 4
    """Step of the numbers that a search tries: two channels of DeepEP, each with two SMs."""

    @property
    def tried(self) -> tuple[int, ...]:
        """Numbers of SMs that a search tries, from the least to the most."""
        return (*range(self.least.n, self.most.n, self.step), self.most.n)

    @property
    def fewer(self) -> int:
        """Half of the least number, made even: the saving that a note of a search names."""
        return self.least.n // 4 * 2


def published(value: int, source: str, date: str) -> SourcedCount:
    """A count that the authors of a dispatcher publish."""
    return SourcedCount(value=value, kind="published", source=source, date=date)


@dataclass(frozen=True)
class Dispatcher:
    """A value of `communication.kernels`: how it moves tokens, and the limits that its authors publish.

    The base sends a token once to each domain by RDMA and once to each GPU inside, has no buffers, and leaves
    the operators of a block as they are. None and empty are no limit.
    """

    name: str
    curves: str = ""
    """Suffix of the profile's curves that kernels of one family share; empty where each has its own."""
    stand_in: str = ""
    """Family of kernels whose curves stand for those that a profile does not have for these."""
    words: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Word with which the arguments of a trainer choose it, by trainer; those without it do not run it."""
    by_library: bool = False
    """Whether collectives of the library move the tokens, in the place of expert-parallel kernels."""
    architectures: tuple[str, ...] = ()
    """Architectures of accelerators that it runs on; empty: all."""
    domain_ranks: SourcedCount | None = None
    """Most ranks of a group inside one NVLink domain."""
    domains: SourcedCount | None = None
    """Most NVLink domains of a group."""
    whole_domains: bool = False
    """Whether a group of several domains must have exactly `domain_ranks` ranks in each."""
    host_threads: int = 0
    """Threads of the host that poll for a GPU all the time, over adapters with curves of their own (L5)."""
    adapters: tuple[str, ...] = ("", *EFA)
    """Kinds of NICs over which it runs and is priced: "" for InfiniBand and RoCE, or an adapter's name."""
    tokens_across: SourcedCount | None = None
    """Most tokens of a rank where the group has several domains."""
    row_widths: tuple[int, ...] = ()
    """Elements of a row for which its kernels are compiled; empty: all."""
    most_choices: SourcedCount | None = None
    """Most experts that a token may choose."""
    fills_the_gpu: bool = False
    """Whether its kernels take almost all SMs while they run, so that nothing computes beside them."""
    pads_rows: bool = False
    """Whether its permutation pads the rows of each expert, so that no further kernel does."""
    fuses_permutation: bool = False
    """Whether its kernels can permute rows themselves (`communication.fused_permutation`)."""
    permutes_in_call: bool = False
    """Whether dispatch and combine also launch the kernels that permute rows, on the stream of the call."""
    sms: PublishedSms | None = None
    """Numbers of SMs with which it was published."""

    # -- what it moves, for how long, and what it leaves to others ---------------------------------------

    def traffic(self, call: Call) -> LinkBytes:
        """Bytes of a call by class of link (eq. X1)."""
        assert call.targets is not None, "the bytes of two hops depend on the targets of a token"
        return transfer_bytes(call.targets(), call.tokens, call.row_bytes)

    def seconds(self, call: Call, moved: LinkBytes, meter: Meter) -> TransferTime:
        """Seconds of a call that moves these bytes, alone on its links.

        Raises InputError where a curve is missing.
        """
        raise NotImplementedError

    def benchmark_s(self, launch_s: float, payload_s: float, notify_s: float, copy_s: float | None) -> float:
        """Seconds that its published benchmark states for a call.

        `notify_s`: the part of `launch_s` for the exchange of counts. `copy_s`: copies by the Python
        interface; None where the benchmark times the kernel alone.
        """
        return launch_s + payload_s

    def permuted(self, op: Operator, base: str, call: Call) -> tuple[Operator, ...]:
        """What stands for one operator of a block beside this dispatcher (eq. O15); `base`: its name.

        The operators of a block are those of DeepEP: tokens arrive once, and a kernel copies them into the
        order of the experts.
        """
        return (op,)

    def operators(self, operators: Operators, call: Call) -> dict[Phase, tuple[Operator, ...]]:
        """The operators of a block with the permutations that the dispatcher leaves to other kernels."""
        return {
            phase: tuple(
                new for op in ops for new in self.permuted(op, op.name.removesuffix(".recompute"), call)
            )
            for phase, ops in operators.items()
        }

    def buffers(self, call: Call) -> ExpertBuffers:
        """Bytes of its buffers, in BF16, on a GPU (eqs. M12, M13); none without expert parallelism."""
        return self.own_buffers(call) if call.ranks > 1 else ExpertBuffers()

    def own_buffers(self, call: Call) -> ExpertBuffers:
        """Bytes of its buffers for a group of several ranks."""
        return ExpertBuffers()

    # -- where it does not run ---------------------------------------------------------------------------

    def refuses(self, accelerator: Accelerator) -> str | None:
        """Why its kernels are not written for an accelerator; None if they are.

        A dedicated communication engine needs none of them.
        """
        if accelerator.communication_engine is not None or not self.architectures:
            return None
        if accelerator.architecture in self.architectures:
            return None
        where = ", ".join(self.architectures)
        return f"it runs on {where}, and {accelerator.name} is {accelerator.architecture}"

    def refuses_group(
        self, accelerator: Accelerator, ranks: int, nodes: int, adapter: str = ""
    ) -> str | None:
        """Why it does not run with groups of `ranks` ranks over `nodes` domains; None if it does.

        `adapter`: kind of the NICs between them, as in `adapters`.
        """
        local, elsewhere = ranks // nodes, self.refuses(accelerator)
        if elsewhere is not None:
            return elsewhere
        most = None if self.domain_ranks is None else self.domain_ranks.n
        if most is not None and local > most:
            return f"it has at most {most} ranks in one NVLink domain, and the group has {local}"
        if self.whole_domains and most is not None and nodes > 1 and local < most:
            return f"across domains it needs {most} ranks of the group in each NVLink domain, not {local}"
        if nodes > 1 and adapter not in self.adapters:
            known = ", ".join(name or "InfiniBand and RoCE" for name in self.adapters)
            return f"nobody published it over {adapter or 'InfiniBand or RoCE'}, only over {known}"
        if self.domains is not None and nodes > self.domains.n:
            return f"it has at most {self.domains.n} NVLink domains in a group, and the group has {nodes}"
        return None

    def refuses_model(self, shape: ModelShape, schedule: str, paired: bool) -> str | None:
        """Why its kernels are not written for a model or schedule; None if they are.

        `paired`: the schedule overlaps transfers with the compute of another micro-batch.
        """
        if shape.moe is None:
            return None
        if self.row_widths and shape.routed_width not in self.row_widths:
            widths = ", ".join(f"{width:,}" for width in self.row_widths)
            return f"its kernels are compiled for rows of {widths} elements, not {shape.routed_width:,}"
        if self.most_choices is not None and shape.moe.top_k > self.most_choices.n:
            return f"a token may choose {self.most_choices.n} experts, not {shape.moe.top_k}"
        if self.fills_the_gpu and paired:
            return f"its kernels fill the GPU, and schedule={schedule} computes beside transfers"
        return None

    def serves(self, node: Node, nodes: int) -> bool:
        """Whether it serves NVLink domains of `node`, of which a cluster has `nodes`.

        One domain may have fewer GPUs than `domain_ranks`; several may not where it needs whole ones.
        """
        if node.accelerator.communication_engine is not None or self.domain_ranks is None:
            return True
        size, most = node.n_gpus, self.domain_ranks.n
        return size == most or (size < most and (nodes == 1 or not self.whole_domains))
