"""The command line: the composition root, which may import every part.

Results go to stdout, progress and messages to stderr. Exit codes: 0, 1 (a fault of moesim or of the machine),
2 (malformed or illegal input), 3 (legal, but does not fit). Every command imports what it needs when it runs,
so that `moesim --help` stays fast.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable
from copy import copy
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer
from typer.models import CommandInfo

import moesim
from moesim.cli import calibrate, eplb, import_launch, plan, run, serve, simulate, studies, topology, trace
from moesim.cli.console import (
    AsJson,
    Force,
    check_new,
    note,
    print_json,
    print_pairs,
    print_raw,
    print_text,
    printable,
    say_written,
    working,
    wrapped,
)
from moesim.cli.imports import ImportGroup
from moesim.hwmodels.errors import InputError, MoesimError

app = typer.Typer(
    name="moesim",
    help="Predict how long a large MoE training run takes on a cluster, and what it costs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
importers = typer.Typer(
    cls=ImportGroup,
    help="Read descriptions that other tools wrote.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(importers, name="import")
traces = typer.Typer(
    help="Read a profiler's trace of a training step; set it beside a prediction.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(traces, name="trace")
app.add_typer(serve.serving, name="serve")


class ServerError(MoesimError):
    """The dashboard's server process ended unexpectedly."""

    exit_code = 1


@app.command("app")
def dashboard(
    port: Annotated[int, typer.Option(help="Port on 127.0.0.1; 0 takes any free one.", min=0, max=65535)] = (
        8501
    ),
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Only print the address.")] = False,
) -> None:
    """Open the dashboard in a browser; Ctrl-C stops it.

    It listens on this machine only, fetches nothing from the internet and reads no file by path.
    """
    from moesim.app import server_command

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    server_command.check_extra()
    for number in (signal.SIGINT, signal.SIGTERM):  # the server process must not outlive this one
        signal.signal(number, stop)
    port = server_command.chosen_port(port)
    with server_command.running(port) as process:
        try:
            if server_command.wait_until_healthy(process, port):
                typer.echo(
                    f"moesim: the dashboard is at {server_command.url(port)} (Ctrl-C stops it)", err=True
                )
                if not no_browser:
                    import webbrowser

                    webbrowser.open(server_command.url(port))
                process.wait()
        except KeyboardInterrupt:
            typer.echo("moesim: stopped", err=True)
            return
        raise ServerError(f"the dashboard's server ended by itself (exit code {process.poll()})")


for _command in (
    calibrate.calibrate, calibrate.transfer, studies.compare, eplb.eplb, plan.plan, run.run,
    studies.sensitivity, simulate.simulate, simulate.explain, studies.sweep, topology.topology,
):  # fmt: skip
    app.command()(_command)
importers.command("launch")(import_launch.import_launch)
importers.command("megatron", hidden=True)(import_launch.import_launch)  # its former name
importers.command("topology")(topology.import_topology)
traces.command("compare")(trace.compare_trace)
traces.command("export")(trace.export_trace)
traces.command("read")(trace.read_trace)

DIALECT = "https://json-schema.org/draft/2020-12/schema"
"""The version of JSON Schema that the printed schemas are written in."""


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"moesim {moesim.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an internal error.")] = False,
    engine: Annotated[
        str | None,
        typer.Option(
            metavar="auto|simpy|compiled",
            help="The engine that runs steps; all give the same bytes. MOESIM_ENGINE does the same.",
        ),
    ] = None,
) -> None:
    """Take the options before the command; `main` reads --debug itself."""
    if engine is not None:  # processes that the command starts read it as well
        os.environ["MOESIM_ENGINE"] = engine


@app.command()
def schedule(
    name: Annotated[
        str, typer.Argument(help="Such as 1f1b, zb-h1 or dualpipe; any other word prints every name.")
    ],
    pp: Annotated[int, typer.Option(help="Pipeline ranks.")],
    microbatches: Annotated[int, typer.Option(help="Micro-batches of one step.")],
    vpp: Annotated[int, typer.Option(help="Stages a rank, for the interleaved schedules.")] = 1,
    format_: Annotated[str, typer.Option("--format", help="text, json or csv.")] = "text",
    width: Annotated[int | None, typer.Option(help="Columns of the drawing.", min=20, max=10_000)] = None,
) -> None:
    """Draw a pipeline schedule, or print it as CSV or JSON.

    The CSV is the notation of torch.distributed.pipelining, whose runtime refuses bidirectional schedules
    such as dualpipe.
    """
    from moesim.cli.tables import schedule_text
    from moesim.hwmodels.validation import nearest
    from moesim.simulator import schedules

    formats = {
        "text": lambda built: schedule_text(built, width),
        "json": schedules.to_json,
        "csv": schedules.to_csv,
    }
    if format_ not in formats:
        raise InputError(
            f"--format {format_!r} is not one of {', '.join(formats)}{nearest(format_, list(formats))}"
        )
    built = schedules.build(name, pp, microbatches, vpp)
    print_raw(formats[format_](built))
    if format_ == "csv" and len(built.routes) > 1:
        note(
            f"torch.distributed.pipelining refuses this CSV: {built.name} is bidirectional, so two ranks "
            "hold each stage, and its runtime gives every stage to one rank; it runs dualpipev instead"
        )


