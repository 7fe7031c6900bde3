"""The command `plan`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moesim.cli.console import (
    AsJson,
    Scheduler,
    print_json,
    print_raw,
    print_table,
    print_text,
    say_written,
    working,
)
from moesim.hwmodels.errors import InputError

if TYPE_CHECKING:
    from moesim.simulator.planner.result import PlanResult, PlanRow
    from moesim.simulator.scenario import Scenario
    from moesim.simulator.trainers.jobs import JobTemplate


# -- plan exports ------------------------------------------------------------------------------------
# What `moesim plan` prints and writes for a trainer: the arguments of the best plan, and a job file.

KUBERNETES = "k8s"
"""Short name of Kubernetes."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The trainer to write for, and which texts and files of the best plan the user asked for."""

    trainer: str | None
    arguments: bool
    job: str | None
    template: JobTemplate | None
    job_file: Path | None
    output: Path | None

    @staticmethod
    def checked(
        trainer: str | None,
        arguments: str | None,
        job: str | None,
        template: Path | None,
        job_file: Path | None,
        output: Path | None = None,
    ) -> Wanted:
        """Read the options before the search starts; raises InputError where they do not go together."""
        from moesim.hwmodels.files import check_writable
        from moesim.simulator.trainers.jobs import KINDS, load_template
        from moesim.simulator.trainers.registry import trainer_of

        if trainer is not None and arguments not in (None, trainer):
            raise InputError(f"--trainer {trainer} and --arguments {arguments} differ; give one of them")
        chosen = trainer or arguments
        if chosen is not None:
            trainer_of(chosen)
        kind = "kubernetes" if job == KUBERNETES else job
        if kind is not None and kind not in KINDS:
            raise InputError(f"--job {job!r} is not one of {', '.join(KINDS)}, {KUBERNETES}")
        if kind is not None and chosen is None:
            raise InputError(f"--job {job} needs the trainer that the job starts: add --trainer megatron")
        if kind is None and (template or job_file):
            raise InputError("--job-template and --job-file belong to --job slurm or --job k8s; add it")
        for path, what in ((output, "output file"), (job_file, "job file")):
            if path is not None:
                check_writable(path, what)
        if output is not None and job_file is not None and output.resolve() == job_file.resolve():
            raise InputError(f"--output and --job-file both name {output}; give each its own file")
        site = None if template is None else load_template(template)
        return Wanted(chosen, arguments is not None, kind, site, job_file, output)

    def check(self, scenario: Scenario) -> None:
        """Raise InputError for a job or arguments that cannot be written whatever plan the search finds.

        The trainer's arguments for the scenario's own plan stand for those of any plan.
        """
        from moesim.simulator.trainers.jobs import job_text
        from moesim.simulator.trainers.registry import trainer_of

        if self.trainer is None:
            return
        if self.job is not None:
            job_text(self.job, scenario, ("script.py",), {}, self.template)
        try:
            export = trainer_of(self.trainer).arguments(scenario)
        except InputError:
            if scenario.fleet is not None:
                raise
            return  # a reason of this plan, which the search replaces
        if self.job is not None:
            export.command()

    def exports(self, best: PlanRow) -> Exports:
        """Write the texts of the best plan; what fails is kept as a problem, so that the plan is not lost."""
        from moesim.simulator.trainers.registry import trainer_of

        made = Exports()
        if self.output is not None:
            with made.guard():
                hint = "simulate it, or start another search from it"
                made.files.append((self.output, scenario_yaml(best.scenario), hint))
        if self.trainer is not None and self.arguments:
            with made.guard():
                export = trainer_of(self.trainer).arguments(best.scenario)
                made.shown.append(export.text())
                made.plain["arguments"] = export.to_dict()
        if self.job is not None:
            with made.guard():
                text = self._job_text(best)
                if self.job_file is not None:
                    made.files.append(
                        (self.job_file, text, "set the variables that it asks for, and submit it")
                    )
                else:
                    made.shown.append(text)
                    made.plain["job"] = text
        return made

    def _job_text(self, best: PlanRow) -> str:
        from moesim.hwmodels.units import SECONDS_PER_DAY
        from moesim.simulator.trainers.jobs import job_text
        from moesim.simulator.trainers.registry import trainer_of

        assert self.trainer is not None and self.job is not None, "checked together"
        export = trainer_of(self.trainer).arguments(best.scenario)
        run_s = best.days * SECONDS_PER_DAY
        return job_text(self.job, best.scenario, export.command(), export.environment, self.template, run_s)


