"""Job files that start a trainer on the cluster of a scenario."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from moesim.hwmodels.errors import InputError
from moesim.simulator.scenario import Scenario
from moesim.simulator.trainers.jobs.kubernetes import kubernetes_text
from moesim.simulator.trainers.jobs.slurm import slurm_text
from moesim.simulator.trainers.jobs.template import JobTemplate, load_template

__all__ = ["KINDS", "JobKind", "JobTemplate", "check_job", "job_text", "load_template"]

JobKind = Literal["slurm", "kubernetes"]
KINDS: tuple[JobKind, ...] = ("slurm", "kubernetes")
"""Schedulers that a job file can be written for."""


def check_job(kind: str, scenario: Scenario, template: JobTemplate | None = None) -> None:
    """Raise InputError where no job file can be written for the scenario's cluster, whatever its plan is."""
    job_text(kind, scenario, ("script.py",), {}, template)


def job_text(
    kind: str,
    scenario: Scenario,
    command: Sequence[str],
    environment: Mapping[str, str],
    template: JobTemplate | None = None,
    predicted_s: float | None = None,
) -> str:
    """The job file that runs `torchrun` with the words of `command` on the scenario's cluster.

    `command` starts with the trainer's script; ${DATA_PATH}, ${TOKENIZER_MODEL}, ${CHECKPOINT_DIR} and
    ${MEGATRON_PATH} in it are filled in when the job starts, everything else is taken literally.
    `predicted_s` is the predicted time of the run in seconds, for Slurm's time limit. Raises InputError for
    an unknown kind, a fleet, accelerators without torchrun, and texts that could add lines to the file.
    """
    if kind == "slurm":
        return slurm_text(scenario, command, environment, template, predicted_s)
    if kind == "kubernetes":
        return kubernetes_text(scenario, command, environment, template)
    raise InputError(f"job file {kind!r} is not one of {', '.join(KINDS)}")