@app.command()
def validate(
    as_json: AsJson = False,
    all_rows: Annotated[
        bool, typer.Option("--all", help="Score the open rows and the five H200 runs instead.")
    ] = False,
    table: Annotated[
        Path | None,
        typer.Option(
            "--rows", metavar="FILE", help="Score your own measurements: a CSV (docs/validation.md)."
        ),
    ] = None,
    expert_gap: Annotated[
        bool,
        typer.Option("--expert-gap", help="Print what the planner claims over plans that teams tuned."),
    ] = False,
    parts: Annotated[
        bool, typer.Option("--parts", help="Print predicted and traced time by class, of the traced runs.")
    ] = False,
    reliability: Annotated[
        bool, typer.Option("--reliability", help="Print published restarts, blocking times and goodputs.")
    ] = False,
    tuned: Annotated[
        list[str] | None,
        typer.Option("--tuned", metavar="ID", help="A plan of --expert-gap; repeatable. Absent: all."),
    ] = None,
    workers: Annotated[
        int, typer.Option(help="Processes of --all, --rows and --expert-gap.", min=1, max=256)
    ] = 2,
) -> None:
    """Compare published figures with predicted ones."""
    if all_rows + (table is not None) + expert_gap + parts + reliability > 1:
        raise InputError(
            "--all scores shipped rows, --rows your own, --expert-gap the planner, --parts traced runs, "
            "--reliability what stops runs: give one"
        )
    if tuned and not expert_gap:
        raise InputError("--tuned chooses plans of --expert-gap; add it")
    if expert_gap:
        from moesim.cli.scores import print_gaps

        print_gaps(tuned or [], as_json, workers)
        return
    if reliability:
        from moesim.cli.scores import validate_reliability

        validate_reliability(as_json)
        return
    if parts:
        from moesim.cli.scores import print_parts

        print_parts(as_json)
        return
    if all_rows or table is not None:
        from moesim.cli.scores import score_file, scoreboard

        scoreboard(as_json, workers) if table is None else score_file(table, as_json, workers)
        return

    _home_case(as_json)


def _home_case(as_json: bool) -> None:
    """Print the published figures of the home case, and collectives, beside their predictions."""
    from moesim.cli.tables import print_collectives, print_full_checks, print_scores

    with working("validating") as say:
        from moesim.simulator.scenario import load_scenario
        from moesim.simulator.scoring.published import placement_sensitivity, score
        from moesim.simulator.scoring.published_collectives import as_score, score_collectives, summarise
        from moesim.simulator.scoring.published_full_resolution import check_full

        rows = score(say)
        say("collectives")
        collectives = score_collectives()
        home = "deepseek-v3-2048xh800"
        placements = [] if as_json else placement_sensitivity(load_scenario(home), say)
        checks = None if as_json else check_full(say)
    if as_json:
        print_json([row.model_dump() for row in [*rows, *map(as_score, collectives)]])
    else:
        print_scores(rows, placements)
        print_collectives(summarise(collectives))
        if checks is not None:
            print_full_checks(checks)


