"""The command `plan`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moesim.cli.plan_exports import Wanted

if TYPE_CHECKING:
    from moesim.simulator.planner.result import PlanResult, PlanRow, TrainerVerdict

GIB = 2**30


def register(app: typer.Typer) -> None:
    """Add the command to the console script's application."""
    app.command(name="plan")(plan)


def plan(
    scenario: Annotated[str, typer.Argument(metavar="SCENARIO", help="A preset name or scenario file.")],
    space: Annotated[
        Path | None, typer.Option(help="YAML file with lists of values by key; see docs/planner.md.")
    ] = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUES",
            help="Values of one key of the space, such as precision=bf16,fp8 or sms=8..24:+4; repeatable.",
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Replace a scenario key first.")
    ] = None,
    objective: Annotated[str, typer.Option(help="time, cost, energy, deadline or memory.")] = "time",
    top: Annotated[
        int, typer.Option(help="Families of plans that the engine simulates and ranks, up to 1000.")
    ] = 10,
    deadline_days: Annotated[float | None, typer.Option(help="Days that the run may take.")] = None,
    budget_usd: Annotated[float | None, typer.Option(help="Dollars that the run may cost.")] = None,
    headroom: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="Share of the memory that the bytes in use leave free; 0 admits plans at risk. Absent: what "
            "framework and allocator may reserve stays free.",
        ),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Processes for the engine; as many as there are cores, up to 4.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the best plan's scenario to this YAML file.")
    ] = None,
    trainer: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[@VERSION]",
            help="Search only what this training framework can run (megatron, megatron@0.14, ...), and say "
            "what the best of all plans would gain.",
        ),
    ] = None,
    arguments: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[@VERSION]", help="As --trainer, and print its arguments for the best plan."
        ),
    ] = None,
    job: Annotated[
        str | None,
        typer.Option(
            metavar="slurm|k8s", help="Write a job file that starts the best plan with the trainer."
        ),
    ] = None,
    job_template: Annotated[
        Path | None, typer.Option(help="YAML with the site's part of the job: partition, image, paths, ...")
    ] = None,
    job_file: Annotated[
        Path | None, typer.Option(help="Where the job file goes; absent: it is printed.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Find the best plans that are legal and fit: bound all, estimate some, simulate the best."""
    from moesim.cli.console import print_json, working
    from moesim.simulator.planner.search import plan as search
    from moesim.simulator.planner.space import load_space, varied, with_headroom
    from moesim.simulator.scenario import load_scenario

    wanted = Wanted.checked(trainer, arguments, job, job_template, job_file, output)
    processes = min(os.cpu_count() or 1, 4) if workers is None else workers
    with working(f"planning {scenario}") as say:
        values = with_headroom(varied(load_space(space), vary or []), headroom)
        loaded = load_scenario(scenario, overrides or [])
        wanted.check(loaded)
        limit = trainer or (wanted.trainer if loaded.fleet is None else None)
        result = search(
            loaded,
            space=values,
            objective=objective,
            top=top,
            deadline_days=deadline_days,
            budget_usd=budget_usd,
            progress=_tenths(say),
            workers=processes,
            trainer=limit,
        )
    exports = wanted.exports(result.best)
    exports.write()  # before the text, as its reader may close the pipe
    if as_json:
        print_json({**result.to_dict(), **exports.plain})
    else:
        _print(result)
        exports.show()
    exports.check()


def _tenths(say: Callable[[str], None]) -> Callable[[float, str], None]:
    """A progress callback that prints one line for every tenth of the work."""
    told = -1

    def progress(share: float, text: str) -> None:
        nonlocal told
        if int(10 * share) > told:
            told = int(10 * share)
            say(f"{share:.0%}: {text}")

    return progress


def _print(result: PlanResult) -> None:
    from moesim.cli.console import print_table, print_text
    from moesim.simulator.planner.step_mechanisms import difference

    if result.inputs is not None:
        print_text("\n".join([result.inputs.name, *result.inputs.lines(plan=False)]))
    print_text(
        f"{result.considered:,} plans: {result.legal:,} legal, {result.fitting:,} fit; {result.estimated:,} "
        f"in closed form, {result.simulated} simulated; {result.price_tables:,} price tables"
    )
    if result.proven_s is not None:
        print_text(
            f"every other plan that fits needs at least {result.proven_s:.2f} s a step (lower bound); "
            f"{result.rivals} families were not simulated though within the closed form's error of the best"
        )
    if result.trainer is not None:
        _print_trainer(result.trainer)
    for sentence in result.kept:
        print_text(sentence)
    print_text("")
    rows = [_cells(row) for row in result.ranked]
    headers = ("plan", "precision", "recompute", "SMs", "ZeRO", "step s", "over best", "GiB", "days", "M$")
    print_table(headers, rows, right=range(3, 10))
    if result.own is not None:
        place = (
            "not among those that were estimated"
            if result.own_rank is None
            else f"place {result.own_rank} by closed form"
        )
        print_text(f"\nthe scenario's own plan, {place}")
        print_table(headers, [_cells(result.own)], right=range(3, 10))
        print_text("\nseconds that it takes more than the best, by mechanism")
        gaps = difference(result.own.causes_s, result.best.causes_s)
        print_table(("", ""), [(cause, f"{value:+.3f}") for cause, value in gaps.items()], right=(1,))
    if result.fleet is not None:
        from moesim.cli.fleet import print_verdict

        print_verdict(result)
    print_text("\nmemory of the best plan's fullest GPU, GiB")
    kinds = sorted(result.best.memory_by_kind_bytes.items(), key=lambda item: -item[1])
    print_table(("", ""), [(kind, f"{value / GIB:.1f}") for kind, value in kinds], right=(1,))
    if result.pareto:
        print_text("\nleast time for the memory (* by closed form)")
        print_table(headers, [_cells(row) for row in result.pareto], right=range(3, 10))
    print_text("\nrefused")
    print_table(
        ("plans", "reason", "for example"), [(f"{r.count:,}", r.reason, r.example) for r in result.refused]
    )
    for note in result.notes:
        print_text(f"note: {note}")


def _print_trainer(verdict: TrainerVerdict) -> None:
    """What the search was limited to, and what the best of all plans would gain."""
    from moesim.cli.console import print_text

    print_text(f"searched what {verdict.trainer} can run, priced as it runs it")
    for sentence in verdict.replaced:
        print_text(f"  {sentence}")
    first, *reasons = verdict.sentences or ("no plan of other frameworks fits",)
    print_text(first)
    for reason in reasons:
        print_text(f"  {reason}")


def _cells(row: PlanRow) -> tuple[str, ...]:
    from moesim.simulator.planner.result import step_text

    changed = "".join(f" {key}={value}" for key, value in row.changed.items())
    return (
        row.label + changed,
        row.precision,
        row.recompute,
        str(row.sms),
        str(row.zero_stage),
        step_text(row.time_s) + ("" if row.source == "simulated" else "*"),
        f"{100 * row.margin:+.1f} %",
        f"{row.memory_bytes / GIB:.1f}" + ("" if row.verdict == "fits" else f", {row.verdict}"),
        f"{row.days:.1f}",
        "" if row.cost_usd is None else f"{row.cost_usd / 1e6:.2f}",
    )
