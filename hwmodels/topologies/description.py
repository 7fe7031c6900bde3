"""What topologies are built from: the figures of nodes and networks, and the shares of a scale-up rate."""

from __future__ import annotations

from typing import Annotated, Protocol, Self

from msgspec import Struct
from pydantic import model_validator

from moesim.hwmodels import ranges
from moesim.hwmodels.accelerator import Accelerator
from moesim.hwmodels.arrays import IntArray
from moesim.hwmodels.frozen import Frozen
from moesim.hwmodels.provenance import (
    UNDATED,
    SourcedBytesPerSecond,
    SourcedCount,
    SourcedFraction,
    SourcedMetres,
    SourcedSeconds,
)

# -- shares of a scale-up rate ---------------------------------------------------------------------


class ScaleUpShares(Struct, frozen=True):
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
        return self._divided("oversubscription", self.oversubscription)

    def _divided(self, key: str, stated: SourcedFraction | None) -> tuple[int, int]:
        """Ports of a switch (down, up) at a ratio of them."""
        ratio = 1.0 if stated is None else stated.value
        ports = self.switch_ports.n
        up = round(ports / (1 + ratio)) if ratio > 0 else 0
        if ratio < 1 or up < 1 or abs((ports - up) - ratio * up) > 1e-9 * ports:
            legal = [f"{(ports - u) // u}" for u in range(1, ports // 2 + 1) if (ports - u) % u == 0]
            raise ValueError(
                f"{key}={ratio:g} does not divide the {ports} ports of a switch; whole ratios "
                f"that do: {', '.join(reversed(legal))}"
            )
        return ports - up, up


class LayeredFabric(SwitchedFabric):
    """A tree of two layers of switches, or of three with pods under a core that may be oversubscribed."""

    layers: SourcedCount | None = None
    """2 or 3; 2 where it is not given."""
    core_oversubscription: Annotated[SourcedFraction, ranges.OVERSUBSCRIPTION] | None = None
    """Ports of a middle switch towards its pod for each port towards the cores; 1 where not given."""

    @model_validator(mode="after")
    def _two_or_three_layers(self) -> Self:
        if self.n_layers not in (2, 3):
            raise ValueError(f"layers={self.n_layers}: a tree here has 2 or 3 layers")
        if self.core_oversubscription is not None and self.n_layers == 2:
            raise ValueError("core_oversubscription needs layers: 3; two layers have oversubscription alone")
        self.middle_ports()
        return self

    @property
    def n_layers(self) -> int:
        """Layers of switches."""
        return 2 if self.layers is None else self.layers.n

    def middle_ports(self) -> tuple[int, int]:
        """Ports of a middle switch (to its pod, to the cores); ValueError where the ratio does not divide."""
        return self._divided("core_oversubscription", self.core_oversubscription)


# -- buildings -------------------------------------------------------------------------------------

FIBRE_S_PER_M = 1.4682 / 299_792_458.0
"""One way in fibre: its group index (Corning SMF-28 Ultra data sheet, 1550 nm) over the speed of light."""


class Buildings(Frozen):
    """Equal buildings, each with the whole network of its file inside, and a link between every two of them.

    The link is stated by its `bandwidth` or by `oversubscription`, and by `latency` or `distance`. Nodes fill
    one building after the other.
    """

    count: SourcedCount
    bandwidth: SourcedBytesPerSecond | None = None
    """Of the link between two buildings, all of its fibres together, per direction."""
    oversubscription: Annotated[SourcedFraction, ranges.within(1.0, 1e6)] | None = None
    """Bandwidth of all NICs of a building over that of all its links to others together."""
    latency: Annotated[SourcedSeconds, ranges.LATENCY] | None = None
    """One way between two buildings, beyond `latency_cross_leaf`."""
    distance: SourcedMetres | None = None
    """Length of the fibre, which takes 4.9 us a km; in place of `latency`."""

    @model_validator(mode="after")
    def _link_is_stated(self) -> Self:
        if self.count.n < 2:
            raise ValueError(f"buildings.count={self.count.n}: nearest: 2; for one leave buildings out")
        for one, other in (("bandwidth", "oversubscription"), ("latency", "distance")):
            given = [key for key in (one, other) if getattr(self, key) is not None]
            if len(given) != 1:
                has = ", ".join(given) or "none"
                raise ValueError(f"buildings need one of {one} and {other} of the link; given: {has}")
        return self

    @property
    def latency_s(self) -> float:
        """Seconds that a message takes one way, beyond those inside a building."""
        if self.latency is not None:
            return self.latency.value
        assert self.distance is not None
        return self.distance.value * FIBRE_S_PER_M

    def without_limit(self) -> Buildings:
        """The same buildings as if their link had neither a limit nor a latency."""
        free = SourcedBytesPerSecond(
            value=1e16, kind="assumed", source="no limit, to see what it costs", date=UNDATED
        )
        soon = SourcedSeconds(value=0.0, kind="assumed", source="no latency, as above", date=UNDATED)
        none = {"oversubscription": None, "distance": None}
        return self.model_copy(update=none | {"bandwidth": free, "latency": soon})

    def bytes_per_s(self, nics: float) -> float:
        """Bandwidth of the link between two buildings whose NICs have `nics` bytes/s, per direction."""
        if self.bandwidth is not None:
            return self.bandwidth.value
        assert self.oversubscription is not None
        return nics / self.oversubscription.value / (self.count.n - 1)


class NetworkTier(Struct, frozen=True):
    """A level of a network at which equal domains of neighbouring GPUs meet over limited links.

    GPU g is in domain g // `gpus`. `bytes_per_s`: what a domain can send to the others, or to each other one
    where `to_each`, per direction. `latency_s`: what a message between domains takes beyond the latency that
    all scale-out transfers are priced with.
    """

    name: str
    gpus: int
    bytes_per_s: float
    latency_s: float = 0.0
    to_each: bool = False


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

    @property
    def buildings(self) -> Buildings | None:
        """The buildings that it spans; None for one."""