@app.command()
def models(
    name: Annotated[
        str | None, typer.Argument(help="A shipped model, a model file or a config.json.")
    ] = None,
    search: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="Only models with every word in name, attention, experts or source; also <100B, active<10B.",
        ),
    ] = None,
    profile: Annotated[
        str | None, typer.Option(help="Profile whose evidence is named; default: h200-8gpu.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the shipped models with what prices them, or show one."""
    from moesim.cli.models import print_model, print_models

    if name is None:
        print_models(search, profile, as_json)
    elif search is not None:
        raise InputError(f"models {name} --search {search!r}: give the name of a model or a search, not both")
    else:
        print_model(name, profile, as_json)


@app.command()
def presets(as_json: AsJson = False) -> None:
    """List the shipped scenarios with the evidence for their compute rates."""
    from moesim.cli.tables import print_presets

    print_presets(as_json)


@app.command()
def hardware(
    name: Annotated[
        str | None, typer.Argument(help="A shipped accelerator, node, network or cluster.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the shipped hardware, or show one with sources."""
    from moesim.cli.tables import print_hardware

    print_hardware(name, as_json)


@app.command()
def schema(what: Annotated[str, typer.Argument(help="scenario, result or serving.")]) -> None:
    """Print the JSON Schema of a scenario file, of a result, or of a result of serving."""
    from moesim.hwmodels.validation import nearest

    known = ["scenario", "result", "serving"]
    if what not in known:
        raise InputError(f"schema {what!r} is not one of {', '.join(known)}{nearest(what, known)}")
    if what == "scenario":
        from moesim.simulator.scenario import Scenario

        print_json({"$schema": DIALECT, **Scenario.model_json_schema()})
    elif what == "serving":
        from moesim.simulator.serving.results import ServingResult

        print_json({"$schema": DIALECT, **ServingResult.model_json_schema(mode="serialization")})
    else:
        from moesim.simulator.predict.result import Result

        print_json({"$schema": DIALECT, **Result.model_json_schema(mode="serialization")})


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Show versions, data files and GPUs of this installation."""
    from moesim.cli.doctor import findings

    print_json(findings()) if as_json else print_pairs(findings())


def _list_families(wanted: bool) -> None:
    if wanted:
        from moesim.simulator.model.huggingface import FAMILIES

        for family in sorted(FAMILIES):
            print_text(family)
        raise typer.Exit


@importers.command("hf")
def import_hf(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A Hugging Face config.json.")],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the model file here.")] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the model; default: the file's, else family and parameters.")
    ] = None,
    as_family: Annotated[
        str | None,
        typer.Option("--as", metavar="FAMILY", help="Read the file as one of this family under a new name."),
    ] = None,
    as_json: AsJson = False,
    force: Force = False,
    families: Annotated[
        bool,
        typer.Option(
            "--families", callback=_list_families, is_eager=True, help="List the model families, and exit."
        ),
    ] = False,
) -> None:
    """Read a Hugging Face config.json, and show how each key was understood."""
    from moesim.cli.models import print_import
    from moesim.hwmodels.files import write_atomically
    from moesim.simulator.model import huggingface as hf

    check_new(output, force, yaml_of="model")
    imported = hf.import_hf(config, name, as_family)
    if output is not None:
        write_atomically(output, [hf.to_yaml(imported.shape)])
    print_import(imported, as_json)
    if output is not None:
        say_written(str(output), "use its path as `model` in a scenario")


INTERRUPTED = 130
"""Exit code of a command that Ctrl-C has stopped: 128 + SIGINT."""


def main(arguments: list[str] | None = None) -> NoReturn:
    """Entry point of the console script, which turns errors into one paragraph and an exit code."""
    if arguments is None:
        _start_quickly()
    code = _run(sys.argv[1:] if arguments is None else arguments)
    try:
        sys.stdout.flush()
    except OSError as error:
        if not isinstance(error, BrokenPipeError):  # a reader such as head may close the pipe early
            _complain(f"the result cannot be written: {error.strerror}")
        # What is left in the buffer would fail again, with a traceback, when Python exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = code or 1
    if arguments is None and code == INTERRUPTED:
        sys.stderr.flush()
        os._exit(code)  # giving back a large step's memory object by object takes up to a second
    if arguments is None:
        gc.freeze()  # else Python searches all objects for cycles before it ends: 0.2 s after a prediction
    sys.exit(code)


def _start_quickly() -> None:
    """Settings of the process that make imports faster: a tenth of a second of the first prediction."""
    gc.set_threshold(500_000, 50, 50)  # most objects of a command live until its end
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")  # else it searches all installed packages
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # else NumPy starts threads that wait in a loop


@cache
def commands(only: str | None = None) -> Callable[..., object]:
    """The commands with their options, or only one of them, which are worked out once in a process."""
    some = copy(app)
    if only is not None:
        some.registered_groups = [group for group in app.registered_groups if group.name == only]
        some.registered_commands = [command for command in app.registered_commands if _name(command) == only]
    built: Callable[..., object] = typer.main.get_command(some)
    return built


def _name(command: CommandInfo) -> str:
    """The word that calls a command."""
    assert command.callback is not None, "commands are functions"
    return command.name or typer.main.get_command_name(command.callback.__name__)


def _called(args: list[str]) -> str | None:
    """The command that the first word names; None where it names none, so that all must be known."""
    names = {group.name for group in app.registered_groups} | set(map(_name, app.registered_commands))
    return args[0] if args and args[0] in names else None


def _run(args: list[str]) -> int:
    try:
        commands(_called(args))(args=args, prog_name="moesim")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    except MoesimError as error:
        _complain(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        _complain("interrupted")
        return INTERRUPTED
    except OSError as error:
        _complain(f"{error.filename or 'the output'} cannot be read or written: {error.strerror or error}")
        return 1
    except Exception as error:
        if "--debug" in args:
            raise
        _complain(
            f"internal error ({type(error).__name__}: {error}); this is a fault of moesim "
            f"{moesim.__version__}: please report it with the command, its input, and the traceback that "
            "`moesim --debug ...` shows"
        )
        return 1
    return 0


def _complain(text: str) -> None:
    """Print one paragraph on stderr, with the control characters of foreign input escaped."""
    line = f"moesim: error: {printable(' '.join(text.split()))}"
    lines = wrapped(line) if sys.stderr.isatty() else [line]  # a log keeps a message on one line
    print("\n".join(lines), file=sys.stderr)  # noqa: T201 - this is the console
