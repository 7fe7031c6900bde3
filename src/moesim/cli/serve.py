"""The commands `serve ...`, which serve requests with a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moesim.cli.console import (
    AsJson,
    Overrides,
    ScenarioName,
    Scheduler,
    Seed,
    print_json,
    print_raw,
    print_table,
    print_text,
    say_written,
    working,
)
from moesim.cli.plan import scenario_yaml
from moesim.cli.studies import MOST_REASONS, check_possible
from moesim.hwmodels.errors import InfeasibleError, InputError
from moesim.hwmodels.files import check_writable, write_atomically

if TYPE_CHECKING:
    from moesim.simulator.scenario import Scenario
    from moesim.simulator.serving.results import ServingResult
    from moesim.simulator.serving.sized import ServingPlan

serving = typer.Typer(
    help="Serve requests with a model: what users wait, what it costs, how many GPUs it takes.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@serving.command("simulate")
def simulate(
    scenario: ScenarioName,
    overrides: Overrides = None,
    as_json: AsJson = False,
    seed: Seed = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a Perfetto trace of the requests' lives.")
    ] = None,
    step_trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a Perfetto trace of one decode step.")
    ] = None,
    with_intervals: Annotated[
        bool,
        typer.Option(
            "--intervals/--no-intervals", help="Serve it twice more for the figures' 80 % intervals."
        ),
    ] = True,
) -> None:
    """Serve the load of a scenario request by request."""
    from moesim.simulator.predict.trace import trace_path
    from moesim.simulator.scenario import load_scenario
    from moesim.simulator.serving import trace as traces
    from moesim.simulator.serving.replicas import PromptChunk
    from moesim.simulator.serving.simulate import intervals, prepare, result_of

    for path in (trace, step_trace):
        if path is not None:
            trace_path(path)
    extra = [] if seed is None else [f"seed={seed}"]
    chunks: list[PromptChunk] = []
    with working(f"serving {scenario}"):
        loaded = load_scenario(scenario, (*(overrides or []), *extra))
        service = prepare(loaded)
        if trace is not None:
            traces.check_traced(len(service.requests))
        served = service.run(watch=None if trace is None else chunks.append)
        result = result_of(service, served)
        if with_intervals:
            result = result.model_copy(update={"intervals": intervals(loaded)})
    if trace is not None:
        traces.write_request_trace(trace, service, served, chunks)
        say_written(str(trace), "open it in ui.perfetto.dev")
    if step_trace is not None:
        step = traces.write_step_trace(step_trace, service, served)
        say_written(str(step_trace), step.words)
    print_raw(result.model_dump_json(indent=2)) if as_json else print_text(str(result))
    check_served(result)


@serving.command("validate")
def validate(
    rows: Annotated[
        Path | None,
        typer.Option(
            "--rows", metavar="FILE", help="Score your own runs: a CSV (docs/validation/serving.md)."
        ),
    ] = None,
    operators: Annotated[
        Path | None,
        typer.Option("--operators", metavar="FOLDER", help="Score kernels of public tables, by family."),
    ] = None,
    workers: Annotated[int, typer.Option(help="Processes.", min=1, max=256)] = 2,
    as_json: AsJson = False,
) -> None:
    """Compare measured serving with predictions: order of plans, TTFT and TPOT, published throughput."""
    from moesim.cli.serve_scores import validate_operators, validate_serving

    if operators is not None and rows is not None:
        raise InputError("--rows scores served runs, --operators kernels: give one")
    if operators is not None:
        validate_operators(operators, as_json)
    else:
        validate_serving(rows, as_json, workers)


def check_served(result: ServingResult) -> None:
    """Raise InfeasibleError for a load that never drains, and for limits that no request keeps."""
    from moesim.simulator.serving.results import goodput_text, stable_text

    if not result.drains:
        raise InfeasibleError(
            f"{result.scenario}: the load never drains, the queue of {result.offered_per_s:.3g} requests/s "
            f"grows without end; {stable_text(result)}: lower the rate, or raise serving.replicas"
        )
    if result.goodput is not None and not result.goodput.share:
        raise InfeasibleError(
            f"{result.scenario}: no request keeps the limits; {goodput_text(result.goodput)}"
        )


# -- plan --------------------------------------------------------------------------------------------
# The command `serve plan`: the fewest GPUs, or the lowest price, for a load and limits.

Varied = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=VALUES",
        help="Values of a key of `serving`, such as tp=1..8:x2 or cache=bf16,fp8; repeatable.",
    ),
]


@serving.command("plan")
def plan(
    scenario: ScenarioName,
    overrides: Overrides = None,
    objective: Annotated[str, typer.Option(help="cost ($ an hour) or gpus.")] = "cost",
    accelerators: Annotated[
        str | None,
        typer.Option(metavar="NAME,NAME", help="Such as h100,h200,b200. Absent: the scenario's cluster."),
    ] = None,
    vary: Varied = None,
    modes: Annotated[
        str, typer.Option(help="One pool for all work, or pools for prompts and for decodes.")
    ] = "aggregated,disaggregated",
    max_gpus: Annotated[int | None, typer.Option(help="GPUs of each accelerator.")] = None,
    top: Annotated[int, typer.Option(help="Plans that are served request by request and listed.")] = 5,
    workers: Annotated[int | None, typer.Option(help="Processes; as many as cores, up to 4.")] = None,
    scheduler: Scheduler = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the best plan's scenario to this YAML file.")
    ] = None,
    export: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write the engine's command lines of the best plan.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find the fewest GPUs, or the lowest price, that serve a load within the limits of its users."""
    from moesim.simulator.common.processes import default_workers
    from moesim.simulator.common.texts import key_and_text
    from moesim.simulator.serving.sizing import serve_plan

    usual = 1 if scheduler else min(default_workers(), 4)
    space: dict[str, str] = {}
    for text in vary or []:
        key, values = key_and_text(text, "--vary", "KEY=VALUES, for example tp=1..8:x2")
        space[key] = values
    if output is not None:
        check_writable(output, "output file")
    with working(f"sizing {scenario}") as say:
        found = serve_plan(
            scenario,
            *(overrides or []),
            objective=objective,
            accelerators=_names(accelerators),
            vary=space,
            modes=_names(modes),
            max_gpus=max_gpus,
            top=top,
            workers=usual if workers is None else workers,
            scheduler=scheduler,
            progress=say,
        )
    if output is not None:
        write_atomically(output, [scenario_yaml(found.best.scenario)])
        say_written(str(output), "serve it with `moesim serve simulate`")
    if export is not None:
        _write_flags(found.best.scenario, export)
    print_json(found.to_dict()) if as_json else _print_plan(found)