@dataclass(slots=True)
class Exports:
    """Texts of the best plan: `plain` for JSON, `shown` for people, `files` with their hints.

    `problems` are the errors of those that could not be written.
    """

    plain: dict[str, Any] = field(default_factory=dict)
    shown: list[str] = field(default_factory=list)
    files: list[tuple[Path, str, str]] = field(default_factory=list)
    problems: list[Exception] = field(default_factory=list)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Keep an error as a problem, to be raised by `check` once the plan has been printed."""
        try:
            yield
        except Exception as error:
            self.problems.append(error)

    def write(self) -> None:
        """Write the files."""
        from moesim.hwmodels.files import write_atomically

        for path, text, hint in self.files:
            with self.guard():
                write_atomically(path, [text])
                say_written(str(path), hint)

    def show(self) -> None:
        """Print the texts that go to no file."""
        for text in self.shown:
            print_raw("\n" + text)

    def check(self) -> None:
        """Raise the first problem."""
        if self.problems:
            raise self.problems[0]


def scenario_yaml(scenario: Scenario) -> str:
    """The text of a scenario file."""
    from moesim.hwmodels.files import is_there
    from moesim.hwmodels.yaml_io import dump_mapping

    data = scenario.model_dump(mode="json", exclude_none=True)
    for key in ("model", "profile"):  # paths relative to the old file become absolute
        if isinstance(data.get(key), str) and is_there(path := Path(scenario.path(data[key]))):
            data[key] = str(path.resolve())
    for pool in data.get("fleet", {}).get("pools", ()):
        path = Path(scenario.path(pool.get("profile", "")))
        if "profile" in pool and is_there(path):
            pool["profile"] = str(path.resolve())
    return dump_mapping(data)


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
    scheduler: Scheduler = None,
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
    as_json: AsJson = False,
) -> None:
    """Find the best plans that are legal and fit: bound all, estimate some, simulate the best."""
    from moesim.simulator.planner.search import plan as search
    from moesim.simulator.planner.space import load_space, varied, with_headroom
    from moesim.simulator.scenario import load_scenario

    wanted = Wanted.checked(trainer, arguments, job, job_template, job_file, output)
    usual = 1 if scheduler else min(os.cpu_count() or 1, 4)
    told = -1

    def progress(share: float, text: str) -> None:
        nonlocal told
        if int(10 * share) > told:  # a line for every tenth of the work
            told = int(10 * share)
            say(f"{share:.0%}: {text}")

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
            progress=progress,
            workers=usual if workers is None else workers,
            scheduler=scheduler,
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


def _print(result: PlanResult) -> None:
    from moesim.simulator.planner.causes import difference
    from moesim.simulator.planner.result import place_text, tied_text

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
        # What the search was limited to, and what the best of all plans would gain.
        print_text(f"searched what {result.trainer.trainer} can run, priced as it runs it")
        first, *reasons = result.trainer.sentences or ("no plan of other frameworks fits",)
        lines = [
            *(f"  {text}" for text in result.trainer.replaced),
            first,
            *(f"  {text}" for text in reasons),
        ]
        print_text("\n".join(lines))
    for sentence in result.kept:
        print_text(sentence)
    print_text("")
    headers = ("plan", "precision", "recompute", "SMs", "ZeRO", "step s", "over best", "GiB", "days", "M$")
    rows = [(place_text(row, result.ranked), *_cells(row)) for row in result.ranked]
    print_table(("", *headers), rows, right=(0, *range(4, 11)))
    if any(row.place != n for n, row in enumerate(result.ranked, 1)):
        print_text("= : tied, as the 80 % interval of the difference of their steps holds zero")
    if result.own is not None:
        place = f"place {result.own_rank} by closed form"
        place = "not among those that were estimated" if result.own_rank is None else place
        print_text(f"\nthe scenario's own plan, {place}{tied_text(result.own)}")
        print_table(headers, [_cells(result.own)], right=range(3, 10))
        print_text("\nseconds that it takes more than the best, by mechanism")
        gaps = difference(result.own.causes_s, result.best.causes_s)
        print_table(("", ""), [(cause, f"{value:+.3f}") for cause, value in gaps.items()], right=(1,))
    if result.fleet is not None:
        from moesim.cli.report import print_verdict

        print_verdict(result)
    print_text("\nmemory of the best plan's fullest GPU, GiB")
    kinds = sorted(result.best.memory_by_kind_bytes.items(), key=lambda item: -item[1])
    print_table(("", ""), [(kind, f"{value / 2**30:.1f}") for kind, value in kinds], right=(1,))
    if result.pareto:
        print_text("\nleast time for the memory (* by closed form)")
        print_table(headers, [_cells(row) for row in result.pareto], right=range(3, 10))
    print_text("\nrefused")
    refused = [(f"{r.count:,}", r.reason, r.example) for r in result.refused]
    print_table(("plans", "reason", "for example"), refused)
    for note in result.notes:
        print_text(f"note: {note}")


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
        f"{row.memory_bytes / 2**30:.1f}" + ("" if row.verdict == "fits" else f", {row.verdict}"),
        f"{row.days:.1f}",
        "" if row.cost_usd is None else f"{row.cost_usd / 1e6:.2f}",
    )
