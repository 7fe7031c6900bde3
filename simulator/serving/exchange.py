"""Exchange between the ranks of a serving replica: experts, sums and gathers, cache transfers.

Every function returns the seconds of one call alone on its links, with what it occupies. Dispatch and combine
take the curves of `simulator.dispatchers`; sums of few bytes run in one kernel that reads all peers.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

from msgspec import Struct

from moesim.hwmodels.calibration import CalibrationProfile, load_profile
from moesim.hwmodels.cluster import Cluster
from moesim.hwmodels.errors import InputError
from moesim.simulator.cost.evidence import CostedSeconds, Evidence
from moesim.simulator.cost.library_collectives import RingOperation, ring_price
from moesim.simulator.cost.transfers import dispatcher_transfer
from moesim.simulator.dispatchers.protocol import Call, EpOperation, Links, direct_bytes, notify_seconds
from moesim.simulator.dispatchers.registry import dispatcher
from moesim.simulator.layout.routing import Gate, expected_targets
from moesim.simulator.model.feed_forward.moe import MoE
from moesim.simulator.model.precision import Format, row_bytes
from moesim.simulator.serving.prices import laws

NORMAL = "deepep-2025-04"
LINKS_PROFILE = "generic-roofline"
"""Shipped profile whose curves of links stand for those that a scenario's own profile does not have."""


class Exchange(NamedTuple):
    """One call: seconds in all, those in which its kernels hold `sms` SMs, and the ends of its error."""

    name: str
    cost: CostedSeconds
    busy_s: float
    sms: int
    low_s: float
    high_s: float

    @property
    def seconds(self) -> float:
        """Seconds alone on its links."""
        return self.cost.seconds


