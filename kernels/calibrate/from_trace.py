"""Writes a calibration profile from what a profiler's trace of a training step teaches.

The command line passes the plain table of `moesim.simulator.trace.rates`; nothing here reads a trace. Entries
are those that a calibration of a model's operators writes, over the same counted bytes. What the trace did
not have is carried from a base profile, entry by entry.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from moesim.hwmodels.accelerator import Accelerator, load_accelerator
from moesim.hwmodels.calibration import (
    CalibrationProfile,
    Entry,
    GemmTable,
    Law,
    MeasuredCurve,
    Prior,
    TracedFile,
    TraceOrigin,
    load_profile,
)
from moesim.hwmodels.confidence import best_profile
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.provenance import SourcedFraction, SourcedSeconds
from moesim.kernels.calibrate import operators
from moesim.kernels.calibrate.entries import Rows
from moesim.kernels.calibrate.protocol import TimedRow
from moesim.kernels.export import Origin, carried, curve, residual, significant
from moesim.kernels.machine import accelerator_name

LEAST_CALLS_BESIDE = 8
"""Fewest kernels beside collectives, with equals that ran alone, from which their loss is taken."""
LEAST_GAPS = 30
MATCHED = "transfer of matched ranks"
"""How a table says that a collective's time is its transfer in a step, beside compute where there was any."""
APART = 1.2
"""Sizes closer than this to a traced one take its rate."""
BEYOND_CACHE = 256e6
"""Bytes that no cache holds."""
LATENT_HEAD, LATENT_TEXT = 192, "192/128"
"""Width of the heads at which shipped profiles measured attention, and the words that say it."""
HOW = "kernels of traced steps, medians of those that ran alone where there are such"


class TraceTable(Struct, frozen=True):
    """What the command line passes: rows and facts of a trace, and what it did not teach."""

    rows: Sequence[Mapping[str, Any]]
    facts: Mapping[str, Any]
    missing: Sequence[str]
    files: Sequence[tuple[str, str]]
    """Name and SHA-256 of each file."""
    date: str
    scenario: str = ""
    """Name of the traced run's scenario, where the user gave one."""


def profile_from_trace(
    table: TraceTable,
    name: str,
    *,
    base: str | None = None,
    accelerator: str | None = None,
    command: str = "",
) -> CalibrationProfile:
    """The profile of a trace; `base` (the accelerator's best shipped one by default) gives what it lacks.

    Raises InputError for a GPU that is not a shipped accelerator, or a base for another one.
    """
    on = _accelerator(table, accelerator)
    under = load_profile(base) if base else load_profile(best_profile(on)[1])
    if on.name not in (under.accelerator, *under.also_for) and under.accelerator != "any":
        raise InputError(
            f"--base {under.name}: it is for {under.accelerator}, and {table.facts['source']} was recorded "
            f"on "
            f"{table.facts['gpu'] or on.name} ({on.name}); name a base for {on.name}, or make one with "
            f"moesim transfer"
        )
    table = _possible(table, on)
    origin = _origin(table, command)
    rows = Rows([_timed(row) for row in table.rows], on, origin, name, HOW)
    traced = (*operators.entries(rows), *_collectives(table, rows))
    own: list[Entry] = [*(_beyond(entry, under) for entry in traced), *_jitter(table, rows)]
    kept = _carried(under, own)
    gap, lost = _gap(table, origin), _lost(table, origin)
    from_base = sorted({*_uses_of(kept)} - {*_uses_of(own)})
    not_learnt = f" Not learnt from it: {'; '.join(table.missing)}." if table.missing else ""
    return CalibrationProfile(
        name=name,
        accelerator=on.name,
        software=f"that of the traced run ({table.facts['source']})",
        description=f"Rates of one training run, from {_files_text(table)}, {table.facts['steps']} steps on "
        f"{table.facts['gpu'] or on.name}.",
        evidence=(
            f"From a trace, never to be scored on the run that it came from: "
            f"{_sizes_text(table)}.{not_learnt} "
            f"Taken from {under.name}: {', '.join(from_base) or 'no rate'}. "
            f"{'' if gap else f'The gap between launches is that of {under.name}. '}"
            f"{'' if lost else f'Loss beside collectives is that of {under.name}. '}"
            "Rates hold at the clock of this run, so no law of power corrects them. " + _host_text(table)
        ),
        launch_gap=gap or under.launch_gap,
        kernel_floor=under.kernel_floor,
        lost_beside_nccl=lost or under.lost_beside_nccl,
        dispatchers=under.dispatchers,
        trace=_run(table, on, under),
        gemm_tables=tuple(e for e in (*own, *kept) if isinstance(e, GemmTable)),
        curves=tuple(e for e in (*own, *kept) if isinstance(e, MeasuredCurve)),
        laws=tuple(e for e in kept if isinstance(e, Law)),
        priors=tuple(e for e in kept if isinstance(e, Prior)),
    )


