"""Exchange between the ranks of a serving replica: dispatch and combine, sums and gathers of TP, cache transfers.

Every function returns the seconds of one call alone on its links, with what it occupies. Dispatch and combine take
the curves of `simulator.dispatchers`; sums of few bytes run in one kernel that reads all peers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from moesim.hwmodels.calibration import CalibrationProfile, load_profile
from moesim.hwmodels.cluster import Cluster
from moesim.hwmodels.errors import InputError
from moesim.simulator.cost.evidence import CostedSeconds, Evidence
from moesim.simulator.cost.library_collectives import RingOperation, ring_price
from moesim.simulator.cost.transfers import dispatcher_transfer
from moesim.simulator.dispatchers.protocol import Call, Links
from moesim.simulator.dispatchers.registry import dispatcher
from moesim.simulator.layout.routing import Gate, expected_targets
from moesim.simulator.model.feed_forward.moe import MoE
from moesim.simulator.model.precision import Format, row_bytes

LOW_LATENCY, NORMAL = "deepep-low-latency", "deepep-2025-04"
LINKS_PROFILE = "generic-roofline"
"""Shipped profile whose curves of links stand for those that a scenario's own profile does not have."""
PCIE_SHARE = 0.8
"""Share of the nominal rate of PCIe that a copy between two cards carries: 50.6 of 63 GB/s is usual for Gen5 x16
(assumed, 0.6 to 0.9)."""
PCIE_LATENCY_S = 5e-6
"""A message between cards over PCIe with a flag behind it: assumed, 3 to 10 us."""


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


