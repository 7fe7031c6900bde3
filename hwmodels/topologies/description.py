"""What topologies are built from: the figures of nodes and networks, and the shares of a scale-up rate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Protocol, Self

from pydantic import model_validator

from moesim.hwmodels import ranges
from moesim.hwmodels.accelerator import Accelerator
from moesim.hwmodels.arrays import IntArray
from moesim.hwmodels.frozen import Frozen
from moesim.hwmodels.provenance import SourcedBytesPerSecond, SourcedCount, SourcedFraction, SourcedSeconds

# -- shares of a scale-up rate ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ScaleUpShares:
    """Shares of the nominal rate of one GPU and direction, by communication pattern (docs/model.md, eq. H3).

    This class describes a non-blocking switch, where every GPU reaches every other at its full rate. A
    topology whose links limit the rate has a subclass beside it.
    """

    @property
    def links_are_shared(self) -> bool:
        """Whether messages of several GPUs share links between GPUs."""
        return False

    def all_to_all(self, group: int) -> float:
        """Share of a uniform all-to-all of `group` GPUs."""
        return 1.0

    def pair(self) -> float:
        """Share that two neighbours can use between them."""
        return 1.0

    def ring(self, group: int) -> float:
        """Share of a reduce-scatter or all-gather of `group` GPUs."""
        return 1.0

    def groups(self, group: int, gpus: int) -> IntArray | None:
        """GPUs of every expert-parallel group [groups, members]; None where placement makes no difference.

        Raises InputError where no group of this size can be placed.
        """
        return None

    def busiest_link(self, source: IntArray, target: IntArray) -> int:
        """Number of messages from `source` to `target` GPUs [n] on the busiest link, at least one."""
        return 1


SWITCHED = ScaleUpShares()
"""Every GPU reaches every other at its full rate."""


# -- figures of nodes and networks -----------------------------------------------------------------


class ScaleUpFabric(Frozen):
    """Keys of `fabric` in a scale-up file; each kind of topology defines its own."""

    def shares(self, node: NodeFigures) -> ScaleUpShares:
        """Shares of the scale-up rate that groups inside the node can use; the full rate by default."""
        return SWITCHED


class ScaleOutFabric(Frozen):
    """Keys of `fabric` that every scale-out network states, whatever its shape.

    The latencies are end to end for a small message: two links within a leaf, four links across leaves
    of a two-layer tree; every further link between switches adds half their difference.
    """

    link_bandwidth: SourcedBytesPerSecond
    """Bandwidth of one port, per direction."""
    latency_same_leaf: Annotated[SourcedSeconds, ranges.LATENCY]
    latency_cross_leaf: Annotated[SourcedSeconds, ranges.LATENCY]

    @model_validator(mode="after")
    def _latencies_in_order(self) -> Self:
        if self.latency_cross_leaf.value < self.latency_same_leaf.value:
            raise ValueError("latency_cross_leaf must not be below latency_same_leaf")
        return self

    @property
    def hop_latency_s(self) -> float:
        """Latency that one link between switches adds."""
        return (self.latency_cross_leaf.value - self.latency_same_leaf.value) / 2


class SwitchedFabric(ScaleOutFabric):
    """Equal switches; half of a leaf's ports face the nodes and half the spines, or as stated."""

    switch_ports: SourcedCount
    oversubscription: Annotated[SourcedFraction, ranges.OVERSUBSCRIPTION] | None = None
    """Ports of a leaf towards the nodes for each port towards the spines; 1 where not given."""

    @model_validator(mode="after")
    def _ports_divide(self) -> Self:
        if self.switch_ports.n < 2 or self.switch_ports.n % 2:
            raise ValueError(f"switch_ports={self.switch_ports.n} must be even: half face up, half down")
        self.leaf_ports()
        return self

    def leaf_ports(self) -> tuple[int, int]:
        """Ports of a leaf (down, up); raises ValueError where the ratio does not divide them."""
        ratio = 1.0 if self.oversubscription is None else self.oversubscription.value
        ports = self.switch_ports.n
        up = round(ports / (1 + ratio)) if ratio > 0 else 0
        if ratio < 1 or up < 1 or abs((ports - up) - ratio * up) > 1e-9 * ports:
            legal = [f"{(ports - u) // u}" for u in range(1, ports // 2 + 1) if (ports - u) % u == 0]
            raise ValueError(
                f"oversubscription={ratio:g} does not divide the {ports} ports of a switch; whole ratios "
                f"that do: {', '.join(reversed(legal))}"
            )
        return ports - up, up


class ScaleUpFigures(Protocol):
    """Figures of the network between the GPUs of a node."""

    @property
    def kind(self) -> str:
        """Kind of the scale-up topology."""

    @property
    def fabric(self) -> ScaleUpFabric:
        """The keys of its kind."""


class NodeFigures(Protocol):
    """Figures of one server; bandwidths are bytes/s per GPU and direction, latencies seconds."""

    @property
    def name(self) -> str:
        """Shown in messages."""

    @property
    def accelerator(self) -> Accelerator:
        """The accelerator of the node."""

    @property
    def n_gpus(self) -> int:
        """Accelerators in the node."""

    @property
    def scale_up(self) -> ScaleUpFigures | None:
        """The network between the GPUs; None for one non-blocking switch."""

    @property
    def scale_up_bytes_per_s(self) -> float:
        """Nominal scale-up bandwidth."""

    @property
    def scale_up_achievable_bytes_per_s(self) -> float:
        """Scale-up payload bandwidth."""

    @property
    def scale_up_latency_s(self) -> float:
        """Latency from GPU to GPU inside the node."""

    @property
    def adapter(self) -> str | None:
        """Kind of the NICs; None for InfiniBand and RoCE."""

    @property
    def n_nics_per_gpu(self) -> int:
        """NICs of one GPU."""

    @property
    def scale_out_bytes_per_s(self) -> float:
        """Nominal bandwidth of all NICs of a GPU."""

    @property
    def scale_out_effective_bytes_per_s(self) -> float:
        """Payload bandwidth of all NICs of a GPU."""


class NetworkFigures(Protocol):
    """Figures of one scale-out network."""

    @property
    def name(self) -> str:
        """Shown in messages."""

    @property
    def kind(self) -> str:
        """Kind of the scale-out topology."""

    @property
    def fabric(self) -> ScaleOutFabric | None:
        """The keys of its kind; None for a kind that has none."""

    @property
    def adapter(self) -> str | None:
        """Kind of the NICs that it joins; None for InfiniBand and RoCE."""

    @property
    def prices(self) -> str | None:
        """Name or path of its price list."""
