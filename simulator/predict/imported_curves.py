"""Lists the imported curves of a profile: what each replaced, and the old and new value where it was read."""

from __future__ import annotations

from dataclasses import dataclass

from moesim.hwmodels.calibration import CalibrationProfile, MeasuredCurve
from moesim.hwmodels.units import si_factor
from moesim.simulator.cost.library_collectives import RingOperation, all_to_all_price, ring_price
from moesim.simulator.cost.measured_collectives import bus_bytes, is_imported, operation_of, use_of
from moesim.simulator.predict.prepared import Prepared

RINGS: tuple[RingOperation, ...] = ("all_gather", "reduce_scatter", "all_reduce")


@dataclass(frozen=True, slots=True)
class ImportedReading:
    """An imported curve at one place where this plan read it; `old` and `new` in the curve's unit.

    `at` and the values are None for a curve that no price of the plan read; `replaced` then says which
    plans would.
    """

    entry: str
    source: str
    replaced: str
    at: float | None = None
    at_unit: str = ""
    old: float | None = None
    new: float | None = None
    unit: str = ""


def imported_readings(prepared: Prepared) -> list[ImportedReading]:
    """Every imported curve of a cluster's profile at every place where its prices read it."""
    readings: list[ImportedReading] = []
    reads = prepared.program.costs.evidence.reads
    for entry in prepared.profile.curves:
        if entry.replaces is None and not is_imported(entry):
            continue
        places = sorted(x for id_, x in reads if id_ == entry.id)
        readings += [_reading(prepared, entry, x) for x in places]
        if not places:
            readings.append(ImportedReading(entry.id, entry.source, _unused(entry)))
    return readings


def unread_curves(prepared: Prepared) -> list[str]:
    """Imported curves of collectives that no price of the plan read, each with the plans that would."""
    used = prepared.program.costs.evidence.entries
    return [
        f"{entry.id} ({_unused(entry)})"
        for entry in prepared.profile.curves
        if is_imported(entry) and entry.id.startswith("nccl.") and entry.id not in used
    ]


def _unused(entry: MeasuredCurve) -> str:
    use = use_of(entry)
    return "no price reads such a curve" if use is None else f"read by {use}"


def _reading(prepared: Prepared, entry: MeasuredCurve, x: float) -> ImportedReading:
    x_factor, y_factor = si_factor(entry.x_unit), si_factor(entry.y_unit)
    old, replaced = _replaced(prepared, entry, x)
    return ImportedReading(
        entry.id,
        entry.source,
        replaced,
        x / x_factor,
        entry.x_unit,
        None if old is None else old / y_factor,
        entry.curve.at(x).value / y_factor,
        entry.y_unit,
    )


def _replaced(prepared: Prepared, entry: MeasuredCurve, x: float) -> tuple[float | None, str]:
    """The value in SI units that would be used without the import, and what it comes from."""
    if entry.replaces is not None:
        before = entry.model_copy(update={"points": entry.replaces.points, "replaces": None})
        fresh = MeasuredCurve.model_validate(before.model_dump())
        return fresh.curve.at(x).value, f"{entry.id} of {entry.replaces.profile} ({entry.replaces.source})"
    operation, ranks, nodes = operation_of(entry.id), entry.conditions.ranks, entry.conditions.nodes
    if operation is None or ranks is None or nodes is None:
        return None, "nothing: the profile had no such entry"
    profile, links = _without_imports(prepared.profile), prepared.pricer.links
    whole = x * ranks if operation == "all_gather" else x
    if operation == "all_to_all":
        time, evidence = all_to_all_price(whole, ranks, nodes, links, profile)
        seconds, source = max(time.nic_s, time.scale_up_s), " + ".join(sorted(evidence.entries))
    else:
        ring = next(name for name in RINGS if name == operation)
        price = ring_price(ring, whole, ranks, ranks // nodes, links, profile)
        seconds, source = price.seconds, f"steps of the ring at {' + '.join(sorted(price.evidence.entries))}"
    return bus_bytes(operation, whole, ranks) / seconds, source


def _without_imports(profile: CalibrationProfile) -> CalibrationProfile:
    kept = tuple(
        entry for entry in profile.curves if operation_of(entry.id) is None or not is_imported(entry)
    )
    return profile.model_copy(update={"curves": kept})