class Fabric(Struct, frozen=True, dict=True):
    """Links between the GPUs of a replica on a cluster, and the curves that price them."""

    cluster: Cluster
    profile: CalibrationProfile

    @cached_property
    def curves(self) -> CalibrationProfile:
        """The scenario's profile where it has curves of links, else the shipped ones."""
        own = any(curve.id == "collective.scale_up_fraction" for curve in self.profile.curves)
        return self.profile if own else load_profile(LINKS_PROFILE)

    @property
    def pcie(self) -> bool:
        """Whether the cards have no links but PCIe."""
        return self.cluster.accelerator.scale_up_bandwidth is None

    def nodes_of(self, ranks: int) -> int:
        """NVLink domains that `ranks` consecutive ranks span."""
        return -(-ranks // self.cluster.node.n_gpus)

    @cached_property
    def scale_up_bytes_per_s(self) -> float:
        """Nominal rate of a GPU inside a node; raises InputError for a card without any link."""
        card = self.cluster.accelerator
        if card.scale_up_bandwidth is not None:
            return card.scale_up_bandwidth.value
        if card.host_bandwidth is None:
            raise InputError(
                f"accelerator {card.name!r} has neither scale_up_bandwidth nor host_bandwidth; "
                "add one, with its source, to its file"
            )
        return card.host_bandwidth.value

    def links(self, ranks: int) -> Links:
        """Links of a group of `ranks` consecutive ranks."""
        node, fabric = self.cluster.node, self.cluster.network.fabric
        return Links(
            scale_up_bytes_per_s=self.scale_up_bytes_per_s,
            scale_up_latency_s=node.scale_up_latency_s,
            nic_bytes_per_s=self.cluster.nic_bytes_per_s,
            nic_latency_s=fabric.latency_cross_leaf.value if fabric else 0.0,
            gpus_per_node=node.n_gpus,
            wiring=node.scale_up_shares,
            architecture=self.cluster.accelerator.architecture,
            ep_per_node=max(ranks // self.nodes_of(ranks), 1),
            adapter=node.adapter or "",
        )


def _exact(name: str, cost: CostedSeconds, sms: int, error: float) -> Exchange:
    s = cost.seconds
    return Exchange(name, cost, s if sms else 0.0, sms, s * (1.0 - error), s * (1.0 + error))


NOTHING = CostedSeconds()


def _by_law(
    fabric: Fabric,
    family: str,
    name: str,
    scale_up: float,
    nic: float = 0.0,
    *,
    sms: int = 0,
    busy: bool = False,
) -> Exchange:
    """A call that sends bytes over both kinds of link at once, by a law of the exchange (eq. Q5).

    With `busy`, its kernels hold all SMs for the call alone.
    """
    law = laws(fabric.profile)[family]
    call_s = law.call_us * 1e-6
    seconds = call_s + scale_up / (law.bandwidth * fabric.scale_up_bytes_per_s)
    if nic:
        seconds = max(seconds, call_s + nic / (law.peak * fabric.cluster.nic_bytes_per_s))
    notes = [f"{law.id}: assumed"] if law.kind == "assumed" else []
    cost = CostedSeconds(seconds, Evidence.of([law.id], notes), nic, scale_up)
    error = law.residual.on(fabric.cluster.accelerator.architecture).relative * seconds
    held = fabric.cluster.accelerator.n_sms if busy else sms
    return Exchange(
        name, cost, call_s if busy else seconds if sms else 0.0, held, seconds - error, seconds + error
    )


LAW_LINK = 450e9
"""NVLink of the cards behind the laws `*-normal-nodes` (H100), bytes/s."""


# -- experts -----------------------------------------------------------------------------------------


def expert_exchange(
    fabric: Fabric,
    moe: MoE,
    hidden: int,
    ranks: int,
    tokens: float,
    operation: EpOperation,
    *,
    low_latency: bool,
    sms: int = 20,
    wire: Format | None = None,
    redundant: int = 0,
    gate: Gate | None = None,
) -> Exchange:
    """A dispatch or combine of `tokens` tokens a rank over `ranks` ranks (eqs. X2, X29).

    Rows go out in FP8 and come back in BF16 unless `wire` says otherwise. Low-latency kernels with a
    receiving hook hold SMs for their call alone, not while rows travel; normal ones hold `sms` all the time.
    `gate`: by which a token's targets are counted, where not the model's. Over PCIe rows go from card to
    card, one after the other.
    """
    fmt: Format = wire or ("fp8" if operation == "dispatch" else "bf16")
    row = moe.row_width(hidden)
    if ranks == 1 or not tokens:
        return _exact(operation, NOTHING, 0, 0.0)
    nodes = fabric.nodes_of(ranks)
    rows = direct_bytes(tokens, moe.routed_rows, ranks, ranks // nodes, row_bytes(row, fmt))
    if fabric.pcie:
        return _by_law(fabric, "pcie", operation, rows.nvlink_bytes, sms=PCIE_SMS)
    if low_latency:
        family = f"{operation}-low-latency{'-nodes' if nodes > 1 else ''}"
        sent = _by_law(fabric, family, operation, rows.nvlink_bytes, rows.ib_bytes, busy=True)
        # Between nodes a call waits for the network too, which holds no SM: its kernels are those of a node.
        return sent._replace(busy_s=laws(fabric.profile)[f"{operation}-low-latency"].call_us * 1e-6)
    gate, links = gate or _gate(moe, ranks), fabric.links(ranks)
    kind = dispatcher(NORMAL)
    call = Call(
        ranks=ranks, nodes=nodes, sms=sms, tokens=tokens, row=row, row_bytes=row_bytes(row, fmt), wire=fmt,
        experts=moe.experts, local_experts=(moe.experts + redundant) / ranks, choices=moe.routed_rows,
        targets=lambda: expected_targets(gate, ranks, fabric.cluster.node.n_gpus),
        phase="dispatch F" if operation == "dispatch" else "combine F",
    )  # fmt: skip
    moved = kind.traffic(call)
    time = dispatcher_transfer(kind, call, moved, links, fabric.curves)
    # The exchange of counts is in the law of calls between nodes, and inside a node in that of the kernels.
    launch_s, evidence = time.launch_s - notify_seconds(links, nodes), time.evidence
    payload_s = max(time.nic_s, time.scale_up_s)
    if nodes > 1:  # kernels that also forward rows of other nodes move fewer of their own
        law = laws(fabric.profile)[f"{operation}-normal-nodes"]
        launch_s, evidence = launch_s + law.call_us * 1e-6, evidence | Evidence.of([law.id])
        # The law's share of the rate inside a node is of H100's links: SMs that forward, not links, set it.
        forward_s = time.scale_up_s * min(fabric.scale_up_bytes_per_s / LAW_LINK, 1.0) / law.bandwidth
        payload_s = max(time.nic_s / law.peak, time.scale_up_s, forward_s)
    cost = CostedSeconds(launch_s + payload_s, evidence, moved.ib_bytes, moved.nvlink_bytes)
    high_s = launch_s + max(time.worst_s, 1.2 * payload_s)
    return Exchange(operation, cost, cost.seconds, sms, launch_s + time.best_s, high_s)


def _gate(moe: MoE, ranks: int) -> Gate:
    """The gate by which a token's targets are counted; copies of experts fill up uneven ranks."""
    if moe.experts % ranks:
        return Gate(-(-moe.experts // ranks) * ranks, moe.top_k, 1, 1, None)
    return Gate(moe.experts, moe.top_k, moe.groups, moe.groups_per_token, moe.group_score)


# -- tensor parallelism and gathers ------------------------------------------------------------------

OWN_KERNEL_BYTES = 8 * 1024**2
"""Largest sum that engines leave to kernels of their own (vLLM `custom_all_reduce.py`)."""
PCIE_SMS, LIBRARY_SMS = 16, 24


def collective(fabric: Fabric, operation: RingOperation, total_bytes: float, ranks: int) -> Exchange:
    """An all-reduce, all-gather or reduce-scatter of a buffer over consecutive ranks.

    `total_bytes`: the whole buffer. Inside a node the faster of the library's ring and of a call in a graph:
    of the engine's own kernel for sums of at most 8 MiB, of NCCL's else.
    """
    if ranks == 1 or not total_bytes:
        return _exact(operation, NOTHING, 0, 0.0)
    sent = total_bytes * (ranks - 1) / ranks * (2.0 if operation == "all_reduce" else 1.0)
    if fabric.pcie:
        return _by_law(fabric, "pcie", operation, sent, sms=PCIE_SMS)
    nodes = fabric.nodes_of(ranks)
    ring = ring_price(operation, total_bytes, ranks, ranks // nodes, fabric.links(ranks), fabric.curves)
    if nodes == 1:
        own = operation == "all_reduce" and total_bytes <= OWN_KERNEL_BYTES
        family = "all-reduce" if own else "gather"
        small = _by_law(fabric, family, operation, sent, sms=LIBRARY_SMS)
        if small.seconds < ring.seconds:
            return small
    return _exact(operation, ring, LIBRARY_SMS, 0.2)


def cache_transfer(fabric: Fabric, size: float, *, across_nodes: bool = True) -> Exchange:
    """Keys and values of `size` bytes from a prefill rank to a decode rank, by NIC or scale-up links."""
    by_nic = across_nodes and fabric.cluster.nic_bytes_per_s > 0.0
    law = laws(fabric.profile)["cache-transfer"]
    rate = law.bandwidth * (fabric.cluster.nic_bytes_per_s if by_nic else fabric.scale_up_bytes_per_s)
    evidence = Evidence.of([law.id], [f"{law.id}: assumed"])
    sent = (size, 0.0) if by_nic else (0.0, size)
    cost = CostedSeconds(law.call_us * 1e-6 + size / rate, evidence, *sent)
    return _exact("cache_transfer", cost, 0, law.residual.relative)