def _names(text: str | None) -> tuple[str, ...]:
    return tuple(name.strip() for name in (text or "").split(",") if name.strip())


def _print_plan(found: ServingPlan) -> None:
    from moesim.simulator.serving import sized

    print_text(f"{found.scenario}, least {found.objective}")
    print_text("\n".join(found.inputs.lines(plan=False)))
    print_text(f"{sized.limits_text(found.limits)} at {found.rate_per_s:.3g} requests/s")
    print_text("\n".join([*found.counts(), ""]))
    print_table(sized.plan_heads(), [sized.plan_cells(row) for row in found.plans], right=(3, 4, 5, 6))
    if found.frontier:
        print_text("\nfrontier: most tokens a GPU for the speed of a user (closed form)")
        cells = [sized.frontier_cells(point) for point in found.frontier]
        print_table(sized.frontier_heads(), cells, right=range(5))
    for note in found.notes:
        print_text(f"note: {note}")


# -- flags -------------------------------------------------------------------------------------------
# The command `serve flags`: a plan as the command lines of its engine.


@serving.command("flags")
def flags(
    scenario: ScenarioName,
    overrides: Overrides = None,
    export: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write the files here instead of printing them.")
    ] = None,
) -> None:
    """Print the command lines with which vLLM, SGLang or TensorRT-LLM serves a scenario."""
    import moesim
    from moesim.simulator.serving.flags import serving_flags

    loaded = moesim.load(scenario, *(overrides or []))
    if export is None:
        print_raw(serving_flags(loaded).text())
    else:
        _write_flags(loaded, export)


def _write_flags(scenario: Scenario, folder: Path) -> None:
    from moesim.simulator.serving.flags import serving_flags

    for path in serving_flags(scenario).write(folder):
        say_written(str(path), "set the variables that it asks for")


# -- sweep -------------------------------------------------------------------------------------------
# The command `serve sweep`: serves a load at every point of a space.


@serving.command("sweep")
def sweep(
    scenario: ScenarioName,
    space: Annotated[
        list[str],
        typer.Argument(
            metavar="KEY=VALUES...", help="Such as serving.tp=1..8:x2 serving.load.rate_per_s=1,2,4."
        ),
    ],
    overrides: Overrides = None,
    workers: Annotated[int | None, typer.Option(help="Processes; as many as cores.")] = None,
    store: Annotated[
        Path | None, typer.Option(help="SQLite file that keeps every point; only missing ones are served.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Serve a load at every point of a grid over keys of the scenario."""
    from moesim.simulator.common.texts import key_and_text
    from moesim.simulator.serving.simulate import HEADS, serve_sweep

    grid: dict[str, str] = {}
    for text in space:
        key, values = key_and_text(text, "KEY=VALUES", "KEY=VALUES, for example serving.tp=1..8:x2")
        if key in grid:
            raise InputError(f"{key} is given twice; put all its values into one")
        grid[key] = values
    with working(f"sweeping {scenario}") as say:
        found = serve_sweep(
            scenario,
            grid,
            *(overrides or []),
            workers=workers,
            store=store,
            progress=lambda now: say(str(now)),
        )
    if as_json:
        print_json(found.to_dict())
    else:
        print_text("\n".join([found.scenario, *found.inputs.lines(plan=False)]))
        keys = list(grid)
        rows = [found.cells(point, keys) for point in found.points]
        print_table(
            [*keys, "status", *HEADS.values()], rows, right=range(len(keys) + 1, len(keys) + 1 + len(HEADS))
        )
        print_text(f"{len(found.points)} points, {found.computed} served, {found.reused} from the store")
        for (status, why), number in found.reasons()[:MOST_REASONS]:
            print_text(f"{number} {status}: {why}")
    check_possible(found)
