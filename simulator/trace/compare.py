"""`compare`: one step of a trace beside another, a waterfall whose differences add up to the gap exactly.

Both steps are cut into parts by the same rule (`partition`), so the differences of the parts add up to the
difference of the steps in integer nanoseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from moesim.hwmodels.errors import InputError
from moesim.simulator.predict.step import run_step
from moesim.simulator.scenario import load_scenario
from moesim.simulator.trace.classes import CLASSES
from moesim.simulator.trace.events import PHASES
from moesim.simulator.trace.findings import Finding, find, plan_findings
from moesim.simulator.trace.partition import NOT_PRICED, StepSide, Totals, joined, side_of
from moesim.simulator.trace.predicted import predicted_trace
from moesim.simulator.trace.read import StepTrace, own_rates, read

if TYPE_CHECKING:
    from moesim.simulator.scenario import AnyScenario, Scenario


class TraceComparison(Struct, frozen=True):
    """Two steps side by side. `gap_ns` = measured - other = the sum of `difference_ns` over `bars`.

    `bars`: rows with part, kind, measured_ns, other_ns, difference_ns, largest difference first. `findings`:
    at most ten, root causes first. `classes`: kernel time by class, hidden time too. `unpriced`: kernels that
    the other side cannot have. `notes`: how rank and step were chosen, and what the traces do not say.
    """

    measured: StepSide
    other: StepSide
    bars: tuple[dict[str, Any], ...]
    findings: tuple[Finding, ...]
    classes: tuple[dict[str, Any], ...]
    unpriced: tuple[dict[str, Any], ...]
    notes: tuple[str, ...]

    @property
    def gap_ns(self) -> int:
        """Measured minus other wall time."""
        return self.measured.wall_ns - self.other.wall_ns

    def table(self) -> dict[str, Any]:
        """The whole comparison as plain data, as `moesim trace compare --json` prints it."""
        sides = [
            {"label": side.label, "rank": side.rank.raw.rank, "step": side.step["name"],
             "wall_ns": side.wall_ns, "gpu": side.rank.raw.gpu} for side in (self.measured, self.other)
        ]  # fmt: skip
        return {
            "measured": sides[0],
            "other": sides[1],
            "gap_ns": self.gap_ns,
            "bars": list(self.bars),
            "findings": [finding.row() for finding in self.findings],
            "classes": list(self.classes),
            "unpriced": list(self.unpriced),
            "notes": list(self.notes),
        }


def compare(
    measured: StepTrace,
    other: StepTrace,
    *,
    rank: int | None = None,
    step: int | None = None,
    plan: Sequence[Finding] = (),
    predicted: bool = False,
) -> TraceComparison:
    """Set one step of a trace beside one of another trace, or of `predicted_trace`.

    `rank`: of both; by default the one for which others wait most. `step`: number or name's number in
    `measured`; by default the step of median wall time. `plan`: findings on plans that differ. `predicted`:
    whether `other` is a prediction. Raises InputError for a rank or step that is not there and for a trace
    without times.
    """
    notes: list[str] = []
    one = side_of(measured, rank, step, notes, priced=predicted)
    ranks = {r.raw.rank for r in other.ranks}
    same = one.rank.raw.rank if one.rank.raw.rank in ranks else None
    if same is None and len(ranks) > 1:
        notes.append(f"{other.source} has no rank {one.rank.raw.rank}")
    two = side_of(other, same, None, notes)
    if one.split != two.split:  # waiting that only one side knows would be a difference of its own
        one, two = joined(one), joined(two)
    bars = _bars(one, two)
    assert sum(row["difference_ns"] for row in bars) == one.wall_ns - two.wall_ns
    findings = find(one, two, measured, plan, predicted)
    notes += measured.notes
    return TraceComparison(
        one, two, bars, findings, _classes(one, two), _unpriced(one, two, predicted), tuple(notes)
    )


# -- two sides ---------------------------------------------------------------------------------------


def _bars(one: StepSide, two: StepSide) -> tuple[dict[str, Any], ...]:
    rows = []
    for kind, name in {**one.parts, **two.parts}:
        measured, other = one.parts.get((kind, name), 0), two.parts.get((kind, name), 0)
        rows.append({"part": name, "kind": kind, "measured_ns": measured, "other_ns": other,
                     "difference_ns": measured - other})  # fmt: skip
    return tuple(sorted(rows, key=lambda row: (-abs(row["difference_ns"]), row["kind"], row["part"])))


def _classes(one: StepSide, two: StepSide) -> tuple[dict[str, Any], ...]:
    rows = []
    for name in {**one.totals, **two.totals}:
        measured, other = one.totals.get(name, Totals()), two.totals.get(name, Totals())
        phases = sorted({*measured.phases_ns, *other.phases_ns}, key=PHASES.index)
        rows.append({
            "class": name, "measured_ns": measured.ns, "other_ns": other.ns,
            "measured_events": measured.count, "other_events": other.count,
            "phases_ns": {p: [measured.phases_ns.get(p, 0), other.phases_ns.get(p, 0)] for p in phases},
        })  # fmt: skip
    return tuple(sorted(rows, key=lambda row: -abs(row["measured_ns"] - row["other_ns"])))


def _unpriced(one: StepSide, two: StepSide, predicted: bool) -> tuple[dict[str, Any], ...]:
    """Kernels by name of classes that a prediction does not price, or that the other trace does not have."""
    table: dict[tuple[str, str], list[int]] = {}
    for name, cls, start, end in zip(
        *(one.events[key].tolist() for key in ("name", "cls", "start", "end")), strict=True
    ):
        kind = CLASSES[cls]
        if kind not in two.totals or (predicted and kind in NOT_PRICED):
            row = table.setdefault((one.rank.names[name] if name >= 0 else kind, kind), [0, 0])
            row[0], row[1] = row[0] + end - start, row[1] + 1
    rows = [
        {"kernel": name, "class": kind, "ns": taken, "events": count}
        for (name, kind), (taken, count) in table.items()
    ]
    return tuple(sorted(rows, key=lambda row: (-int(str(row["ns"])), str(row["kernel"])))[:200])


def compare_with(
    trace: StepTrace,
    scenario: Scenario,
    *,
    rank: int | None = None,
    step: int | None = None,
    path: str | Path | None = None,
) -> TraceComparison:
    """A step of a trace beside the prediction of a scenario; differences of the plans come first.

    `path`: of the trace; a note says where the scenario's profile has its rates from that very file.
    Raises InputError as `compare` does, and for an illegal scenario or a fleet.
    """
    scenario.machine  # noqa: B018 - refuses a fleet with the remedy
    one = side_of(trace, rank, step, [], priced=True)
    executed = run_step(scenario)
    number = one.rank.raw.rank
    shown = number if number < executed.prepared.n_gpus else 0
    predicted = predicted_trace(executed, [shown])
    plan, notes = plan_findings(trace, executed, one, side_of(predicted, None, None, []))
    own = own_rates(executed.prepared.profile, path) if path is not None else ""
    notes += [own] if own else []
    if shown != number:
        notes.append(f"rank {number} of the trace stands beside rank 0 of the scenario, which has fewer GPUs")
    found = compare(trace, predicted, rank=rank, step=step, plan=plan, predicted=True)
    return replace(found, notes=(*notes, *found.notes))


TRACES = (".json.gz", ".json.zst", ".sqlite", ".et", ".et.gz", ".csv")
"""Endings that no scenario has; a .json file is a trace where it has trace events at its beginning."""


def compared(
    path: str | Path,
    other: AnyScenario | Path,
    settings: Sequence[str] = (),
    *,
    rank: int | None = None,
    step: int | None = None,
    rules: str | Path | None = None,
    said: Callable[[str], None] = lambda text: None,
) -> TraceComparison:
    """A trace beside a scenario (a `Scenario`, a preset or a file) or beside another trace.

    Raises InputError as `read`, `load_scenario` and `compare` do, and for settings beside a trace.
    """
    if isinstance(other, str | Path) and _is_trace(Path(other)):
        if settings:
            raise InputError(f"--set {settings[0]}: {Path(other).name} is a trace; only a scenario has keys")
        return compare(read(path, rules, said), read(other, rules, said), rank=rank, step=step)
    scenario = load_scenario(other, settings)
    return compare_with(read(path, rules, said), scenario, rank=rank, step=step, path=path)


def _is_trace(path: Path) -> bool:
    try:
        if path.name.lower().endswith(TRACES) or path.is_dir():
            return True
        if not path.name.lower().endswith(".json") or not path.is_file():
            return False
        with path.open("rb") as stream:
            head = stream.read(65536)
    except (OSError, ValueError):
        return False  # what reads a scenario says why
    return b"traceEvents" in head or head.lstrip()[:1] == b"["
