"""Writes a job as a batch script for Slurm."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from moesim.simulator.scenario import Scenario
from moesim.simulator.trainers.jobs.placement import (
    JobHosts,
    check_words,
    job_name,
    placement_of,
    summary,
    variables,
)
from moesim.simulator.trainers.jobs.shell import one_argument_a_line, path_lines, quoted
from moesim.simulator.trainers.jobs.template import JobTemplate

DAY_S, HOUR_S, MINUTE_S = 86_400, 3_600, 60

_START = """\
# The first host of the job is the address at which all hosts meet. torchrun numbers the hosts as Slurm does:
# a dynamic rendezvous (c10d) would sort them by name, and ranks would not be on the hosts of the plan.
MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
export MASTER_ADDR
export MASTER_PORT={port}
"""

_LAUNCH = """\
# One task a host; torchrun starts one process a GPU. The words after `torchrun` reach it unchanged.
# shellcheck disable=SC2016  # the variables in single quotes are for the shell on each host
srun --ntasks-per-node=1 --cpus-per-task={cpus} --kill-on-bad-exit=1 "${{container[@]}}" \\
  bash -c 'exec torchrun --nnodes="$SLURM_NNODES" --node-rank="$SLURM_NODEID" \\
    --nproc-per-node={gpus} --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" "$@"' torchrun \\
"""


def slurm_text(
    scenario: Scenario,
    command: Sequence[str],
    environment: Mapping[str, str],
    template: JobTemplate | None = None,
    predicted_s: float | None = None,
) -> str:
    """A batch script that starts `torchrun` with the words of `command` on every host of the cluster.

    `predicted_s` is the predicted time of the run in seconds, for the time limit. Raises InputError as
    `placement_of` and `variables` do, and for an illegal command.
    """
    site = template or JobTemplate()
    check_words(command)
    placement = placement_of(scenario, site)
    exports = variables(scenario.machine, environment, site, placement.hosts)
    words = [*command, *environment.values()]
    sections = [
        "#!/bin/bash",
        "\n".join(_options(scenario, site, placement, predicted_s)),
        "\n".join(f"# {sentence}" for sentence in summary(scenario, placement)),
        "set -euo pipefail",
        "\n".join(path_lines(words, site)),
        "\n".join(f"export {v.name}={quoted(v.value)}  # {v.reason}" for v in exports),
        _START.format(port=site.port) + _container_lines(site).rstrip("\n"),
    ]
    # srun takes no number of cores over from the job: without one a task would get a single core.
    cpus = '"$SLURM_CPUS_ON_NODE"' if site.cpus_per_gpu is None else str(site.cpus_per_gpu * placement.gpus)
    launch = _LAUNCH.format(gpus=placement.gpus, cpus=cpus)
    arguments = " \\\n".join(f"  {line}" for line in one_argument_a_line(command))
    return "\n\n".join(section for section in sections if section) + "\n\n" + launch + arguments + "\n"


def _options(
    scenario: Scenario, site: JobTemplate, placement: JobHosts, predicted_s: float | None
) -> list[str]:
    options = {
        "job-name": job_name(scenario, site),
        "nodes": str(placement.hosts),
        "ntasks-per-node": "1",
        "gpus-per-node": str(placement.gpus),
        "cpus-per-task": None if site.cpus_per_gpu is None else str(site.cpus_per_gpu * placement.gpus),
        "time": site.time_limit or (None if predicted_s is None else time_limit(predicted_s)),
        "partition": site.partition,
        "account": site.account,
        "qos": site.qos,
        "reservation": site.reservation,
        # Slurm's block topology: hosts of one scale-up domain stay together.
        "segment": str(placement.hosts_per_domain) if placement.hosts_per_domain > 1 else None,
    }
    lines = [f"#SBATCH --{name}={value}" for name, value in options.items() if value is not None]
    lines += ["#SBATCH --exclusive", "#SBATCH --mem=0"]
    if options["time"] is None:
        lines.append("# No time limit is set: neither a prediction nor a job template gives one.")
    elif site.time_limit is None:
        lines.append("# The time limit is the predicted run and a tenth; Slurm's own limit may be shorter.")
    return lines


def time_limit(predicted_s: float) -> str:
    """A Slurm time limit, days-hours:minutes:00, of a run's predicted seconds and a tenth more."""
    minutes = max(1, math.ceil((predicted_s + predicted_s / 10) / MINUTE_S))
    days, rest = divmod(minutes, DAY_S // MINUTE_S)
    hours, minutes = divmod(rest, HOUR_S // MINUTE_S)
    return f"{days}-{hours:02d}:{minutes:02d}:00"


def _container_lines(site: JobTemplate) -> str:
    """Lines that fill the array `container` with Pyxis's options, or leave it empty without an image."""
    mounts = f" --container-mounts={quoted(','.join(site.mounts))}" if site.mounts else ""
    if site.image is not None:
        return f"container=(--container-image={quoted(site.image)}{mounts})\n"
    return (
        "# CONTAINER is optional: an image for Slurm's container plugin (Pyxis).\n"
        "container=()\n"
        'if [ -n "${CONTAINER:-}" ]; then\n'
        f'  container=("--container-image=${{CONTAINER}}"{mounts})\n'
        "fi\n"
    )
