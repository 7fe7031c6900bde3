"""Runs a calibration from start to end: plans, measures into the journal, fits and writes the profile."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from moesim.hwmodels.accelerator import Accelerator, load_accelerator
from moesim.hwmodels.calibration import CalibrationProfile, Entry, load_profile
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.validation import nearest
from moesim.kernels.calibrate import compute, host, interference, links, operators
from moesim.kernels.calibrate.entries import Rows, as_profile, entries, lost_beside_nccl
from moesim.kernels.calibrate.links import settings
from moesim.kernels.calibrate.protocol import Context, Facts, Grid, TimedRow, TimingTask
from moesim.kernels.catalog import KERNELS
from moesim.kernels.export import Origin, carried, write_profile
from moesim.kernels.machine import MeasuredMachine, read_machine, refusals

FORMAT = 1
MAX_BYTES = 64_000_000


class Journal:
    """An append-only JSONL file with a header line (the machine), one line per row, and an end line.

    Each line is flushed to disk before the next task begins. A line that a crash cut off is dropped. A
    finished journal is renamed to `<name>.previous` and a new one is begun.
    """

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        """Open or begin a journal; raises InputError for another machine's file or one that is no journal."""
        self.path = path
        self.header = {"format": FORMAT, **header}
        self.rows: dict[str, TimedRow] = {}
        if path.exists() and self._read():
            return
        text = json.dumps({"header": self.header}) + "\n"
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise InputError(
                f"{path}: cannot write there: {error.strerror or error}; choose an existing, writable folder"
            ) from None

    @property
    def resumed(self) -> int:
        """Number of rows that an earlier, interrupted run left."""
        return len(self.rows)

    def append(self, row: TimedRow) -> None:
        """Write a row to disk."""
        self._write(row.to_json())
        self.rows[row.task.key] = row

    def finish(self) -> None:
        """Mark the run as complete."""
        self._write(json.dumps({"finished": True}))

    def _write(self, line: str) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _read(self) -> bool:
        """Load the file; return whether it holds an unfinished run of this machine."""
        data = self.path.read_bytes()
        if len(data) > MAX_BYTES:
            raise InputError(f"{self.path}: larger than {MAX_BYTES // 10**6} MB, so not a calibration's rows")
        whole = data[: data.rfind(b"\n") + 1]
        lines = whole.decode("utf-8", errors="replace").splitlines()
        if not lines:
            return False
        header = _object(lines[0], self.path, 1).get("header")
        if not isinstance(header, dict):
            raise InputError(
                f"{self.path}: not the rows of a calibration; choose another output, or remove the file"
            )
        finished = False
        for number, line in enumerate(lines[1:], 2):
            item = _object(line, self.path, number)
            finished = "finished" in item
            if not finished:
                row = TimedRow.from_json(item, f"{self.path}, line {number}")
                self.rows[row.task.key] = row
        if finished:
            self.rows.clear()
            self.path.replace(self.path.with_name(self.path.name + ".previous"))
            return False
        self._same_machine(header)
        if len(whole) < len(data):  # the last line was cut off: truncate the file after the last whole one
            os.truncate(self.path, len(whole))
        return True

    def _same_machine(self, header: Mapping[str, Any]) -> None:
        now = json.loads(json.dumps(self.header))
        changed = sorted(k for k in now.keys() | header.keys() if now.get(k) != header.get(k))
        if changed:
            first = changed[0]
            raise InputError(
                f"{self.path}: an interrupted run of other conditions ({first} was {header.get(first)!r}, "
                f"is {now.get(first)!r}) cannot be resumed; remove the file, or choose another output"
            )


def _object(line: str, path: Path, number: int) -> dict[str, Any]:
    try:
        item = json.loads(line)
    except ValueError:
        item = None
    if not isinstance(item, dict):
        raise InputError(f"{path}, line {number}: not a row of a calibration; remove the file to begin again")
    return item


QUICK_BUDGET_S, BUDGET_S, MODEL_BUDGET_S = 115.0, 350.0, 590.0
"""Seconds after which a run begins no further task; it reports the rest, which a resumed run measures."""

MEASUREMENTS: tuple[Grid, ...] = (
    operators.MEASUREMENT,
    host.MEASUREMENT,
    links.COPY_MEASUREMENT,
    links.ALL_TO_ALL_MEASUREMENT,
    links.TWO_HOP_MEASUREMENT,
    interference.MEASUREMENT,
    compute.GEMM_MEASUREMENT,
    compute.ATTENTION_MEASUREMENT,
    compute.HBM_MEASUREMENT,
    links.NCCL_MEASUREMENT,
    compute.QUANTISE_MEASUREMENT,
    links.BARRIER_MEASUREMENT,
    operators.COMPILED_MEASUREMENT,
)
"""Measurements in order of importance, because a time budget cuts off the last ones."""


