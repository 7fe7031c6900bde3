"""Times of collectives from imported curves of bus bandwidth, for the group that was measured (eq. X16).

A curve `nccl.<operation>.busbw...` states its group under `conditions`: `ranks` GPUs on `nodes` nodes. Its x
is the bytes that a rank contributes. Curves without a stated group are not read here.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from moesim.hwmodels.calibration import CalibrationProfile, Entry, MeasuredCurve
from moesim.simulator.cost.price_evidence import PricedSeconds, PriceEvidence

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


def curve_of_group(
    profile: CalibrationProfile, operation: str, ranks: int, nodes: int, *, switched: bool = True
) -> MeasuredCurve | None:
    """The curve measured on this group; else, inside a node, the one measured on most ranks of one node.

    Inside a node of `switched` links the bus bandwidth hardly depends on the ranks: that is what it is
    defined for (doc/PERFORMANCE.md of nccl-tests). None without such a curve.
    """
    best, prefix = None, f"nccl.{operation}.busbw"
    for entry in profile.curves:
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
) -> PricedSeconds | None:
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
    return PricedSeconds(seconds, PriceEvidence.of([curve.id], notes, [(curve.id, size)]))