def _run(table: TraceTable, on: Accelerator, under: CalibrationProfile) -> TraceOrigin:
    return TraceOrigin(
        files=tuple(TracedFile(name=file, sha256=digest) for file, digest in table.files),
        gpu=table.facts["gpu"] or on.name,
        ranks=table.facts["ranks"],
        steps=table.facts["steps"],
        date=table.date,
        base=under.name,
        scenario=table.scenario,
    )


def _accelerator(table: TraceTable, named: str | None) -> Accelerator:
    gpu = str(table.facts["gpu"])
    found = accelerator_name(gpu)
    if named is None and found is None:
        raise InputError(
            f"{table.facts['source']}: {gpu or 'its GPU, which the file does not name,'} is not a shipped "
            f"accelerator; "
            "name the one that it ran on, or a file that describes it, with --accelerator"
        )
    on = load_accelerator(named or str(found))
    if found and on.name != found:
        raise InputError(
            f"--accelerator {named}: {table.facts['source']} was recorded on {gpu} ({found}); a profile for "
            f"another "
            "accelerator is made from its own by moesim transfer"
        )
    return on


def _possible(table: TraceTable, on: Accelerator) -> TraceTable:
    """The table without rows of more bytes than memory can move: a scenario that is not that of the run."""
    most = on.hbm_bytes_per_s
    wrong = [
        row for row in table.rows
        if float(row["parameters"].get("bytes", 0.0)) > max(BEYOND_CACHE, row["seconds"] * most)
        and row["measurement"] == "operators"
    ]  # fmt: skip
    said = [
        f"{row['parameters']['use']} ({row['parameters']['bytes'] / row['seconds'] / 1e12:.1f} TB/s, "
        f"more than the memory's "
        f"{most / 1e12:.1f}: are these the sizes and formats of the run?)"
        for row in wrong
    ]
    peak = on.peak_flop_per_s("bf16")
    fast = [row for row in table.rows if row["values"].get("flop", 0.0) > row["seconds"] * peak]
    uses = sorted({str(row["parameters"]["use"]) for row in fast})
    said += [f"{use} (rows above the peak of BF16: a window, or another format?)" for use in uses]
    wrong = [row for row in table.rows if row in wrong or str(row["parameters"].get("use")) in uses]
    return replace(
        table, rows=[row for row in table.rows if row not in wrong], missing=[*table.missing, *said]
    )


def _origin(table: TraceTable, command: str) -> Origin:
    return Origin(
        title=f"profiler's trace {_files_text(table)}, {table.facts['steps']} steps",
        date=table.date,
        device=table.facts["gpu"] or None,
        command=command or None,
        note="kernels inside training steps, at their clock",
    )


def _files_text(table: TraceTable) -> str:
    (name, digest), more = table.files[0], len(table.files) - 1
    return f"{name} (SHA-256 {digest[:12]})" + (f" and {more} files beside it" if more else "")