class CalibrationPlan(Struct, frozen=True):
    """The measurements that can run here, and the reasons why others cannot."""

    measurements: tuple[Grid, ...]
    facts: Facts
    quick: bool
    not_measured: tuple[str, ...]

    @property
    def tasks(self) -> tuple[TimingTask, ...]:
        """Every task, in order."""
        return tuple(t for m in self.measurements for t in m.tasks(self.facts, self.quick))

    @property
    def estimate_s(self) -> float:
        """Estimated seconds of the whole run."""
        return sum(m.estimate_s(self.facts, self.quick) for m in self.measurements)

    @property
    def task_s(self) -> dict[str, float]:
        """Estimated seconds of one task of each measurement, its share of the set-up included."""
        facts, quick = self.facts, self.quick
        return {
            m.name: m.estimate_s(facts, quick) / max(1, len(m.tasks(facts, quick))) for m in self.measurements
        }

    @property
    def budget_s(self) -> float:
        """Seconds after which no further task begins."""
        if self.quick:
            return QUICK_BUDGET_S
        return MODEL_BUDGET_S if self.facts.operators else BUDGET_S


def build_plan(facts: Facts, *, quick: bool = False, only: Sequence[str] = ()) -> CalibrationPlan:
    """The plan for a machine. Raises InputError for an unknown name, or where nothing can be measured."""
    names = [m.name for m in MEASUREMENTS]
    for word in only:
        if word not in names:
            raise InputError(
                f"unknown measurement {word!r}{nearest(word, names)}; choose among {', '.join(names)}"
            )
    of_model = [m.name for m in MEASUREMENTS if m.of_model]
    if facts.operators and only and not set(of_model) & set(only):
        raise InputError(
            f"--model is measured by {', '.join(of_model)}, which --only leaves out; add --only {of_model[0]}"
        )
    chosen = [m for m in MEASUREMENTS if not only or m.name in only]
    missing = [(m, m.needs(facts)) for m in chosen]
    possible = tuple(m for m, reason in missing if not reason)
    if not possible:
        reasons = "; ".join(f"{m.name} {reason}" for m, reason in missing)
        raise InputError(f"nothing can be measured here: {reasons}")
    left_out = [f"{m.title} ({reason})" for m, reason in missing if reason]
    if 1 < facts.gpus < 8:
        left_out.append(f"collectives and exchanges over more than {facts.gpus} GPUs ({facts.gpus} usable)")
    left_out.append("transfers between nodes (one machine was measured)")
    if unknown := operators.without_piece(facts.operators):
        left_out.append(f"operators without a piece of code here: {', '.join(unknown)}")
    return CalibrationPlan(possible, facts, quick, tuple(left_out))


LINKS_FROM = "hopper-communication"
"""Profile that supplies the curves that one machine cannot measure (NICs) or that were not measured."""
LAWS_FROM = "hopper-interference"


class Options(Struct, frozen=True):
    """Options of the command; the rows are written beside the profile `output` as `<stem>.rows.jsonl`."""

    output: Path
    quick: bool = False
    gpus: tuple[int, ...] = ()
    """Driver numbers of the GPUs; empty for all."""
    only: tuple[str, ...] = ()
    accelerator: str | None = None
    """Name or file of the accelerator; None takes the one that the driver reports."""
    allow_busy: bool = False
    command: str = "moesim calibrate"
    budget_s: float | None = None
    operators: Callable[[str], Sequence[operators.Operator]] | None = None
    """Operators of a model's step on an accelerator of this name; see `operators.py`."""

    @property
    def rows_path(self) -> Path:
        """Path of the file with the rows."""
        return self.output.with_name(f"{self.output.stem}.rows.jsonl")

    @property
    def host_path(self) -> Path:
        """Path of the file with the host's calls, which a scenario names as `software.host`."""
        return self.output.with_name(f"{self.output.stem}.host.yaml")


class CalibrationProgress(Struct, frozen=True):
    """Progress of a run: estimated seconds done and in total, the present task, and a message."""

    done_s: float
    total_s: float
    text: str
    message: str = ""


ProgressCallback = Callable[[CalibrationProgress], None]


