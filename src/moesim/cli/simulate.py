"""The commands `simulate` and `explain`, which predict one scenario."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec import Struct

from moesim.cli.console import (
    AsJson,
    EngineDraws,
    Overrides,
    Resolution,
    ScenarioName,
    Scheduler,
    Seed,
    chosen_numbers,
    note,
    say_written,
    width,
    working,
)
from moesim.hwmodels.errors import InfeasibleError, InputError

if TYPE_CHECKING:
    from moesim.cli.kept import KeptAnswer
    from moesim.simulator.engine.records import Execution
    from moesim.simulator.predict.driver import Prediction
    from moesim.simulator.predict.result import Result
    from moesim.simulator.predict.step import Prepared
    from moesim.simulator.scenario import Scenario


def simulate(
    scenario: ScenarioName,
    overrides: Overrides = None,
    as_json: AsJson = False,
    trace: Annotated[
        Path | None,
        typer.Option(help="Write a Perfetto trace to this .json or .json.gz file.", dir_okay=False),
    ] = None,
    trace_per_rank: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Write one trace file a GPU into this folder, which is created, as Holistic Trace Analysis "
            "reads them.",
        ),
    ] = None,
    ranks: Annotated[
        str | None,
        typer.Option(
            metavar="0,5-7|all",
            help="What the trace shows: pipeline ranks (default all); in full resolution GPUs by number "
            "(default one pipeline).",
        ),
    ] = None,
    members: Annotated[
        str | None,
        typer.Option(
            metavar="0,1|all",
            help="GPUs of each pipeline rank's expert-parallel group in the trace (folded resolution).",
        ),
    ] = None,
    resolution: Resolution = None,
    picture: Annotated[
        Path | None,
        typer.Option(help="Draw the heat maps of full resolution into this .svg or .png file."),
    ] = None,
    seed: Seed = None,
    uncertainty: Annotated[
        bool, typer.Option("--uncertainty", help="Add P10, P50 and P90 from the calibration's errors.")
    ] = False,
    engine_draws: EngineDraws = 0,
    scheduler: Scheduler = None,
    fast: Annotated[
        bool,
        typer.Option("--fast", help="Estimate in closed form instead: step time, bound, memory, cost."),
    ] = False,
) -> None:
    """Predict one training step and the run made of it."""
    shown = _Shown(trace, trace_per_rank, ranks, members)
    if fast:
        from moesim.cli.report import print_estimate

        beside = {**shown.options(), "--picture": picture, "--uncertainty": uncertainty}
        beside |= {"--engine-draws": engine_draws, "--scheduler": scheduler}
        print_estimate(_loaded(scenario, overrides, seed, resolution), scenario, beside, as_json=as_json)
        return
    if engine_draws or scheduler:
        from moesim.simulator.common.processes import check_cluster
        from moesim.simulator.studies.uncertainty import check_draws

        check_cluster(scheduler, engine_draws)
        check_draws(engine_draws)
        if not uncertainty:
            raise InputError(f"--engine-draws {engine_draws} needs --uncertainty")
    if shown == _Shown() and picture is None and not uncertainty:
        _answer(scenario, overrides, seed, resolution, as_json)
        return
    _check_options(shown, picture)
    loaded = _loaded(scenario, overrides, seed, resolution)
    if loaded.fleet is not None:
        from moesim.cli.report import refuse_for_fleet

        refuse_for_fleet({**shown.options(), "--picture": picture, "--uncertainty": uncertainty})
    result, prepared = _predicted(loaded, scenario, shown, uncertainty, engine_draws, scheduler)
    if picture is not None:
        from moesim.cli.full_resolution import draw_heat_maps

        draw_heat_maps(picture, result)
    answer = _answer_of(loaded, result, prepared, as_json)
    answer.print(as_json)
    if result.uncertainty is not None and not as_json:
        from moesim.cli.studies import print_bands

        print_bands(result.uncertainty)
    answer.check_fit()


def _answer(
    scenario: str, overrides: list[str] | None, seed: int | None, resolution: str | None, as_json: bool
) -> None:
    """Print the prediction of a command without further options: the kept answer, or else a new one."""
    from moesim.cli.kept import find_answer, keep_answer
    from moesim.hwmodels.files import consulted_paths

    command: list[object] = [scenario, overrides or [], seed, resolution, as_json, width()]
    answer = find_answer(command)
    if answer is None:
        with consulted_paths() as paths:
            loaded = _loaded(scenario, overrides, seed, resolution)
            result, prepared = _predicted(loaded, scenario, _Shown(), uncertainty=False)
            answer = _answer_of(loaded, result, prepared, as_json)
        if loaded.fleet is None:
            keep_answer(command, loaded.name, answer, paths)
    answer.print(as_json)
    answer.check_fit()


def _predicted(
    loaded: Scenario,
    scenario: str,
    shown: _Shown,
    uncertainty: bool,
    engine_draws: int = 0,
    scheduler: str | None = None,
) -> tuple[Result, Prepared | None]:
    """The cached prediction of a scenario, or a new one, which is stored, with what it was prepared to."""
    result = None if shown.traced else _cached(loaded, uncertainty, engine_draws)
    if result is not None:
        return result, None
    prepared, executions, result = _predict(loaded, scenario)
    if shown.traced:
        _write_traces(prepared, executions, shown)
    if uncertainty:
        from moesim.cli.studies import draws_done
        from moesim.simulator.studies.uncertainty import uncertainty as bands
        from moesim.simulator.studies.whole_run import with_uncertain_run

        with working("varying the inputs") as say:
            found = bands(
                prepared,
                executions,
                result,
                engine_draws=engine_draws,
                scheduler=scheduler,
                say=draws_done(say),
            )
        result = with_uncertain_run(prepared, executions, result.model_copy(update={"uncertainty": found}))
    _store(loaded, result)
    return result, prepared


def _answer_of(loaded: Scenario, result: Result, prepared: Prepared | None, as_json: bool) -> KeptAnswer:
    """The prediction as JSON or in words, and why it does not fit."""
    from moesim.cli.kept import KeptAnswer as Answer

    shortage = "" if result.memory.fits else f"{result.scenario}: {result.memory.shortage}"
    if as_json:
        return Answer(result.model_dump_json(indent=2), shortage)
    from moesim.cli.report import summary
    from moesim.simulator.predict.provenance import summary_of_kept, summary_of_prepared

    plan = summary_of_kept(loaded) if prepared is None else summary_of_prepared(prepared)
    return Answer(summary(plan, result), shortage)


class _Shown(Struct, frozen=True):
    """The options of traces: their paths, and the ranks and members that they show."""

    trace: Path | None = None
    folder: Path | None = None
    ranks: str | None = None
    members: str | None = None

    @property
    def traced(self) -> bool:
        """Whether a trace is requested."""
        return self.trace is not None or self.folder is not None

    def options(self) -> dict[str, object]:
        """The value of every option."""
        return {
            "--trace": self.trace,
            "--trace-per-rank": self.folder,
            "--ranks": self.ranks,
            "--members": self.members,
        }


def _check_options(shown: _Shown, picture: Path | None) -> None:
    """Raise InputError for unusable options before the simulation starts."""
    from moesim.cli.full_resolution import picture_path
    from moesim.simulator.predict.trace import check_trace_folder, trace_path

    if shown.trace is not None:
        trace_path(shown.trace)
    if shown.folder is not None:
        check_trace_folder(shown.folder)
    for option, text in (("--ranks", shown.ranks), ("--members", shown.members)):
        if text is not None:
            chosen_numbers(option, text)
    if picture is not None:
        picture_path(picture)


def _loaded(scenario: str, overrides: list[str] | None, seed: int | None, resolution: str | None) -> Scenario:
    from moesim.simulator.scenario import load_scenario

    extra = [] if seed is None else [f"seed={seed}"]
    extra += [] if resolution is None else [f"resolution={resolution}"]
    return load_scenario(scenario, [*(overrides or []), *extra])


def _cached(loaded: Scenario, uncertainty: bool = False, engine_draws: int = 0) -> Result | None:
    """The prediction from the result cache, where an earlier command or the dashboard may have stored it."""
    from moesim.simulator.studies import result_cache

    return None if result_cache.folder() is None else result_cache.find(loaded, uncertainty, engine_draws)


def _store(loaded: Scenario, result: Result) -> None:
    from moesim.simulator.studies import result_cache

    result_cache.keep(loaded, result)
    if result_cache.problem() is not None:
        note(str(result_cache.problem()))


def _prepared(loaded: Scenario, scenario: str) -> Prepared:
    from moesim.simulator.predict.step import prepare

    try:
        return prepare(loaded)
    except InputError as error:  # the message of contradicting keys lacks the file's name
        raise InputError(f"{scenario}: {error}") from None


def _predict(loaded: Scenario, scenario: str) -> Prediction:
    with working(f"simulating {scenario}") as say:
        from moesim.simulator.predict.driver import finish

        prepared = _prepared(loaded, scenario)
        count = sum(len(steps) for program in prepared.programs for steps in program.ranks)
        where = "" if len(prepared.programs) == 1 else f", {len(prepared.programs)} groups each"
        say(
            f"{prepared.scenario.name}: running {count:,} actions on {prepared.schedule.pp} pipeline "
            f"ranks{where}"
        )
        return finish(prepared)


def _write_traces(prepared: Prepared, executions: Sequence[Execution], shown: _Shown) -> None:
    from moesim.simulator.predict.step import ExecutedStep
    from moesim.simulator.predict.trace import (
        shown_gpus,
        shown_places,
        trace_info,
        write_trace,
    )
    from moesim.simulator.trace.export import export_step

    chosen = None if shown.ranks is None else chosen_numbers("--ranks", shown.ranks)
    if prepared.whole is not None:
        if shown.members is not None:
            raise InputError(
                "--members names GPUs of the folded run; in full resolution use --ranks for GPUs"
            )
        every = prepared.whole.gpus[:, list(prepared.whole.running)].ravel().tolist()
        gpus = every if chosen is None and shown.ranks is not None else chosen
        parts = shown_gpus(prepared, executions, gpus)
    else:
        who = [0] if shown.members is None else chosen_numbers("--members", shown.members)
        everyone = list(range(prepared.program.members))
        parts = shown_places(executions[0], trace_info(prepared), chosen, everyone if who is None else who)
    with working("writing the trace"):
        if shown.trace is not None:
            write_trace(shown.trace, parts)
            say_written(str(shown.trace), "open it at https://ui.perfetto.dev")
        if shown.folder is not None:
            gpus = [part.info.gpus[rank][member] for part in parts for rank, member in part.places]
            paths = export_step(ExecutedStep(prepared, executions), shown.folder, "kineto", gpus)
            say_written(f"{len(paths)} files in {shown.folder}", "for Holistic Trace Analysis and TraceLens")


def explain(
    scenario: ScenarioName,
    overrides: Overrides = None,
    seed: Seed = None,
    resolution: Resolution = None,
    counterfactuals: Annotated[
        bool,
        typer.Option(
            help="Run the step once without each of its causes (skew, transfers, full links, ...) and show "
            "what the cause costs."
        ),
    ] = True,
) -> None:
    """Explain where a step's time goes and why."""
    from moesim.cli.report import print_explanation
    from moesim.cli.studies import run_counterfactuals

    loaded = _loaded(scenario, overrides, seed, resolution)
    result, prepared = _cached(loaded), None
    if result is None:
        prepared, _, result = _predict(loaded, scenario)
        _store(loaded, result)
    prepared = prepared or _prepared(loaded, scenario)
    print_explanation(prepared, result, run_counterfactuals(prepared, result) if counterfactuals else None)
    if not result.memory.fits:
        raise InfeasibleError(f"{result.scenario}: {result.memory.shortage}")
