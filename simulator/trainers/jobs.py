"""Job files for Slurm and Kubernetes that start a trainer on the cluster of a scenario."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Struct
from pydantic import Field, StringConstraints

from moesim.hwmodels.cluster import Cluster
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.frozen import Section
from moesim.hwmodels.validation import validate_model
from moesim.hwmodels.yaml_io import dump_mapping, load_mapping
from moesim.simulator.layout.parallel import nearest_divisors
from moesim.simulator.scenario import Scenario
from moesim.simulator.trainers.export import VARIABLES

# -- template ----------------------------------------------------------------------------------------
# What a job file needs and no plan says: the site's partition, image, volumes and paths.

PathName = Literal["DATA_PATH", "TOKENIZER_MODEL", "CHECKPOINT_DIR", "MEGATRON_PATH"]

Word = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,200}$")]
Image = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9/][A-Za-z0-9._/:@#+-]{0,400}$")]
AbsolutePath = Annotated[str, StringConstraints(pattern=r"^/[^\x00-\x1f\x7f]{0,1000}$")]
Mount = Annotated[str, StringConstraints(pattern=r"^/[A-Za-z0-9._/-]+:/[A-Za-z0-9._/-]+(:r[ow])?$")]
Duration = Annotated[str, StringConstraints(pattern=r"^(\d{1,3}-)?\d{1,3}(:\d{2}){0,2}$")]
Resource = Annotated[str, StringConstraints(pattern=r"^[a-z0-9.-]{1,200}/[A-Za-z0-9._-]{1,60}$")]
Interfaces = Annotated[str, StringConstraints(pattern=r"^[=^]*[A-Za-z0-9_.:,=^-]{1,300}$")]


class JobTemplate(Section):
    """The site's part of a job file; a key that is absent becomes a variable, or is left to the site.

    A template for Kubernetes must have `image`. Texts are checked, so that none can add a line or a command.
    """

    name: Word | None = None
    """Name of the job; absent: made from the scenario's."""
    partition: Word | None = None
    """Slurm partition; absent: the site's default."""
    account: Word | None = None
    """Slurm account that pays; absent: the user's default."""
    qos: Word | None = None
    """Slurm quality of service; absent: the default."""
    reservation: Word | None = None
    """Slurm reservation; absent: none."""
    time_limit: Duration | None = None
    """Slurm time limit, such as `3-00:00:00`; absent: from the predicted run."""
    image: Image | None = None
    """Container image with the trainer; needed on Kubernetes, and optional on Slurm (Pyxis)."""
    mounts: tuple[Mount, ...] = ()
    """Slurm: folders that the container sees, as `/host/folder:/folder`."""
    namespace: Word | None = None
    """Kubernetes namespace; absent: that of the current context."""
    claims: dict[Word, AbsolutePath] = Field(default_factory=dict)
    """Kubernetes: volume claims by name, with the folders at which they are mounted."""
    shared_memory: Annotated[str, StringConstraints(pattern=r"^\d{1,6}[MG]i$")] = "64Gi"
    """Kubernetes: size of /dev/shm, which NCCL and data loaders use."""
    rdma_resource: Resource | None = None
    """Kubernetes: resource of the site's RDMA device plugin, such as `rdma/hca_shared_devices_a`."""
    rdma_count: int = Field(default=1, ge=1, le=64)
    """Kubernetes: devices of it for a node."""
    gpus_per_host: int | None = Field(default=None, ge=1, le=64)
    """GPUs of one operating system; needed where the cluster's nodes are scale-up domains such as NVL72."""
    cpus_per_gpu: int | None = Field(default=None, ge=1, le=512)
    """CPU cores for each GPU; absent: the whole node on Slurm, no request on Kubernetes."""
    socket_interface: Interfaces | None = None
    """NCCL_SOCKET_IFNAME, the network interface of the rendezvous; absent: NCCL chooses."""
    rdma_devices: Interfaces | None = None
    """NCCL_IB_HCA, the NICs for the traffic between GPUs; absent: NCCL chooses."""
    port: int = Field(default=29500, ge=1024, le=65535)
    """Port of the rendezvous on the first host."""
    paths: dict[PathName, AbsolutePath] = Field(default_factory=dict)
    """Values of DATA_PATH, TOKENIZER_MODEL, CHECKPOINT_DIR and MEGATRON_PATH; absent ones are asked for."""