class _CalibrationRun(Struct):
    """The state around the tasks: journal, clock and progress."""

    journal: Journal
    progress: ProgressCallback
    budget_s: float
    total_s: float
    task_s: Mapping[str, float]
    """Estimated seconds of one task by measurement."""
    begin: float = field(default_factory=lambda: time.monotonic())
    done_s: float = 0.0
    out_of_time: int = 0

    def wanted(self, task: TimingTask) -> bool:
        row = self.journal.rows.get(task.key)
        if row is not None and row.ok:
            self.done_s += self.task_s[task.measurement]
            return False
        if time.monotonic() - self.begin > self.budget_s:
            self.out_of_time += 1
            return False
        self.progress(CalibrationProgress(self.done_s, self.total_s, task.text))
        return True

    def keep(self, row: TimedRow) -> None:
        self.journal.append(row)
        self.done_s += self.task_s[row.measurement]


def calibrate(
    options: Options,
    progress: ProgressCallback | None = None,
    *,
    machine: MeasuredMachine | None = None,
    context: Callable[..., Context] | None = None,
    today: datetime.date | None = None,
) -> Path:
    """Measure this machine and write its calibration profile; returns the profile's path.

    After an interruption (Ctrl-C, a crash) every finished task is on disk, and the same call resumes there.
    Raises InputError where nothing can be measured: no GPU, no driver, a busy or split GPU, an unknown
    accelerator, an unwritable output. Tests replace the machine by the keyword arguments.
    """
    tell = progress or (lambda _: None)
    _check_output(options.output)
    found = machine or read_machine()
    found = found.subset(options.gpus) if options.gpus else found
    if reasons := refusals(found, allow_busy=options.allow_busy):
        raise InputError("; ".join(reasons))
    accelerator = _accelerator(options, found)
    run: _CalibrationRun | None = None

    def wanted(task: TimingTask) -> bool:
        assert run is not None
        return run.wanted(task)

    here = (context or _gpu_context)(found, quick=options.quick, wanted=wanted)
    of_model = tuple(options.operators(accelerator.name)) if options.operators else ()
    facts = replace(here.facts, operators=of_model)
    plan = build_plan(facts, quick=options.quick, only=options.only)
    conditions = {  # equal for all rows of one run
        "machine": found.title,
        "driver": found.driver,
        "cuda": found.cuda,
        "accelerator": accelerator.name,
        "kernels": kernels_hash(),
        "gpus": plan.facts.gpus,
    }
    journal = Journal(options.rows_path, conditions)
    total_s = plan.estimate_s
    if journal.resumed:
        tell(CalibrationProgress(0.0, total_s, "", f"resuming: {journal.resumed} tasks were measured before"))
    run = _CalibrationRun(journal, tell, options.budget_s or plan.budget_s, total_s, plan.task_s)
    for measurement in plan.measurements:
        for row in measurement.run(here, plan.facts):
            run.keep(row)
    date = (today or datetime.datetime.now(tz=datetime.UTC).date()).isoformat()
    keys = {task.key for task in plan.tasks}
    kept = [row for key, row in journal.rows.items() if key in keys]
    missing = _missing(plan, kept, run.out_of_time)
    profile = make_profile(kept, accelerator, found, options, date, missing)
    path = write_profile(profile, options.output)
    if one := host.host_of(Rows(kept, accelerator, _origin(kept, found, options, date), options.output.stem)):
        told = f"{host.write_host(one, options.host_path)}: name it as `software.host` in a scenario"
        tell(CalibrationProgress(total_s, total_s, "", told))
    if not run.out_of_time:
        journal.finish()
    tell(CalibrationProgress(total_s, total_s, "", f"not measured: {'; '.join(missing)}"))
    return path


def make_profile(
    rows: Sequence[TimedRow],
    accelerator: Accelerator,
    machine: MeasuredMachine,
    options: Options,
    date: str,
    not_measured: Sequence[str] = (),
) -> CalibrationProfile:
    """The profile of a calibration's rows, as a pure function; raises InputError where no row has an entry.

    Entries that were not measured are carried from the shipped Hopper profiles, each with its own source.
    """
    name = options.output.stem
    found = Rows(rows, accelerator, _origin(rows, machine, options, date), name)
    own = operators.entries(found)
    own += [entry for entry in entries(found) if entry.id not in {one.id for one in own}]
    if not own:
        raise InputError(
            "no task gave a usable time, so there is no profile to write: see the .rows.jsonl file"
        )
    have = {entry.id for entry in own}
    groups = {entry.group for entry in own if hasattr(entry, "group")}
    links: list[Entry] = [carried(c, LINKS_FROM) for c in load_profile(LINKS_FROM).curves if c.id not in have]
    include = ["hopper-launch", "generic-priors"]
    if len(groups) < len(load_profile(LAWS_FROM).laws):
        include.insert(1, LAWS_FROM)
    shell = CalibrationProfile(
        name=name,
        accelerator=accelerator.name,
        software=f"moesim kernels {kernels_hash()}, CUDA {machine.cuda}, driver {machine.driver}",
        description=f"What {machine.title} carried on {date}, measured by {options.command!r}.",
        evidence=(
            "Measured on this machine: every entry with its own source. Entries carried from "
            f"{LINKS_FROM} say so. Not measured: {'; '.join(not_measured) or 'nothing'}."
        ),
        include=tuple(include),
        **({"lost_beside_nccl": lost} if (lost := lost_beside_nccl(found)) else {}),
    )
    return as_profile(shell, [*own, *links])


