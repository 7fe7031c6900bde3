"""Hosts, GPUs and variables of a job, as they follow from a scenario's cluster."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moesim.hwmodels.cluster import Cluster
from moesim.hwmodels.errors import InputError
from moesim.simulator.layout.parallel import nearest_divisors
from moesim.simulator.scenario import Scenario
from moesim.simulator.trainers.jobs.template import JobTemplate
from moesim.simulator.trainers.variables import VARIABLES

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


@dataclass(frozen=True, slots=True)
class JobHosts:
    """Hosts of a job, GPUs (ranks) of each, and hosts of one scale-up domain."""

    hosts: int
    gpus: int
    hosts_per_domain: int
    resource: str


@dataclass(frozen=True, slots=True)
class Variable:
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


def split_references(text: str) -> list[tuple[bool, str]]:
    """Pieces of a text: (True, NAME) for a ${NAME} of a path, (False, literal text) for all else."""
    pieces = _REFERENCE.split(text)
    return [(number % 2 == 1, piece) for number, piece in enumerate(pieces) if piece]


def job_name(scenario: Scenario, template: JobTemplate) -> str:
    """Name of the job in lower case letters, digits and hyphens, which both schedulers allow."""
    if template.name is not None:
        return template.name
    name = re.sub(r"[^a-z0-9]+", "-", scenario.name.lower()).strip("-")[:50].strip("-")
    return name if name and name[0].isalpha() else f"moesim-{name}".strip("-")


def one_line(text: str) -> str:
    """The text without control characters, for a comment."""
    return "".join(char if char.isprintable() else " " for char in text)


def summary(scenario: Scenario, placement: JobHosts) -> tuple[str, ...]:
    """Sentences on the plan and on which ranks are neighbours, for the comments of a job file."""
    p = scenario.parallel
    inner = p.tp * p.cp
    where = "stays inside a host" if inner <= placement.gpus else "spans several hosts"
    degrees = f"tp={p.tp} cp={p.cp} ep={p.ep} pp={p.pp}"
    return (
        one_line(f"{scenario.name}: {degrees} on {placement.hosts} hosts of {placement.gpus} GPUs"),
        f"Rank r is GPU r % {placement.gpus} of host r // {placement.gpus}. Ranks vary fastest in tp, then",
        f"cp, then dp (with ep inside), and slowest in pp: a group of {inner} tp x cp ranks {where}.",
    )
