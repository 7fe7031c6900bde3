"""The command `plan`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec import Struct, field

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
    from moesim.simulator.planner.sized import ScalingCurve, SizedPlan, Sizing
    from moesim.simulator.planner.space import PlanSpace
    from moesim.simulator.scenario import Scenario
    from moesim.simulator.trainers.jobs import JobTemplate


# -- plan exports ------------------------------------------------------------------------------------
# What `moesim plan` prints and writes for a trainer: the arguments of the best plan, and a job file.

KUBERNETES = "k8s"
"""Short name of Kubernetes."""


class Wanted(Struct, frozen=True):
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


class Exports(Struct):
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
    accelerators: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Size the job on each of these, such as h100,h200,gb200, with its usual node and network; "
            "--vary cluster.nodes=64..1024:x2 (or cluster.gpus) says which sizes.",
        ),
    ] = None,
    payment: Annotated[
        str | None,
        typer.Option(help="With sizes: as stated, on-demand, reserved, spot, capacity-block or purchase."),
    ] = None,
    effort: Annotated[
        str | None,
        typer.Option(
            "--search", help="With sizes: narrow (the default), whole, or own, which keeps the plan."
        ),
    ] = None,
    curve: Annotated[
        str | None,
        typer.Option(help="With sizes: simulate the scaling curve, strong or weak, and name its bends."),
    ] = None,
    objective: Annotated[
        str | None,
        typer.Option(
            help="time, cost, energy, deadline or memory; with sizes cost (most tokens a dollar), gpus, time."
        ),
    ] = None,
    top: Annotated[
        int | None,
        typer.Option(help="Families of plans that the engine simulates and ranks: 10, up to 1000."),
    ] = None,
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
    values = with_headroom(varied(load_space(space), vary or []), headroom)
    sized = Sized.asked(values, accelerators)
    choices = {"payment": payment, "search": effort, "curve": curve}
    if sized is None and (unused := [key for key, value in choices.items() if value is not None]):
        raise InputError(
            f"--{unused[0]} belongs to sizes: add --accelerators or --vary cluster.nodes=64..1024:x2"
        )
    usual = 1 if scheduler else min(os.cpu_count() or 1, 4)
    processes = usual if workers is None else workers
    told = -1

    def progress(share: float, text: str) -> None:
        nonlocal told
        if int(10 * share) > told:  # a line for every tenth of the work
            told = int(10 * share)
            say(f"{share:.0%}: {text}")

    with working(f"planning {scenario}") as say:
        loaded = load_scenario(scenario, overrides or [])
        if sized is not None:
            limits = {"objective": objective, "deadline_days": deadline_days, "budget_usd": budget_usd}
            limits["scheduler"] = scheduler
            refused = {"--top": top, "--trainer": wanted.trainer, "--job": job}
            sizing = sized.searched(loaded, {**choices, **limits}, refused, processes, progress)
    if sized is not None:
        sized.show(sizing, output, as_json)
        return
    with working(f"planning {scenario}") as say:
        wanted.check(loaded)
        limit = trainer or (wanted.trainer if loaded.fleet is None else None)
        result = search(
            loaded,
            space=values,
            objective=objective or "time",
            top=10 if top is None else top,
            deadline_days=deadline_days,
            budget_usd=budget_usd,
            progress=progress,
            workers=processes,
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
    from moesim.simulator.planner.result import difference, place_text, tied_text

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


# -- sizes -------------------------------------------------------------------------------------------
# What `moesim plan` prints where the number of nodes or GPUs, or the accelerator, is searched too.


class Sized(Struct, frozen=True):
    """The sizes and accelerators of a sizing, and the rest of the space."""

    space: PlanSpace
    sizes: dict[str, tuple[int, ...]]
    accelerators: tuple[str, ...]

    @staticmethod
    def asked(space: PlanSpace, accelerators: str | None) -> Sized | None:
        """The sizing that the options ask for; None for a search at one size.

        A space that varies other scenario keys beside the size is searched as a whole, unless accelerators
        are named. Raises InputError for an empty name.
        """
        from moesim.simulator.planner.sized import SIZE_KEYS

        names = () if accelerators is None else tuple(name.strip() for name in accelerators.split(","))
        if accelerators is not None and not all(names):
            raise InputError(f"--accelerators {accelerators!r} has an empty name; write h100,h200")
        sizes = {key: space.variants[key] for key in SIZE_KEYS if key in space.variants}
        others = {key: values for key, values in space.variants.items() if key not in sizes}
        if not names and (not sizes or others):
            return None
        return Sized(space.model_copy(update={"variants": others}), sizes, names)

    def searched(
        self,
        scenario: Scenario,
        chosen: dict[str, Any],
        refused: dict[str, Any],
        workers: int,
        progress: Callable[[float, str], None],
    ) -> Sizing:
        """Run the sizing; raises InputError for options that it does not use."""
        from moesim.simulator.planner.sizing import size

        for option, value in refused.items():
            if value is not None:
                raise InputError(f"{option} is for one size: write the size that wins with -o, and plan that")
        given = {key: value for key, value in chosen.items() if value is not None}
        return size(
            scenario,
            nodes=self.sizes.get("cluster.nodes"),
            gpus=self.sizes.get("cluster.gpus"),
            accelerators=self.accelerators,
            space=self.space,
            workers=workers,
            progress=progress,
            **given,
        )

    @staticmethod
    def show(sizing: Sizing, output: Path | None, as_json: bool) -> None:
        """Print a sizing and write its best plan; raises InfeasibleError where no size keeps the limits."""
        from moesim.hwmodels.files import write_atomically
        from moesim.simulator.scenario import load_scenario

        if output is not None and sizing.objective in sizing.winners:
            write_atomically(output, [scenario_yaml(load_scenario(sizing.best))])
            say_written(str(output), "simulate it, or plan it with --search whole")
        if as_json:
            print_json(sizing.to_dict())
        else:
            _print_sizing(sizing)
        _ = sizing.best  # raises, with the nearest sizes, where there is none


def _print_sizing(sizing: Sizing) -> None:
    from moesim.hwmodels.units import format_quantity
    from moesim.simulator.planner.sized import WINS, limits_text

    print_text("\n".join([sizing.inputs.name, *sizing.inputs.lines(plan=False)]))
    limits = limits_text(sizing.deadline_days, sizing.budget_usd)
    names = list(dict.fromkeys(point.accelerator for point in sizing.points))
    print_text(
        f"{len(sizing.points)} legal sizes, {len(sizing.illegal)} illegal; {limits}; {sizing.search} search"
    )
    kinds = [next(point for point in reversed(sizing.points) if point.accelerator == name) for name in names]
    rows = [
        (
            row.accelerator,
            row.node,
            "" if row.nic_bytes_per_s is None else format_quantity(row.nic_bytes_per_s, "bytes_per_s"),
            row.network,
            row.profile,
            "none" if row.price is None else f"{row.price.value:.2f}, {row.price.kind} {row.price.date}",
            "" if row.board_w is None else f"{row.board_w:,.0f}",
        )
        for row in kinds
    ]
    print_table(("", "node", "NIC", "network", "profile", "$/GPU-h", "board W"), rows, right=(6,))
    if sizing.winners:
        print_text("\nwithin the limits")
        _print_sized([(WINS[key], row) for key, row in sizing.winners.items()])
    if sizing.winners and len(names) > 1:
        print_text(f"\neach accelerator's {WINS[sizing.objective]}")
        _print_sized([("", row) for row in sizing.by_accelerator])
    if sizing.nearest:
        print_text("\nno size keeps the limits; nearest")
        _print_sized([("", row) for row in sizing.nearest])
    for side in sizing.sides:
        print_text(f"\nboth sides of the {side.limit}: {side.accelerator}; {side.between}")
        _print_sized([(n, row) for n, row in (("misses", side.misses), ("keeps", side.keeps)) if row])
    if len(sizing.frontier) > 1:
        print_text("\ncost against days: no other size is both cheaper and faster")
        _print_sized([("", row) for row in sizing.frontier], plans=False)
    print_text("\nall sizes")
    _print_sized([("", row) for row in sizing.points], plans=False)
    if sizing.illegal:
        print_text("\nillegal sizes")
        print_table(("GPUs", "of", "reason"), [(r.size, r.accelerator, r.brief) for r in sizing.illegal])
    for drawn in sizing.curves:
        _print_curve(drawn)
    if sizing.defaults:
        print_text("stops by rule: " + ", ".join(f"{one.key}={one.value}" for one in sizing.defaults))
    for note in sizing.notes:
        print_text(f"note: {note}")


def _print_sized(rows: Sequence[tuple[str, SizedPlan]], plans: bool = True) -> None:
    from moesim.simulator.planner.sized import SIZED_HEADS, sized_cells

    names: dict[tuple[str, int], list[str]] = {}
    for name, row in rows:
        names.setdefault((row.accelerator, row.n_gpus), []).append(name)
    shown = {(row.accelerator, row.n_gpus): row for _, row in rows}
    kept = [n for n, head in enumerate(SIZED_HEADS) if plans or head != "plan"]
    cells = [(", ".join(names[key]), *(sized_cells(row)[n] for n in kept)) for key, row in shown.items()]
    heads = ("", *(SIZED_HEADS[n] for n in kept))
    right = [n for n, head in enumerate(heads) if head not in ("", "of", "plan")]
    print_table(heads, cells, right=right)


def _print_curve(curve: ScalingCurve) -> None:
    from moesim.simulator.planner.sized import bend_text

    kept = "the whole batch" if curve.kind == "strong" else "the batch of a GPU"
    print_text(f"\n{curve.kind} scaling of {curve.accelerator}, {kept} kept, simulated")
    rows = [
        (
            f"{point.n_gpus:,}",
            f"{point.step_time_s:.4g}",
            f"{100 * (point.mfu_causal or 0.0):.1f} %",
            f"{100 * curve.exposed(point):.1f} %",
            f"{point.tokens_per_s_per_gpu:,.0f}",
            point.plan,
        )
        for point in curve.points
    ]
    heads = ("GPUs", "step s", "MFU", "exposed communication", "tokens/s/GPU", "plan")
    print_table(heads, rows, right=range(5))
    for bend in curve.bends:
        print_text(bend_text(bend))
    for row in curve.illegal:
        print_text(f"not on the curve: {row.size} {row.accelerator}: {row.brief}")