def load_template(path: str | Path) -> JobTemplate:
    """The template in a YAML or JSON file; raises InputError with file, key and remedy if it is malformed."""
    return validate_model(JobTemplate, load_mapping(path), str(path))


# -- placement ---------------------------------------------------------------------------------------
# Hosts, GPUs and variables of a job, as they follow from a scenario's cluster.

MOST_GPUS_OF_A_HOST = 8
"""A described node with more GPUs is taken for a scale-up domain of several hosts."""

RESOURCES: Mapping[str, str] = {
    "NVIDIA": "nvidia.com/gpu",  # NVIDIA/k8s-device-plugin
    "AMD": "amd.com/gpu",  # ROCm/k8s-device-plugin
    "Intel": "habana.ai/gaudi",  # docs.habana.ai, Intel Gaudi device plugin for Kubernetes
}
"""Kubernetes resource of an accelerator, by vendor, for those that `torchrun` starts one process each on."""

# docs.nvidia.com, NCCL user guide, environment variables: NCCL_CROSS_NIC=0 keeps a ring on one rail.
RAILS: Mapping[str, str] = {
    "multi-plane-fat-tree": "planes meet only inside nodes, so a ring stays on one plane",
    "rail-optimised": "NICs of one rail share their leaves, so a ring stays on one rail",
}
"""Kinds of network on which NCCL_CROSS_NIC must be 0, with the reason."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,200}")
_REFERENCE = re.compile(r"\$\{(" + "|".join(VARIABLES) + r")\}")


class JobHosts(Struct, frozen=True):
    """Hosts of a job, GPUs (ranks) of each, and hosts of one scale-up domain."""

    hosts: int
    gpus: int
    hosts_per_domain: int
    resource: str


class Variable(Struct, frozen=True):
    """One environment variable, and why it is set."""

    name: str
    value: str
    reason: str


def placement_of(scenario: Scenario, template: JobTemplate) -> JobHosts:
    """Hosts and GPUs of the job.

    Raises InputError for a fleet, for accelerators that torchrun does not start processes on, and for nodes
    whose hosts are not known.
    """
    cluster = scenario.machine
    vendor, per_node = cluster.accelerator.vendor, cluster.node.n_gpus
    if vendor not in RESOURCES:
        raise InputError(
            f"cluster {cluster.name}: no job file for accelerators of {vendor}; torchrun starts one process "
            f"a GPU on those of {', '.join(RESOURCES)} only"
        )
    gpus = template.gpus_per_host
    if gpus is None:
        if per_node > MOST_GPUS_OF_A_HOST:
            raise InputError(
                f"cluster {cluster.name}: its node of {per_node} GPUs is a scale-up domain of several hosts; "
                "state gpus_per_host in the job template (4 for a tray of an NVL72)"
            )
        gpus = per_node
    if per_node % gpus:
        raise InputError(
            f"job template: gpus_per_host={gpus} does not divide the {per_node} GPUs of a node of "
            f"{cluster.name}; nearest: {', '.join(map(str, nearest_divisors(gpus, per_node)))}"
        )
    return JobHosts(cluster.n_gpus // gpus, gpus, per_node // gpus, RESOURCES[vendor])


def variables(
    cluster: Cluster, environment: Mapping[str, str], template: JobTemplate, hosts: int
) -> tuple[Variable, ...]:
    """Environment of the trainer: the caller's, then what follows from the cluster and the template.

    Raises InputError for an illegal name, and for a value with control characters.
    """
    given = [Variable(name, value, "asked for by the trainer") for name, value in environment.items()]
    if hosts > 1:
        kind = cluster.network.kind
        if kind in RAILS:
            given.append(Variable("NCCL_CROSS_NIC", "0", f"{cluster.network.name}: {RAILS[kind]}"))
        if template.rdma_devices is not None:
            given.append(Variable("NCCL_IB_HCA", template.rdma_devices, "from the job template"))
    if template.socket_interface is not None:
        given.append(Variable("NCCL_SOCKET_IFNAME", template.socket_interface, "from the job template"))
    for variable in given:
        if not _NAME.fullmatch(variable.name):
            raise InputError(f"environment variable {variable.name[:60]!r}: write letters, digits and _ only")
        check_text(variable.value, f"environment variable {variable.name}")
    by_name: dict[str, Variable] = {}
    for variable in given:
        by_name.setdefault(variable.name, variable)
    return tuple(by_name.values())


def check_words(command: Sequence[str]) -> None:
    """Raise InputError for a command that is empty, or has control characters."""
    if not command:
        raise InputError("the command of the job is empty: give the trainer's script and its arguments")
    for word in command:
        check_text(word, "the command of the job")


def check_text(text: str, what: str) -> None:
    """Raise InputError for control characters, which could start a line of their own in the job file."""
    bad = next((char for char in text if ord(char) < 32 or ord(char) == 127), None)
    if bad is not None:
        raise InputError(f"{what}: {text[:60]!r} has the control character {bad!r}; leave it out")


def references(texts: Sequence[str]) -> tuple[str, ...]:
    """Names of the path variables that texts refer to as ${NAME}, in the order of `VARIABLES`."""
    named = {name for text in texts for name in _REFERENCE.findall(text)}
    return tuple(name for name in VARIABLES if name in named)


def job_name(scenario: Scenario, template: JobTemplate) -> str:
    """Name of the job in lower case letters, digits and hyphens, which both schedulers allow."""
    if template.name is not None:
        return template.name
    name = re.sub(r"[^a-z0-9]+", "-", scenario.name.lower()).strip("-")[:50].strip("-")
    return name if name and name[0].isalpha() else f"moesim-{name}".strip("-")


def summary(scenario: Scenario, placement: JobHosts) -> tuple[str, ...]:
    """Sentences on the plan and on which ranks are neighbours, for the comments of a job file."""
    p = scenario.parallel
    inner = p.tp * p.cp
    where = "stays inside a host" if inner <= placement.gpus else "spans several hosts"
    degrees = f"tp={p.tp} cp={p.cp} ep={p.ep} pp={p.pp}"
    title = f"{scenario.name}: {degrees} on {placement.hosts} hosts of {placement.gpus} GPUs"
    return (
        "".join(char if char.isprintable() else " " for char in title),
        f"Rank r is GPU r % {placement.gpus} of host r // {placement.gpus}. Ranks vary fastest in tp, then",
        f"cp, then dp (with ep inside), and slowest in pp: a group of {inner} tp x cp ranks {where}.",
    )


# -- shell -------------------------------------------------------------------------------------------
# Quotes words for a shell so that nothing but the known path variables is expanded.

_PLAIN = re.compile(r"[A-Za-z0-9_@%+:,./-][A-Za-z0-9_@%+=:,./-]*", re.ASCII)


def quoted(word: str) -> str:
    """One shell word: ${DATA_PATH} and the other paths are expanded, all else is taken literally."""
    shown = []
    for number, piece in enumerate(_REFERENCE.split(word)):
        if number % 2:
            shown.append(f'"${{{piece}}}"')
        elif _PLAIN.fullmatch(piece) or not piece:
            shown.append(piece)
        else:  # a leading = needs quotes too, for shellcheck
            shown.append("'" + piece.replace("'", "'\"'\"'") + "'")
    return "".join(shown) or "''"


def path_lines(words: Sequence[str], template: JobTemplate) -> list[str]:
    """Lines that set the paths which the words name, or stop with a message where one is not set."""
    lines = []
    for name in references(words):
        if name in template.paths:
            lines.append(f"export {name}={shlex.quote(template.paths[name])}")
        else:
            lines.append(f': "${{{name}:?set {name} to {VARIABLES[name]}}}"')
    return lines


# -- kubernetes --------------------------------------------------------------------------------------
# Writes a job as a PyTorchJob for Kubernetes (Kubeflow training operator, kubeflow.org/v1).

IMAGE = "${IMAGE}"
"""Stands for the image where there is no template; no image can have this name, so that no pod starts."""

_PORT_NAME = "pytorchjob-port"  # the operator finds the rendezvous port by this name


def kubernetes_text(
    scenario: Scenario,
    command: Sequence[str],
    environment: Mapping[str, str],
    template: JobTemplate | None = None,
) -> str:
    """A PyTorchJob whose pods, one a host, start `torchrun` with the words of `command`.

    The operator gives torchrun the number of hosts, the host's number, the processes and the first host's
    address (PET_* variables). Raises InputError as `placement_of` and `variables` do, for an illegal command,
    and for a template without an image.
    """
    check_words(command)
    if template is not None and template.image is None:
        raise InputError("job template: image is missing; name the container image that has the trainer")
    site = template or JobTemplate()
    placement = placement_of(scenario, site)
    exports = variables(scenario.machine, environment, site, placement.hosts)
    words = [*command, *(variable.value for variable in exports)]
    lines = ["set -eu", *path_lines(words, site)]
    lines += [f"export {v.name}={quoted(v.value)}" for v in exports if references([v.value])]
    lines.append("exec torchrun " + " ".join(quoted(word) for word in command))
    # Kubernetes replaces $(NAME), which a doubled $ prevents.
    pod = _pod(site, placement, exports, "\n".join(lines).replace("$(", "$$(") + "\n")
    replicas: dict[str, Any] = {"Master": _replicas(1, pod)}
    if placement.hosts > 1:
        replicas["Worker"] = _replicas(placement.hosts - 1, pod)
    metadata: dict[str, Any] = {"name": job_name(scenario, site)}
    if site.namespace is not None:
        metadata["namespace"] = site.namespace
    job = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": metadata,
        "spec": {
            "nprocPerNode": str(placement.gpus),
            "runPolicy": {"cleanPodPolicy": "Running"},
            "pytorchReplicaSpecs": replicas,
        },
    }
    return "\n".join([*_comments(scenario, site, placement, exports, command, template), dump_mapping(job)])


def _comments(
    scenario: Scenario,
    site: JobTemplate,
    placement: JobHosts,
    exports: Sequence[Variable],
    command: Sequence[str],
    template: JobTemplate | None,
) -> list[str]:
    lines = [f"# {sentence}" for sentence in summary(scenario, placement)]
    lines += [f"# {variable.name}: {variable.reason}." for variable in exports]
    if template is None:
        lines.append("# The image is a placeholder: set IMAGE and fill it in with envsubst '$IMAGE'.")
    missing = [name for name in references([*command, *(v.value for v in exports)]) if name not in site.paths]
    if missing:
        lines.append(f"# The pods stop unless {', '.join(missing)} are set: a job template states paths.")
    if site.rdma_resource is None and placement.hosts > 1:
        lines.append("# No RDMA resource is asked for: name the site's as rdma_resource in a job template.")
    return lines


def _pod(site: JobTemplate, placement: JobHosts, exports: Sequence[Variable], script: str) -> dict[str, Any]:
    resources: dict[str, Any] = {placement.resource: placement.gpus}
    if site.rdma_resource is not None and placement.hosts > 1:
        resources[site.rdma_resource] = site.rdma_count
    if site.cpus_per_gpu is not None:
        resources["cpu"] = site.cpus_per_gpu * placement.gpus
    mounts = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
    volumes: list[dict[str, Any]] = [
        {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": site.shared_memory}}
    ]
    for number, (claim, folder) in enumerate(site.claims.items()):
        mounts.append({"name": f"claim-{number}", "mountPath": folder})
        volumes.append({"name": f"claim-{number}", "persistentVolumeClaim": {"claimName": claim}})
    container: dict[str, Any] = {
        "name": "pytorch",  # the operator adds its variables to the container of this name
        "image": site.image or IMAGE,
        "command": ["bash", "-c", script],
        "env": [
            {"name": v.name, "value": v.value.replace("$(", "$$(")}
            for v in exports
            if not references([v.value])
        ],
        "ports": [{"name": _PORT_NAME, "containerPort": site.port}],
        "resources": {"limits": resources},
        "volumeMounts": mounts,
    }
    if site.rdma_resource is not None:
        container["securityContext"] = {"capabilities": {"add": ["IPC_LOCK"]}}  # RDMA pins memory
    return {"spec": {"containers": [container], "volumes": volumes}}


def _replicas(count: int, pod: Mapping[str, Any]) -> dict[str, Any]:
    return {"replicas": count, "restartPolicy": "OnFailure", "template": deepcopy(pod)}


# -- slurm -------------------------------------------------------------------------------------------
# Writes a job as a batch script for Slurm.

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
    written: list[str] = []
    for word in command:  # the values of an argument stand on its line
        if written and not word.startswith("--") and written[-1].startswith("--"):
            written[-1] += f" {quoted(word)}"
        else:
            written.append(quoted(word))
    arguments = " \\\n".join(f"  {line}" for line in written)
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


# -- jobs --------------------------------------------------------------------------------------------
# Job files that start a trainer on the cluster of a scenario.

JobKind = Literal["slurm", "kubernetes"]
KINDS: tuple[JobKind, ...] = ("slurm", "kubernetes")
"""Schedulers that a job file can be written for."""


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