@dataclass(frozen=True)
class Fabric:
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
                f"accelerator {card.name!r} has neither scale_up_bandwidth nor host_bandwidth; add one with its source"
            )
        return PCIE_SHARE * card.host_bandwidth.value

    @cached_property
    def nic_bytes_per_s(self) -> float:
        """Nominal rate of a GPU between nodes; 0 for one node."""
        node, fabric = self.cluster.node, self.cluster.network.fabric
        if self.cluster.nodes == 1 or fabric is None:
            return 0.0
        return min(node.scale_out_bytes_per_s, fabric.link_bandwidth.value * node.n_nics_per_gpu)

    def links(self, ranks: int) -> Links:
        """Links of a group of `ranks` consecutive ranks."""
        node, fabric = self.cluster.node, self.cluster.network.fabric
        return Links(
            scale_up_bytes_per_s=self.scale_up_bytes_per_s,
            scale_up_latency_s=node.scale_up_latency_s,
            nic_bytes_per_s=self.nic_bytes_per_s,
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


# -- experts -----------------------------------------------------------------------------------------


def expert_exchange(
    fabric: Fabric,
    moe: MoE,
    hidden: int,
    ranks: int,
    tokens: float,
    operation: Literal["dispatch", "combine"],
    *,
    low_latency: bool,
    sms: int = 20,
    wire: Format | None = None,
    redundant: int = 0,
) -> Exchange:
    """A dispatch or combine of `tokens` tokens a rank over `ranks` ranks (eqs. X2, X29).

    Rows go out in FP8 and come back in BF16 unless `wire` says otherwise. Low-latency kernels with a receiving hook
    hold SMs for their call alone, not while rows travel; normal ones hold `sms` all the time. Over PCIe rows go
    from card to card, one after the other.
    """
    fmt: Format = wire or ("fp8" if operation == "dispatch" else "bf16")
    row = moe.row_width(hidden)
    if ranks == 1 or not tokens:
        return _exact(operation, CostedSeconds(), 0, 0.0)
    if fabric.pcie:
        return _over_pcie(
            fabric, operation, tokens * moe.routed_rows * (ranks - 1) / ranks * row_bytes(row, fmt)
        )
    nodes = fabric.nodes_of(ranks)
    links = fabric.links(ranks)
    gate = Gate(moe.experts, moe.top_k, 1, 1, None)
    kind = dispatcher(LOW_LATENCY if low_latency else NORMAL)
    call = Call(
        ranks=ranks, nodes=nodes, sms=0 if low_latency else sms, tokens=tokens, row=row, row_bytes=row_bytes(row, fmt),
        wire=fmt, experts=moe.experts, local_experts=(moe.experts + redundant) / ranks, choices=moe.routed_rows,
        targets=lambda: expected_targets(gate, ranks, fabric.cluster.node.n_gpus),
        phase="dispatch F" if operation == "dispatch" else "combine F",
    )  # fmt: skip
    moved = kind.traffic(call)
    time = dispatcher_transfer(kind, call, moved, links, fabric.curves)
    payload = max(time.nic_s, time.scale_up_s)
    cost = CostedSeconds(time.launch_s + payload, time.evidence, moved.ib_bytes, moved.nvlink_bytes)
    busy = time.launch_s if low_latency else cost.seconds
    held = fabric.cluster.accelerator.n_sms if low_latency else sms
    return Exchange(
        operation, cost, busy, held, time.launch_s + time.best_s, time.launch_s + max(time.worst_s, payload)
    )


def _over_pcie(fabric: Fabric, name: str, sent: float) -> Exchange:
    note = f"{fabric.cluster.accelerator.name}: {PCIE_SHARE:.0%} of PCIe and {PCIE_LATENCY_S * 1e6:g} us a call assumed"
    cost = CostedSeconds(
        PCIE_LATENCY_S + sent / fabric.scale_up_bytes_per_s, Evidence.of([], [note]), 0.0, sent
    )
    return _exact(name, cost, 16, 0.3)


# -- tensor parallelism and gathers ------------------------------------------------------------------

ONE_SHOT_BYTES = 512 * 1024
"""Largest sum that engines' own kernels take in one shot on NVLink (vLLM `custom_all_reduce.py`: 512 KiB for 4 to 8
ranks; above it they reduce and gather up to 8 MiB, then NCCL runs)."""
ONE_SHOT_LATENCY_S = 4e-6
TWO_SHOT_LATENCY_S = 8e-6


def collective(fabric: Fabric, operation: RingOperation, total_bytes: float, ranks: int) -> Exchange:
    """An all-reduce, all-gather or reduce-scatter of a buffer of `total_bytes` over `ranks` consecutive ranks.

    All-reduces of at most 8 MiB in one NVLink domain run in the engines' own kernels (eq. SV5).
    """
    if ranks == 1 or not total_bytes:
        return _exact(operation, CostedSeconds(), 0, 0.0)
    if fabric.pcie:
        factor = 2.0 if operation == "all_reduce" else 1.0
        return _over_pcie(fabric, operation, factor * total_bytes * (ranks - 1) / ranks)
    nodes = fabric.nodes_of(ranks)
    links = fabric.links(ranks)
    price = ring_price(operation, total_bytes, ranks, ranks // nodes, links, fabric.curves)
    if operation == "all_reduce" and nodes == 1 and total_bytes <= 16 * ONE_SHOT_BYTES:
        rate = 0.75 * fabric.scale_up_bytes_per_s
        one = ONE_SHOT_LATENCY_S + total_bytes * (ranks - 1) / rate
        two = TWO_SHOT_LATENCY_S + 2 * total_bytes * (ranks - 1) / ranks / rate
        own = min(one if total_bytes <= ONE_SHOT_BYTES else two, two)
        if own < price.seconds:
            price = CostedSeconds(
                own, Evidence.of([], ["own all-reduce kernels: assumed latencies"]), 0.0, price.scale_up_bytes
            )
    return _exact(operation, price, 24, 0.25)


def cache_transfer(fabric: Fabric, size: float, *, across_nodes: bool = True) -> Exchange:
    """Keys and values of `size` bytes from a prefill rank to a decode rank, by its NIC or over NVLink."""
    share = 0.85
    rate = fabric.nic_bytes_per_s if across_nodes and fabric.nic_bytes_per_s else fabric.scale_up_bytes_per_s
    nic = across_nodes and fabric.nic_bytes_per_s > 0
    cost = CostedSeconds(
        20e-6 + size / (share * rate), Evidence.of([], [f"cache transfer at {share:.0%} of the link: assumed"]),
        size if nic else 0.0, 0.0 if nic else size,
    )  # fmt: skip
    return _exact("cache_transfer", cost, 0, 0.2)
