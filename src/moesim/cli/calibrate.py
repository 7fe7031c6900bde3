"""The commands `calibrate` and `transfer`, which make calibration profiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeGuard

import typer

from moesim.cli.console import Force, check_new, chosen_numbers, console, print_table, print_text, say_written
from moesim.hwmodels.errors import InputError

if TYPE_CHECKING:
    from moesim.hwmodels.calibration import CalibrationProfile
    from moesim.kernels.calibrate import CalibrationProgress

Output = Annotated[Path, typer.Option("-o", "--output", help="Write the profile here (.yaml or .json).")]

FromTrace = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE|FOLDER",
        help="Measure nothing: take this profiler trace's rates. --model: the run's scenario.",
    ),
]
Base = Annotated[str | None, typer.Option(metavar="PROFILE", help="With --from-trace: gives what it lacks.")]


def calibrate(
    output: Output = Path("calibration.yaml"),
    quick: Annotated[bool, typer.Option("--quick", help="Fewer points: under two minutes.")] = False,
    gpus: Annotated[str, typer.Option(help="GPUs by number, such as 0,1 or 0-3; all by default.")] = "all",
    only: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only this measurement; repeatable.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Also measure the operators of this model's step: a model, or a scenario of yours."
        ),
    ] = None,
    accelerator: Annotated[
        str | None, typer.Option(help="Name or file of the accelerator, where the driver's name is unknown.")
    ] = None,
    allow_busy: Annotated[
        bool, typer.Option("--allow-busy", help="Measure beside other work; the profile says so.")
    ] = False,
    compare: Annotated[
        str | None, typer.Option(metavar="PROFILE", help="Then report the drift from this older profile.")
    ] = None,
    from_trace: FromTrace = None,
    base: Base = None,
) -> None:
    """Measure this machine's GPUs with the PTX kernels and write a calibration profile.

    If it is interrupted, the same command continues from the rows measured so far.
    """
    from moesim.hwmodels.calibration import load_profile
    from moesim.kernels.calibrate import Options
    from moesim.kernels.calibrate import calibrate as measure

    old = load_profile(compare) if compare else None
    if _given_trace(from_trace, base, quick or gpus != "all" or bool(only) or allow_busy):
        _from_trace(from_trace, output, model, base, accelerator)
        if old is not None:
            _print_drift(old, load_profile(output))
        return
    options = Options(
        output=output,
        quick=quick,
        gpus=tuple(chosen_numbers("--gpus", gpus) or ()),
        only=tuple(only or ()),
        accelerator=accelerator,
        allow_busy=allow_busy,
        command=_command(quick, gpus, only, model, accelerator, allow_busy),
        operators=partial(_operators, model, quick) if model else None,
    )
    try:
        with _progress() as tell:
            path = measure(options, tell)
    except KeyboardInterrupt:
        typer.echo(
            f"moesim: what was measured is in {options.rows_path}; run the same command again", err=True
        )
        raise
    say_written(str(path), "name it as `profile` in a scenario, or with --set profile=...")
    if old is not None:
        _print_drift(old, load_profile(path))


def _given_trace(from_trace: Path | None, base: str | None, measures: bool) -> TypeGuard[Path]:
    """Whether a trace is read; raises InputError for options that do not go together."""
    if from_trace is None and base is not None:
        raise InputError(
            f"--base {base}: goes with --from-trace; a measurement carries what it lacks by itself"
        )
    if from_trace is not None and measures:
        raise InputError(
            "--from-trace measures nothing, so --quick, --gpus, --only and --allow-busy do not go with it; "
            "leave them out"
        )
    return from_trace is not None


def _from_trace(
    file: Path, output: Path, model: str | None, base: str | None, accelerator: str | None
) -> None:
    from moesim.cli.console import working
    from moesim.kernels.calibrate.from_trace import TraceTable, profile_from_trace
    from moesim.simulator.predict.operator_shapes import operators_of_run
    from moesim.simulator.scenario import load_scenario
    from moesim.simulator.trace import read
    from moesim.simulator.trace.rates import learn
    from moesim.simulator.trace.read import fingerprints

    check_new(output, force=False)
    scenario = load_scenario(model) if model else None
    with working(f"reading {file.name}") as say:
        trace = read(file, None, say)
        say("rates")
        operators = operators_of_run(scenario, trace.ranks[0].raw.rank) if scenario else ()
        found = learn(trace, operators)
        files, date = fingerprints(file)
    name = scenario.name if scenario else ""
    table = TraceTable(found.rows, found.facts, found.missing, files, date, name)
    command = " ".join(["moesim calibrate --from-trace", file.name, *(["--model", model] if model else [])])
    if base is None and scenario is not None and isinstance(scenario.profile, str):
        base = scenario.profile
    profile = profile_from_trace(table, output.stem, base=base, accelerator=accelerator, command=command)
    keep_profile(profile, output, force=True)
    print_table(
        ("use", "size", "count", "seconds", "spread", "sizes from"),
        [_lesson(row) for row in found.rows],
        right=(2, 3, 4),
    )
    print_text(profile.evidence)
    print_text("Note: never score this profile on the run that it came from.")


def _lesson(row: Mapping[str, Any]) -> tuple[str, ...]:
    sizes = {
        key: value for key, value in row["parameters"].items() if key not in ("use", "operation", "launches")
    }
    spread = (row["high_s"] - row["low_s"]) / 2 / row["seconds"]
    return (
        str(row["parameters"].get("use") or row["parameters"]["operation"]),
        " ".join(f"{key}={value:.6g}" for key, value in sizes.items()),
        str(row["count"]),
        f"{row['seconds']:.3e}",
        f"{spread:.1%}",
        row["sizes_from"],
    )


def _command(
    quick: bool,
    gpus: str,
    only: list[str] | None,
    model: str | None,
    accelerator: str | None,
    allow_busy: bool,
) -> str:
    """The command as a profile records it, without the options that do not affect its numbers."""
    words = ["moesim calibrate"]
    words += ["--quick"] if quick else []
    words += [f"--gpus {gpus}"] if gpus != "all" else []
    words += [f"--only {name}" for name in only or ()]
    words += [f"--model {model}"] if model else []
    words += [f"--accelerator {accelerator}"] if accelerator else []
    words += ["--allow-busy"] if allow_busy else []
    return " ".join(words)


def _operators(model: str, quick: bool, accelerator: str) -> Sequence[Mapping[str, Any]]:
    from moesim.simulator.predict.operator_shapes import operators_of

    return operators_of(model, accelerator, quick)


def transfer(
    profile: Annotated[str, typer.Argument(metavar="PROFILE", help="A measured profile: name or file.")],
    target: Annotated[str, typer.Argument(metavar="ACCELERATOR", help="The accelerator to make it for.")],
    output: Output,
    source: Annotated[
        str | None, typer.Option(help="Accelerator that was measured, where the profile is for several.")
    ] = None,
    force: Force = False,
) -> None:
    """Make a profile for an accelerator with the same SMs; every entry states its added error."""
    from moesim.hwmodels.accelerator import load_accelerator
    from moesim.hwmodels.calibration import load_profile
    from moesim.hwmodels.summary_text import percent
    from moesim.kernels.calibrate import statements
    from moesim.kernels.calibrate import transfer as make

    loaded = load_profile(profile)
    measured = load_accelerator(source or loaded.accelerator)
    wanted = load_accelerator(target)
    result = make(loaded, measured, wanted, name=output.stem)
    keep_profile(result, output, force)
    rows = [
        (s.id, s.verdict, f"{s.factor:.3g}", percent(s.error), s.reason)
        for s in statements(loaded, measured, wanted)
    ]
    print_table(("entry", "verdict", "factor", "added error", "why"), rows, right=(2, 3))


@contextmanager
def _progress() -> Iterator[Callable[[CalibrationProgress], None]]:
    """Show a progress bar with the current measurement and the remaining time on stderr, below messages."""
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (
        BarColumn(),
        TextColumn("{task.percentage:3.0f} %"),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Bar(*columns, console=console(stderr=True), transient=True) as bar:
        number = bar.add_task("reading the machine", total=None)

        def tell(state: CalibrationProgress) -> None:
            if state.message:
                bar.console.print(state.message, markup=False, highlight=False, soft_wrap=True)
            bar.update(number, completed=state.done_s, total=state.total_s, description=state.text)

        yield tell


def keep_profile(profile: CalibrationProfile, output: Path, force: bool) -> None:
    """Write a profile and print its path. Raises InputError if the file exists and `force` is not set."""
    from moesim.kernels.export import write_profile

    check_new(output, force)
    write_profile(profile, output)
    say_written(str(output), "name it as `profile` in a scenario, or with --set profile=...")


def _print_drift(old: CalibrationProfile, new: CalibrationProfile) -> None:
    from moesim.hwmodels.drift import compare, verdict

    found = compare(old, new)
    rows = [
        (
            drift.id,
            str(drift.points),
            f"{drift.median:+.1%}" if drift.points else "",
            f"{drift.worst:+.1%} at {drift.worst_at}" if drift.points else "",
            f"{drift.allowed:.1%}",
            "drifted" if drift.drifted else drift.note,
        )
        for drift in found
    ]
    print_text(f"{new.name} against {old.name}: {verdict(found)}")
    for drift in found:
        if drift.drifted:
            print_text(f"  {drift.id}: {drift.summary}")
    print_table(("entry", "points", "median change", "worst", "stated errors", ""), rows, right=(1, 2, 4))
