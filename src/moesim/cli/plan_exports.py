"""What `moesim plan` prints and writes for a trainer: the arguments of the best plan, and a job file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesim.hwmodels.errors import InputError

if TYPE_CHECKING:
    from moesim.simulator.planner.result import PlanRow
    from moesim.simulator.trainers.jobs import JobTemplate

KUBERNETES = "k8s"
"""Short name of Kubernetes."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The trainer to write for, and which of its texts the user asked for."""

    trainer: str | None
    arguments: bool
    job: str | None
    template: JobTemplate | None
    job_file: Path | None

    @staticmethod
    def checked(
        trainer: str | None,
        arguments: str | None,
        job: str | None,
        template: Path | None,
        job_file: Path | None,
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
        if job_file is not None:
            check_writable(job_file, "job file")
        site = None if template is None else load_template(template)
        return Wanted(chosen, arguments is not None, kind, site, job_file)

    def plain(self, best: PlanRow) -> dict[str, Any]:
        """The arguments and the job file of the best plan as plain data, for JSON."""
        from moesim.simulator.trainers.registry import trainer_of

        texts: dict[str, Any] = {}
        if self.trainer is not None and self.arguments:
            texts["arguments"] = trainer_of(self.trainer).arguments(best.scenario).to_dict()
        if self.job is not None and self.job_file is None:
            texts["job"] = self._job_text(best)
        return texts

    def show(self, best: PlanRow) -> None:
        """Print the arguments of the best plan, and the job file if it goes to no file."""
        from moesim.cli.console import print_raw
        from moesim.simulator.trainers.registry import trainer_of

        if self.trainer is not None and self.arguments:
            print_raw("\n" + trainer_of(self.trainer).arguments(best.scenario).text())
        if self.job is not None and self.job_file is None:
            print_raw("\n" + self._job_text(best))

    def write(self, best: PlanRow) -> None:
        """Write the job file that starts the best plan."""
        from moesim.cli.console import say_written
        from moesim.hwmodels.files import write_atomically

        if self.job is not None and self.job_file is not None:
            write_atomically(self.job_file, [self._job_text(best)])
            say_written(str(self.job_file), "set the variables that it asks for, and submit it")

    def _job_text(self, best: PlanRow) -> str:
        from moesim.hwmodels.units import SECONDS_PER_DAY
        from moesim.simulator.trainers.jobs import job_text
        from moesim.simulator.trainers.registry import trainer_of

        assert self.trainer is not None and self.job is not None, "checked together"
        export = trainer_of(self.trainer).arguments(best.scenario)
        run_s = best.days * SECONDS_PER_DAY
        return job_text(self.job, best.scenario, export.command(), export.environment, self.template, run_s)
