"""Lists every number and curve behind a prediction, and what the prediction is of, in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import fsum
from pathlib import Path
from textwrap import wrap
from typing import Protocol

from msgspec import Struct
from pydantic import BaseModel

from moesim.hwmodels.calibration import CalibrationProfile, MeasuredCurve
from moesim.hwmodels.cluster import Cluster
from moesim.hwmodels.frozen import SameObject
from moesim.hwmodels.host import CompiledBlock, HostCall, InBlock, load_host
from moesim.hwmodels.provenance import ProvenanceRow, SourcedFraction, provenance_rows, sourced_numbers
from moesim.hwmodels.units import si_factor
from moesim.simulator.cost.collectives.library import load_library
from moesim.simulator.cost.library_collectives import (
    RingOperation,
    all_to_all_price,
    bus_bytes,
    is_imported,
    operation_of,
    ring_price,
    use_of,
)
from moesim.simulator.layout.parallel import Layout, microbatches
from moesim.simulator.memory.gpu import FRAMEWORK_BYTES
from moesim.simulator.predict.result_parts import ProvenanceEntry
from moesim.simulator.predict.step import Prepared, PreparedPool
from moesim.simulator.scenario import Scenario
from moesim.simulator.scenario.inputs import WIDTH, inputs_of

# -- provenance --------------------------------------------------------------------------------------
# Lists every number and curve behind a prediction.


class _Described(Protocol):
    """Whatever says where its value comes from."""

    @property
    def kind(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def date(self) -> str: ...


def provenance(prepared: PreparedPool) -> list[ProvenanceEntry]:
    """Every number and curve behind a prediction, with its source."""
    entries = [
        *_described(SameObject(prepared.cluster), "cluster"),
        # An inline cluster or profile is also a part of the scenario, but is listed once.
        *(
            entry
            for entry in _entries(provenance_rows(prepared.scenario, "scenario"))
            if not entry.path.startswith(("scenario.cluster.", "scenario.profile."))
        ),
        *_described(SameObject(prepared.profile), "profile"),
        *_described(SameObject(FRAMEWORK_BYTES), "memory.framework"),
        *_described(SameObject(prepared.memory_by_rank.slack), "memory.allocator_slack"),
    ]
    entries += _host_provenance(prepared)
    used = prepared.programs[0].costs.evidence.entries
    if any(id_.removeprefix("engine.").startswith("collective.") for id_ in used):
        library = load_library()  # figures of the communication library behind the prices of rings
        path = f"collectives.{library.name}"
        figures = {"wire_shares": library.wire_shares, "network_post": library.network_post}
        entries.append(_entry(f"{path}.latencies", None, "see file", library.latencies))
        entries += [_entry(at, n.value, n.dimension, n) for at, n in sourced_numbers(figures, path)]
    entries += [_curve(SameObject(prepared.profile), id_) for id_ in sorted(used)]
    return entries


@lru_cache(maxsize=16)
def _described(model: SameObject[BaseModel], prefix: str) -> tuple[ProvenanceEntry, ...]:
    """Every number of a description."""
    return _entries(provenance_rows(model.value, prefix))


def _entries(rows: Iterable[ProvenanceRow]) -> tuple[ProvenanceEntry, ...]:
    return tuple(_entry(row.path, row.value, row.unit, row) for row in rows)


def _entry(path: str, value: float | None, unit: str, described: _Described) -> ProvenanceEntry:
    return ProvenanceEntry(
        path=path,
        value=value,
        unit=unit,
        kind=described.kind,
        source=described.source,
        date=described.date,
    )


@lru_cache(maxsize=1024)
def _curve(profile: SameObject[CalibrationProfile], id_: str) -> ProvenanceEntry:
    """A curve or another entry of a profile."""
    entry = profile.value.entry(id_)
    return _entry(f"profile.{id_}", None, "see profile", entry)


def _host_provenance(prepared: PreparedPool) -> list[ProvenanceEntry]:
    """Forward seconds of one call of each kind, where the scenario names a host."""
    name = prepared.scenario.software.host
    if name is None:
        return []
    host = load_host(prepared.scenario.path(name))
    rows: list[tuple[str, float, str, CompiledBlock | HostCall | InBlock | SourcedFraction]] = []
    if host.factor is not None:
        rows.append(("factor", host.factor.value, "count", host.factor))
    measured = host.measured()
    rows += [
        (f"in_block.{family}", ratio.forward, "count", ratio) for family, ratio in measured.in_block.items()
    ]
    if prepared.scenario.software.compiled_blocks:
        rows += [
            (f"compiled.{family}", ratio.forward, "count", ratio)
            for family, ratio in measured.compiled.items()
        ]
    rows += [(kind, call.forward, "s", call) for kind, call in (measured.calls | host.calls).items()]
    return [_entry(f"host.{host.name}.{part}", value, unit, entry) for part, value, unit, entry in rows]


# -- imported curves ---------------------------------------------------------------------------------
# Lists the imported curves of a profile: what each replaced, and the old and new value where it was
# read.

RINGS: tuple[RingOperation, ...] = ("all_gather", "reduce_scatter", "all_reduce")


class ImportedReading(Struct, frozen=True):
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
        x_factor, y_factor = si_factor(entry.x_unit), si_factor(entry.y_unit)
        for x in places:
            old, replaced = _replaced(prepared, entry, x)
            values = None if old is None else old / y_factor, entry.curve.at(x).value / y_factor
            at = x / x_factor, entry.x_unit
            readings.append(ImportedReading(entry.id, entry.source, replaced, *at, *values, entry.y_unit))
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


def _replaced(prepared: Prepared, entry: MeasuredCurve, x: float) -> tuple[float | None, str]:
    """The value in SI units that would be used without the import, and what it comes from."""
    if entry.replaces is not None:
        before = entry.model_copy(update={"points": entry.replaces.points, "replaces": None})
        fresh = MeasuredCurve.model_validate(before.model_dump())
        return fresh.curve.at(x).value, f"{entry.id} of {entry.replaces.profile} ({entry.replaces.source})"
    operation, ranks, nodes = operation_of(entry.id), entry.conditions.ranks, entry.conditions.nodes
    if operation is None or ranks is None or nodes is None:
        return None, "nothing: the profile had no such entry"
    curves = tuple(e for e in prepared.profile.curves if operation_of(e.id) is None or not is_imported(e))
    profile, links = prepared.profile.model_copy(update={"curves": curves}), prepared.pricer.links
    whole = x * ranks if operation == "all_gather" else x
    if operation == "all_to_all":
        time, evidence = all_to_all_price(whole, ranks, nodes, links, profile)
        seconds, source = max(time.nic_s, time.scale_up_s), " + ".join(sorted(evidence.entries))
    else:
        ring = next(name for name in RINGS if name == operation)
        price = ring_price(ring, whole, ranks, ranks // nodes, links, profile)
        seconds, source = price.seconds, f"steps of the ring at {' + '.join(sorted(price.evidence.entries))}"
    return bus_bytes(operation, whole, ranks) / seconds, source


# -- plan summary ------------------------------------------------------------------------------------
# The model, machines and plan of a prediction in words; of a kept prediction without pricing it again.


class PlanSummary(Struct, frozen=True):
    """What a printed prediction says about its scenario."""

    scenario: Scenario
    model: str
    clusters: tuple[Cluster, ...]
    dp: int
    schedule: str
    microbatches: int

    @property
    def peak_flop_per_s(self) -> float:
        """BF16 peak of one GPU, averaged over all GPUs."""
        if len(self.clusters) == 1:
            return self.clusters[0].accelerator.peak_flop_per_s("bf16")
        gpus = sum(cluster.n_gpus for cluster in self.clusters)
        return fsum(c.n_gpus * c.accelerator.peak_flop_per_s("bf16") for c in self.clusters) / gpus

    @property
    def headline(self) -> str:
        """Name, model, GPUs, source, overrides and plan, in lines of at most 80 columns."""
        machines = " + ".join(f"{c.n_gpus:,} x {c.accelerator.title}" for c in self.clusters)
        title = f"{self.scenario.name}: {self.model} on {machines}, {self.microbatches:,} micro-batches"
        lines = wrap(title, WIDTH, subsequent_indent="  ", break_on_hyphens=False)
        return "\n".join([*lines, *inputs_of(self.scenario).lines()])


def summary_of_prepared(prepared: Prepared) -> PlanSummary:
    """The summary of a prepared scenario."""
    clusters = tuple(pool.part.cluster for pool in prepared.pools)
    schedule = prepared.schedule
    return _summary(prepared.scenario, prepared.shape.name, clusters, prepared.layout, schedule.name)


def summary_of_kept(scenario: Scenario) -> PlanSummary:
    """The summary of a scenario on one cluster that was predicted before; loads only model and cluster."""
    cluster = scenario.machine
    layout = Layout(scenario.parallel, cluster.n_gpus, cluster.node.n_gpus)
    name = scenario.schedule
    if name.lower().endswith(".csv"):
        name = Path(scenario.path(name)).stem
    return _summary(scenario, scenario.shape.name, (cluster,), layout, name)


def _summary(
    scenario: Scenario, model: str, clusters: Sequence[Cluster], layout: Layout, schedule: str
) -> PlanSummary:
    count = microbatches(layout, scenario.batch.sequences)
    return PlanSummary(scenario, model, tuple(clusters), layout.dp, schedule, count)
