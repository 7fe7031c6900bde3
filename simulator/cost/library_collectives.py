"""Prices a library's collectives on the links of a job, from measured curves or from rings."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, inf
from types import MappingProxyType
from typing import Literal, TypeAlias

from msgspec.structs import replace

from moesim.hwmodels.calibration import CalibrationProfile, Entry, MeasuredCurve
from moesim.hwmodels.confidence import GENERIC
from moesim.hwmodels.topologies.description import SWITCHED
from moesim.simulator.common.bounded_cache import BoundedCache, Same
from moesim.simulator.cost.collectives.flows import PROTOCOLS, Hops
from moesim.simulator.cost.collectives.library import load_library
from moesim.simulator.cost.collectives.ring import busiest_bytes, closed_form_seconds, hops
from moesim.simulator.cost.evidence import CostedSeconds, Evidence
from moesim.simulator.dispatchers.protocol import CollectiveTime, Links
from moesim.simulator.layout.job import ResolvedJob

# -- measured collectives ----------------------------------------------------------------------------
# Times of collectives from imported curves of bus bandwidth, for the group that was measured (eq. X16).
#
# A curve `nccl.<operation>.busbw...` states its group under `conditions`: `ranks` GPUs on `nodes` nodes.
# Its x is the bytes that a rank contributes. Curves without a stated group are not read here.

OPERATIONS: Mapping[str, str] = MappingProxyType(
    {
        "all_gather": "tensor parallelism with sequence_parallel, ZeRO 1 to 3, split experts",
        "reduce_scatter": "tensor parallelism with sequence_parallel, ZeRO 1 to 3, split experts",
        "all_reduce": "tensor parallelism without sequence_parallel, zero_stage 0",
        "all_to_all": "communication.kernels=nccl",
    }
)
"""Operations that are priced, each with the plans that run it."""


def is_imported(entry: Entry) -> bool:
    """Whether an entry is a curve of nccl-tests or states its group; shipped curves are not imported."""
    if entry.conditions.own_group_only:
        return False
    return entry.conditions.ranks is not None or entry.source.startswith("nccl-tests ")


def operation_of(entry_id: str) -> str | None:
    """The operation of a curve of bus bandwidth that prices may read; None for any other entry."""
    parts = entry_id.split(".")
    if len(parts) < 3 or parts[0] != "nccl" or parts[2] != "busbw" or parts[1] not in OPERATIONS:
        return None
    return parts[1]


def use_of(entry: Entry) -> str | None:
    """Which prices read an imported curve, in words; None where no price reads it."""
    operation = operation_of(entry.id)
    if operation is None:
        return None if entry.id.startswith("nccl.") else "every price that names this entry"
    ranks, nodes = entry.conditions.ranks, entry.conditions.nodes
    if ranks is None or nodes is None:
        return None
    where = "inside a node" if nodes == 1 else f"of {ranks} GPUs on {nodes} nodes"
    return f"{operation} {where}: {OPERATIONS[operation]}"


_NCCL_CURVES: BoundedCache[tuple[MeasuredCurve, ...]] = BoundedCache(64)


def _nccl_curves(profile: CalibrationProfile) -> tuple[MeasuredCurve, ...]:
    """The few of a profile's hundreds of curves that are NCCL's, in order."""
    return _NCCL_CURVES.get(
        Same(profile), lambda: tuple(curve for curve in profile.curves if curve.id.startswith("nccl."))
    )


def curve_of_group(
    profile: CalibrationProfile, operation: str, ranks: int, nodes: int, *, switched: bool = True
) -> MeasuredCurve | None:
    """The curve measured on this group; else, inside a node, the one measured on most ranks of one node.

    Inside a node of `switched` links the bus bandwidth hardly depends on the ranks: that is what it is
    defined for (doc/PERFORMANCE.md of nccl-tests). None without such a curve.
    """
    best, prefix = None, f"nccl.{operation}.busbw"
    for entry in _nccl_curves(profile):
        if not entry.id.startswith(prefix) or entry.conditions.nodes != nodes:
            continue
        measured = entry.conditions.ranks or 0
        if measured == ranks:
            return entry
        others = nodes == 1 and switched and not entry.conditions.own_group_only
        if others and measured > (best.conditions.ranks or 0 if best else 0):
            best = entry
    return best


def bus_bytes(operation: str, total_bytes: float, ranks: int) -> float:
    """Bytes that bus bandwidth counts for a collective over a buffer of `total_bytes`."""
    return (2.0 if operation == "all_reduce" else 1.0) * total_bytes * (ranks - 1) / ranks


def measured_seconds(
    profile: CalibrationProfile,
    operation: str,
    total_bytes: float,
    ranks: int,
    nodes: int,
    *,
    switched: bool = True,
) -> CostedSeconds | None:
    """Seconds of a collective from the curve of its group, or None where there is none (eq. X16).

    `total_bytes`: the whole buffer (output of an all-gather; input of any other on one rank). `switched`: see
    `curve_of_group`. Below the
    smallest measured size the time of that size is held, above the largest its rate; a note says so.
    """
    curve = curve_of_group(profile, operation, ranks, nodes, switched=switched)
    if curve is None:
        return None
    measured = curve.conditions.ranks or ranks
    # Groups of another size are read at an equal message from neighbour to neighbour.
    size = total_bytes / ranks * (1 if operation == "all_gather" else measured)
    reading = curve.curve.at(size)
    smallest = max(1.0, curve.curve.xs[0] / size)
    seconds = smallest * bus_bytes(operation, total_bytes, ranks) / reading.value
    notes = [reading.note] if reading.extrapolated else []
    if measured != ranks:
        notes.append(
            f"{curve.id}: measured over {measured} GPUs of a node, used for groups of {ranks} at equal bus "
            "bandwidth"
        )
    return CostedSeconds(seconds, Evidence.of([curve.id], notes, [(curve.id, size)]))


# -- library collectives -----------------------------------------------------------------------------
# Prices a library's collectives on the links of a job: rings, all-to-all, rings beside compute.
#
# Pure functions of bytes, links and a calibration profile. A collective is priced from an imported curve
# of its group where the profile has one (eq. X16), else from the steps of its ring (eq. X5).

RingOperation = Literal["all_gather", "reduce_scatter", "all_reduce"]
_RingKey: TypeAlias = tuple[RingOperation, float, int, int, Links]

MOST_CACHED = 20_000
"""Most prices of rings that are kept for a profile: a plan search asks for each of them about 50 times."""

_PRICES: BoundedCache[dict[_RingKey, CostedSeconds]] = BoundedCache(32)
"""Prices of rings by profile."""


def ring_price(
    operation: RingOperation,
    total_bytes: float,
    ranks: int,
    ranks_per_node: int,
    links: Links,
    profile: CalibrationProfile,
) -> CostedSeconds:
    """Seconds of a collective of `total_bytes` over `ranks`, `ranks_per_node` a node, with their evidence.

    An imported curve of the group decides (eq. X16); without one, bytes, steps and protocols are those of
    `collectives.ring` (docs/model.md, eq. X5), and an all-reduce is a reduce-scatter and an all-gather. The
    bytes that a GPU sends are those of the ring, or of the switches that add up (eq. X8, X25).
    """
    if ranks <= 1 or total_bytes <= 0.0:
        return CostedSeconds()
    known = _PRICES.get(Same(profile), dict)
    key = (operation, total_bytes, ranks, ranks_per_node, links)
    price = known.get(key)
    if price is None:
        if len(known) >= MOST_CACHED:
            known.clear()
        price = known[key] = _ring_price(*key, profile)
    return price


def _ring_price(
    operation: RingOperation,
    total_bytes: float,
    ranks: int,
    ranks_per_node: int,
    links: Links,
    profile: CalibrationProfile,
) -> CostedSeconds:
    nic, scale_up = busiest_bytes(operation, total_bytes, ranks, ranks_per_node)
    measured = _measured(operation, total_bytes, ranks, ranks_per_node, links, profile)
    if measured is not None:
        return replace(measured, nic_bytes=nic, scale_up_bytes=scale_up)
    if operation == "all_reduce":
        half = (total_bytes, ranks, ranks_per_node, links, profile)
        scatter, gather = ring_price("reduce_scatter", *half), ring_price("all_gather", *half)
        both = scatter.evidence | gather.evidence
        rings = CostedSeconds(scatter.seconds + gather.seconds, both, nic, scale_up)
        switched_s = _in_switches(total_bytes, ranks, ranks_per_node, links)
        if switched_s is None or switched_s >= rings.seconds:
            return rings
        nic = total_bytes / ranks_per_node if ranks > ranks_per_node else 0.0
        scale_up = total_bytes if ranks_per_node > 1 else 0.0
        return CostedSeconds(switched_s, nic_bytes=nic, scale_up_bytes=scale_up)
    # The rates are those of the profile's collectives with their largest buffers; the steps account for the
    # lower rates of small buffers.
    nodes = -(-ranks // ranks_per_node)
    inside = profile.curve(f"{links.curves}collective.scale_up_fraction").curve
    at_size, share = max(inside.points, key=lambda point: point[1])
    reads, nic_share = [(inside.id, at_size)] if ranks_per_node > 1 else [], 0.0
    if nodes > 1:
        between = profile.curve(f"{links.curves}collective.nic_fraction").curve
        nic_share = between.at(nodes).value
        reads.append((between.id, float(nodes)))
    seconds = closed_form_seconds(
        "all_gather",
        total_bytes,
        ranks,
        ranks_per_node,
        load_library(),
        scale_up_bytes_per_s=share * links.wiring.ring(ranks_per_node) * links.scale_up_bytes_per_s,
        nic_bytes_per_s=nic_share * links.nic_bytes_per_s,
    )
    return CostedSeconds(seconds, Evidence.of((id_ for id_, _ in reads), reads=reads), nic, scale_up)


def _in_switches(total_bytes: float, ranks: int, ranks_per_node: int, links: Links) -> float | None:
    """Seconds of an all-reduce that switches add up (eq. X25); None where they do not.

    Every GPU sends its buffer once and receives the sum once, and each NIC of a node its part of both.
    """
    nodes = -(-ranks // ranks_per_node)
    if links.in_network == "none" or (nodes > 1 and links.in_network != "all"):
        return None
    library = load_library()
    share = library.in_switch_share(links.architecture)
    if share is None:
        return None
    rate = share * links.scale_up_bytes_per_s if ranks_per_node > 1 else inf
    if nodes > 1:
        rate = min(rate, library.network_reduction_share.value * ranks_per_node * links.nic_bytes_per_s)
    return library.nvls_latency.value + total_bytes / rate


def ring_seconds(
    total_bytes: float,
    ranks: int,
    ranks_per_node: int,
    links: Links,
    profile: CalibrationProfile,
    operation: RingOperation = "all_gather",
) -> float:
    """Seconds of `ring_price`."""
    return ring_price(operation, total_bytes, ranks, ranks_per_node, links, profile).seconds


def _measured(
    operation: str,
    total_bytes: float,
    ranks: int,
    ranks_per_node: int,
    links: Links,
    profile: CalibrationProfile,
) -> CostedSeconds | None:
    """The price from an imported curve, which NCCL's kernels on switched links give."""
    if links.curves:
        return None
    nodes = -(-ranks // ranks_per_node)
    switched = links.wiring == SWITCHED
    return measured_seconds(profile, operation, total_bytes, ranks, nodes, switched=switched)


def all_to_all_price(
    sent_bytes: float, ranks: int, nodes: int, links: Links, profile: CalibrationProfile
) -> tuple[CollectiveTime, Evidence]:
    """NCCL's all-to-all of `sent_bytes` a rank, spread evenly over `ranks` on `nodes` (eq. O6).

    An imported curve of this group decides (eq. X16). Without one, it runs inside a node at the profile's bus
    bandwidth for this size (nccl.all_to_all.busbw, or that of an all-gather), and between nodes at the share
    of the NIC rate that collectives reach; adapters with curves of their own state their share, and the time
    of a call beyond its bytes (eq. X34).
    """
    local = ranks // nodes
    scale_up = sent_bytes * (local - 1) / ranks
    nic = sent_bytes * (ranks - local) / ranks
    measured = curve_of_group(profile, "all_to_all", local, 1, switched=links.wiring == SWITCHED) or next(
        (c for c in profile.curves if c.id == "nccl.all_to_all.busbw"), None
    )
    curve = measured or profile.curve("collective.scale_up_fraction")
    reading = curve.curve.at(sent_bytes)
    scale_up_s = scale_up / (reading.value * (1.0 if measured else links.scale_up_bytes_per_s))
    nic_s, residual = 0.0, curve.residual.relative
    evidence = Evidence.of(
        [curve.id], [reading.note] if reading.extrapolated else [], [(curve.id, sent_bytes)]
    )
    if nic:
        own = {entry.id: entry for entry in profile.curves if entry.id.startswith("nccl.all_to_all.")}
        share = own.get(f"nccl.all_to_all.nic_fraction.{links.adapter}")
        read = [share or profile.curve("collective.nic_fraction")]
        nic_s = nic / (read[0].curve.at(nodes).value * links.nic_bytes_per_s)
        if share is not None:
            read.append(own[f"nccl.all_to_all.nic_call_time.{links.adapter}"])
            nic_s += read[1].curve.at(nodes).value
            incast = own[f"nccl.all_to_all.incast_share.{links.adapter}"]
            least = incast.curve.at(ranks).value * (1.0 - incast.residual.relative)
            residual = max(residual, 1.0 / least - 1.0)
        missing = share is None and links.adapter
        notes = [f"no curve of NCCL's all-to-all over {links.adapter}: as over InfiniBand"] if missing else []
        evidence |= Evidence.of([one.id for one in read], notes, [(one.id, float(nodes)) for one in read])
    whole = _measured("all_to_all", sent_bytes, ranks, local, links, profile)
    if whole is not None:  # a curve of the whole group includes all of its links
        scale_up_s, nic_s = (whole.seconds, 0.0) if nodes == 1 else (0.0, whole.seconds)
        evidence = whole.evidence
        residual = max(profile.curve(id_).residual.relative for id_ in evidence.entries)
    return CollectiveTime(nic_s, scale_up_s, residual, nic, scale_up), evidence


def overlap_delay(
    name: RingOperation,
    total_bytes: float,
    ranks: int,
    ranks_per_node: int,
    links: Links,
    profile: CalibrationProfile,
) -> CostedSeconds:
    """Additional seconds of an NCCL ring beside GEMMs; 0 where the profile has not measured them.

    0 too where the ring's rate is its transfer in a traced step: it was beside GEMMs there.

    The measured ratio (curve nccl.<name>.beside_compute) multiplies the scale-up part of `ring_seconds`; the
    delay is the excess of the result over the whole ring alone (eq. O8).
    """
    measured = [c for c in _nccl_curves(profile) if c.id == f"nccl.{name}.beside_compute"]
    if not measured or ranks <= 1 or total_bytes <= 0.0:
        return CostedSeconds()
    of_group = curve_of_group(profile, name, ranks, max(1, ranks // ranks_per_node))
    if of_group is not None and of_group.overlapped:
        return CostedSeconds()
    reading = measured[0].curve.at(total_bytes / ranks)
    inside = ring_seconds(total_bytes, ranks, ranks, links, profile, name)
    alone = ring_seconds(total_bytes, ranks, ranks_per_node, links, profile, name)
    longer = max(0.0, reading.value * inside - alone)
    if not longer:
        return CostedSeconds()
    return CostedSeconds(longer, Evidence.of([measured[0].id], [reading.note]))


def small_all_reduce_s(ranks: int, ranks_per_node: int) -> float:
    """Seconds of an all-reduce of a few bytes: the fastest tree or ring (docs/model.md, eq. X27).

    `ranks_per_node`: members on one node.
    """
    if ranks <= 1:
        return 0.0
    library, nodes = load_library(), ceil(ranks / ranks_per_node)
    tree = Hops(2 * (min(ranks, ranks_per_node) - 1), 2 * (nodes - 1).bit_length())
    ring = hops("all_reduce", ranks, nodes)
    return min(
        min(library.latency_s("tree", protocol, tree, nodes=nodes) for protocol in PROTOCOLS),
        min(library.latency_s("ring", protocol, ring, nodes=nodes) for protocol in PROTOCOLS),
    )


# -- profile use -------------------------------------------------------------------------------------
# Figures of a profile for all collectives of a job: residuals, and shares of link rates.


def collective_residual(profile: CalibrationProfile, prefix: str = "") -> float:
    """Relative uncertainty of the data-parallel collectives, the larger of those of their two curves."""
    curves = ("collective.scale_up_fraction", "collective.nic_fraction")
    return max(profile.curve(prefix + name).residual.relative for name in curves)


def link_share_evidence(job: ResolvedJob) -> Evidence:
    """Evidence with a note where shares of link rates come from other hardware or are assumed."""
    accelerator, profile = job.cluster.accelerator, job.profile
    note, engine = "", accelerator.communication_engine
    if engine is not None:
        note = (
            f"{accelerator.name}: a dedicated engine ({engine.name}) moves collectives at assumed shares "
            "of the link rates (engine.* curves); no slow-down of or by compute beside it is priced"
        )
    elif profile.accelerator == "any" or GENERIC in profile.include:
        note = f"profile {profile.name}: communication shares of Hopper used for {accelerator.name}"
    return Evidence.of([], [note])
