"""The command `run`: predicts phases, interruptions, finish date and cost of a whole training run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from moesim.cli.console import print_text
from moesim.cli.run_report import report_lines
from moesim.hwmodels.errors import InfeasibleError, InputError

if TYPE_CHECKING:
    pass


def register(app: typer.Typer) -> None:
    """Add the command of this module to the command line."""
    app.command("run")(run)


def run(
    scenario: Annotated[
        str, typer.Argument(metavar="SCENARIO", help="A preset name, or a YAML or JSON file.")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Replace a scenario key, such as run.start=2026-12-01; repeatable.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
    seed: Annotated[int | None, typer.Option(help="Seed of every draw; short for --set seed=N.")] = None,
) -> None:
    """Predict the whole run: phases, failures and restarts, finish date, cost, energy.

    A run that does not mention failures has published ones of its accelerator, chosen by rule and listed in
    the report; --set run.failures=none leaves them out.
    """
    from moesim.cli.console import working
    from moesim.cli.report import shortage

    with working(f"simulating {scenario}") as say:
        from moesim.simulator.predict.compile import prepare
        from moesim.simulator.predict.step import execute
        from moesim.simulator.scenario import load_scenario
        from moesim.simulator.scenario.inputs import inputs_of
        from moesim.simulator.studies.whole_run import uncertain_report, with_default_stops

        extra = [] if seed is None else [f"seed={seed}"]
        loaded = load_scenario(scenario, [*(overrides or []), *extra])
        try:
            with_stops, assumed = with_default_stops(loaded)
            prepared = prepare(with_stops)
            say(f"{loaded.name}: steps, phases and interruptions")
            report = uncertain_report(prepared, execute(prepared).executions)
            report = report.model_copy(update={"inputs": inputs_of(loaded), "defaults": assumed})
        except (InputError, InfeasibleError) as error:
            raise type(error)(f"{scenario}: {error}") from None
    if as_json:
        typer.echo(report.model_dump_json(indent=2))
    else:
        title = f"{loaded.name}, the whole run on {prepared.cluster.n_gpus:,} GPUs"
        print_text("\n".join([title, *(report.inputs.lines() if report.inputs else ()), ""]))
        print_text("\n".join(report_lines(report)))
    if not prepared.memory.fits:
        raise InfeasibleError(shortage(loaded.name, prepared.memory))
