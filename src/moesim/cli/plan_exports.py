"""What `moesim plan` prints and writes for a trainer: the arguments of the best plan, and a job file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesim.hwmodels.errors import InputError

if TYPE_CHECKING:
    from moesim.simulator.planner.result import PlanRow
    from moesim.simulator.scenario import Scenario
    from moesim.simulator.trainers.jobs import JobTemplate

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
        from moesim.simulator.trainers.jobs import check_job
        from moesim.simulator.trainers.registry import trainer_of

        if self.trainer is None:
            return
        if self.job is not None:
            check_job(self.job, scenario, self.template)
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
        from moesim.cli.console import say_written
        from moesim.hwmodels.files import write_atomically

        for path, text, hint in self.files:
            with self.guard():
                write_atomically(path, [text])
                say_written(str(path), hint)

    def show(self) -> None:
        """Print the texts that go to no file."""
        from moesim.cli.console import print_raw

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