def _origin(rows: Sequence[TimedRow], machine: MeasuredMachine, options: Options, date: str) -> Origin:
    marks = [f"busy: {gpu.busy}" for gpu in machine.gpus if gpu.busy]
    marks += ["quick run"] if options.quick else []
    marks += [settings()] if settings() else []
    return Origin(
        title=f"moesim calibrate on {machine.title}",
        date=date,
        device=machine.gpus[0].name,
        driver=machine.driver,
        clocks=clocks_text(rows, machine),
        cuda=machine.cuda,
        kernels_hash=kernels_hash(),
        command=options.command,
        note="; ".join(marks) or None,
    )


def clocks_text(rows: Sequence[TimedRow], machine: MeasuredMachine) -> str:
    """The clocks that the GPUs ran at during the measurements, in words."""
    parts = []
    if (limit := machine.gpus[0].sm_clock_max_hz) is not None:
        parts.append(f"at most {limit / 1e6:.0f} MHz")
    for row in rows:
        if row.ok and "sustained_clock_hz" in row.values:
            power = row.values.get("sustained_power_w")
            with_power = f" at {power:.0f} W" if power else ""
            parts.append(f"{row.values['sustained_clock_hz'] / 1e6:.0f} MHz under BF16 products{with_power}")
    seen = [row.values["sm_clock_hz"] for row in rows if row.ok and "sm_clock_hz" in row.values]
    if seen:
        parts.append(f"median {statistics.median(seen) / 1e6:.0f} MHz after tasks")
    return ", ".join(["not pinned", *parts])


def kernels_hash() -> str:
    """Twelve hexadecimal digits that identify the text of all PTX kernels."""
    digest = hashlib.sha256()
    for name in sorted(KERNELS):
        digest.update(f"{name} {KERNELS[name].digest()}\n".encode())
    return digest.hexdigest()[:12]


def _missing(plan: CalibrationPlan, rows: Sequence[TimedRow], out_of_time: int) -> list[str]:
    """The measurements that the profile lacks, with the reasons."""
    missing = list(plan.not_measured)
    reasons: dict[str, list[TimedRow]] = {}
    for row in rows:
        if not row.ok:
            reasons.setdefault(row.failed, []).append(row)
    missing += [f"{len(group)} tasks of {group[0].measurement} ({why})" for why, group in reasons.items()]
    if out_of_time:
        missing.append(f"{out_of_time} tasks, out of time: run the same command again to measure them")
    return missing


def _accelerator(options: Options, machine: MeasuredMachine) -> Accelerator:
    name = options.accelerator or machine.accelerator
    if name is None:
        raise InputError(
            f"{machine.title}: not a shipped accelerator; describe it in a file (see moesim hardware) and "
            "name it with --accelerator my-gpu.yaml"
        )
    accelerator = load_accelerator(name)
    if options.accelerator and machine.accelerator and accelerator.name != machine.accelerator:
        raise InputError(
            f"--accelerator {options.accelerator}: these GPUs are {machine.title} ({machine.accelerator}); "
            "a profile for another accelerator is made from theirs by transfer"
        )
    return accelerator


def _check_output(path: Path) -> None:
    """Refuse an output that cannot be written before the GPUs are touched."""
    if path.suffix.lower() not in (".yaml", ".yml", ".json"):
        raise InputError(f"{path}: a profile is a .yaml, .yml or .json file; choose such a name")
    if not path.parent.is_dir():
        raise InputError(f"{path}: the folder {path.parent} does not exist; create it first")


def _gpu_context(machine: MeasuredMachine, *, quick: bool, wanted: Callable[[TimingTask], bool]) -> Context:
    from moesim.kernels.calibrate.protocol import GpuContext, cuda_devices

    return GpuContext(machine, cuda_devices(machine), quick=quick, wanted=wanted)
