"""Lists every number and curve behind a prediction."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Protocol

from pydantic import BaseModel

from moesim.hwmodels.calibration import CalibrationProfile
from moesim.hwmodels.frozen import SameObject
from moesim.hwmodels.host import CompiledBlock, HostCall, InBlock, load_host
from moesim.hwmodels.provenance import ProvenanceRow, SourcedFraction, provenance_rows, sourced_numbers
from moesim.simulator.cost.collectives.library import load_library
from moesim.simulator.layout.memory import FRAMEWORK_BYTES
from moesim.simulator.predict.prepared import PreparedPool
from moesim.simulator.predict.result_parts import ProvenanceEntry


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
        entries += _library_provenance()
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
        rows.append(("factor", host.factor.value, "1", host.factor))
    measured = host.measured()
    rows += [(f"in_block.{family}", ratio.forward, "1", ratio) for family, ratio in measured.in_block.items()]
    if prepared.scenario.software.compiled_blocks:
        rows += [
            (f"compiled.{family}", ratio.forward, "1", ratio) for family, ratio in measured.compiled.items()
        ]
    rows += [(kind, call.forward, "s", call) for kind, call in measured.calls.items()]
    return [_entry(f"host.{host.name}.{part}", value, unit, entry) for part, value, unit, entry in rows]


def _library_provenance() -> list[ProvenanceEntry]:
    """Figures of the communication library behind the prices of rings."""
    library = load_library()
    path, table = f"collectives.{library.name}", library.latencies
    used = {"wire_shares": library.wire_shares, "network_post": library.network_post}
    rows = [_entry(at, n.value, n.dimension, n) for at, n in sourced_numbers(used, path)]
    return [_entry(f"{path}.latencies", None, "see file", table), *rows]