def _sizes_text(table: TraceTable) -> str:
    count: dict[str, int] = defaultdict(int)
    for row in table.rows:
        count[str(row["sizes_from"])] += 1
    parts = ", ".join(f"{number} by {of}" for of, number in sorted(count.items()))
    return f"{len(table.rows)} rows, {parts}" + (f" ({table.scenario})" if table.scenario else "")


def _host_text(table: TraceTable) -> str:
    facts = table.facts
    launch = (
        f"a launch every {facts['host_launch_s'] * 1e6:.1f} us at the median, "
        if facts["host_launch_s"]
        else ""
    )
    return (
        f"Host of the run (for information): {launch}{facts['synchronisations']:.0f} device "
        f"synchronisations a step, "
        f"{facts['synchronisation_s'] * 1e3:.1f} ms; equal kernels spread by {facts['jitter']:.1%}."
    )


def _timed(row: Mapping[str, Any]) -> TimedRow:
    return TimedRow(
        row["measurement"],
        row["parameters"],
        row["seconds"],
        row["low_s"],
        row["high_s"],
        row["count"],
        row["values"],
    )


def _carried(base: CalibrationProfile, own: Sequence[Entry]) -> list[Entry]:
    """Entries of the base profile that the trace does not replace, each with a note that names the base."""
    uses, ids = {*_uses_of(own)}, {entry.id for entry in own}
    kept = []
    for entry in base.entries():
        gone = {*_uses_of([entry])}
        wide = {f"{use}/{LATENT_HEAD}" for use in gone if use.startswith("attention_")}
        if (
            isinstance(entry, MeasuredCurve)
            and LATENT_TEXT in entry.source
            and not (wide & uses)
            and gone <= uses
        ):
            entry = entry.model_copy(update={"used_for": tuple(sorted(wide))})
            gone = wide
        if entry.id not in ids and not (gone and gone <= uses and not isinstance(entry, Prior)):
            kept.append(carried(entry, base.name))
    return kept


def _beyond(entry: Entry, base: CalibrationProfile) -> Entry:
    """A curve of bandwidth with the base's beyond the sizes of the run, times the ratio of both at its end.

    A run has one size or two of an operator, and the time of small or of unlike kernels is not in proportion.
    """
    if not isinstance(entry, MeasuredCurve) or entry.y_unit != "GB/s":
        return entry
    uses, collective = {*entry.used_for}, entry.id.rpartition(".")[0]
    found = (c for c in base.curves if c.overlapped is None and c.x_unit == entry.x_unit)
    shape = next((c for c in found if (uses and uses <= {*c.used_for}) or c.id == collective), None)
    if shape is None:
        return entry
    ends = entry.points[0], entry.points[-1]
    ratios = [end[1] / _bandwidth(shape, end[0]) for end in ends]
    below = [(x, y * ratios[0]) for x, y, *_ in shape.points if x * APART < ends[0][0]]
    above = [(x, y * ratios[1]) for x, y, *_ in shape.points if x > APART * ends[1][0]]
    own = [(x, y) for x, y, *_ in entry.points]
    points = tuple((x, significant(y)) for x, y in (*below, *own, *above))
    sizes = " to ".join(f"{end[0]:.4g}" for end in dict.fromkeys(ends))
    note = f"traced at {sizes} {entry.x_unit}; at other sizes {shape.id} times the ratio of both there"
    return entry.model_copy(update={"points": points, "note": note}) if below or above else entry


def _bandwidth(curve: MeasuredCurve, x: float) -> float:
    """Bandwidth at a size, in the curve's own units, its time linear between points (eq. C6)."""
    points = [(point[0], point[0] / point[1]) for point in curve.points]
    if not points[0][0] < x < points[-1][0]:
        return float(curve.points[0 if x <= points[0][0] else -1][1])
    right = next(n for n, (at, _) in enumerate(points) if at >= x)
    (x0, t0), (x1, t1) = points[right - 1], points[right]
    return float(x / (t0 + (t1 - t0) * (x - x0) / (x1 - x0)))


def _uses_of(entries: Iterable[Entry]) -> Iterable[str]:
    for entry in entries:
        if isinstance(entry, MeasuredCurve):
            yield from entry.used_for
        elif isinstance(entry, GemmTable):
            yield f"{entry.cls} {entry.dtype}{' ' if entry.variant else ''}{entry.variant}"


def _collectives(table: TraceTable, rows: Rows) -> Iterable[MeasuredCurve]:
    """Bus bandwidth of the run's collectives inside a node, over the bytes that a rank contributes."""
    groups: dict[tuple[str, int, str], list[tuple[float, float]]] = defaultdict(list)
    for row in table.rows:
        if row["measurement"] == "collective":
            p = row["parameters"]
            ranks, whole = int(p["ranks"]), float(p["bytes"])
            moved = (2.0 if p["operation"] == "all_reduce" else 1.0) * whole * (ranks - 1) / ranks
            size = whole / ranks if p["operation"] == "all_gather" else whole
            groups[p["operation"], ranks, row["sizes_from"]].append((size, moved / row["seconds"]))
    for (operation, ranks, how), points in groups.items():
        best: dict[float, float] = {}
        for size, rate in sorted(points):
            best[size] = max(rate, best.get(size, 0.0))
        conditions = rows.origin.conditions(note=how).model_copy(
            update={"ranks": ranks, "nodes": 1, "own_group_only": True}
        )
        found = curve(
            f"nccl.{operation}.busbw.{rows.name}-{ranks}",
            [(size / 2**20, rate / 1e9) for size, rate in best.items()],
            x=("bytes that a rank contributes", "MiB"),
            y=("bus bandwidth", "GB/s"),
            origin=rows.origin,
            what=f"NCCL {operation} over {ranks} ranks of one node, {how}",
            error=residual(0.1, "spread of equal collectives, at least 10 %"),
            interpolation="log",
            conditions=conditions,
        )
        yield found.model_copy(update={"overlapped": True}) if how == MATCHED else found


def _jitter(table: TraceTable, rows: Rows) -> Iterable[MeasuredCurve]:
    """Spread of equal kernels over their time, for information."""
    points: dict[float, float] = {}
    for row in table.rows:
        if row["measurement"] == "operators" and row["count"] > 3:
            points[float(f"{row['seconds'] * 1e6:.4g}")] = row["high_s"] / row["seconds"]
    if points:
        yield curve(
            f"{rows.name}.jitter",
            sorted(points.items()),
            x=("seconds of a kernel", "us"),
            y=("upper quartile over the median", "1"),
            origin=rows.origin,
            what="spread of equal pieces of work inside the traced steps",
            error=residual(0.5, "few repeats of each"),
            note="for information; a prediction draws its jitter from variation.jitter_cv",
        )


def _gap(table: TraceTable, origin: Origin) -> SourcedSeconds | None:
    facts = table.facts
    if facts["gap_s"] is None or facts["gaps"] < LEAST_GAPS:
        return None
    low, high = facts["gap_quartiles_s"]
    return SourcedSeconds(
        value=facts["gap_s"],
        kind="measured",
        source=origin.source(f"median of {facts['gaps']} gaps before kernels that were launched long before"),
        date=table.date,
        between=(min(low, facts["gap_s"]), max(high, facts["gap_s"])),
        note="range: quartiles",
    )


def _lost(table: TraceTable, origin: Origin) -> SourcedFraction | None:
    facts = table.facts
    lost = facts["lost_beside"]
    if lost is None or facts["lost_beside_calls"] < LEAST_CALLS_BESIDE or not 0.0 < lost < 1.0:
        return None
    return SourcedFraction(
        value=round(lost, 4),
        kind="measured",
        source=origin.source(
            f"{facts['lost_beside_calls']} kernels beside collectives, against the median of equal kernels "
            f"alone"
        ),
        date=table.date,
        note="seconds lost per second beside a collective's kernel, its waiting included",
    )
