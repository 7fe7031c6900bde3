"""Writes a job as a PyTorchJob for Kubernetes (Kubeflow training operator, kubeflow.org/v1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.yaml_io import dump_mapping
from moesim.simulator.scenario import Scenario
from moesim.simulator.trainers.jobs.placement import (
    JobHosts,
    Variable,
    check_words,
    job_name,
    placement_of,
    references,
    summary,
    variables,
)
from moesim.simulator.trainers.jobs.shell import path_lines, quoted
from moesim.simulator.trainers.jobs.template import JobTemplate

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
    pod = _pod(site, placement, exports, _script(command, exports, site))
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


def _script(command: Sequence[str], exports: Sequence[Variable], site: JobTemplate) -> str:
    """The shell script of a pod; Kubernetes replaces $(NAME) in it, which a doubled $ prevents."""
    words = [*command, *(variable.value for variable in exports)]
    lines = ["set -eu", *path_lines(words, site)]
    lines += [f"export {v.name}={quoted(v.value)}" for v in exports if references([v.value])]
    lines.append("exec torchrun " + " ".join(quoted(word) for word in command))
    return "\n".join(lines).replace("$(", "$$(") + "\n"


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
        "env": [{"name": v.name, "value": _literal(v.value)} for v in exports if not references([v.value])],
        "ports": [{"name": _PORT_NAME, "containerPort": site.port}],
        "resources": {"limits": resources},
        "volumeMounts": mounts,
    }
    if site.rdma_resource is not None:
        container["securityContext"] = {"capabilities": {"add": ["IPC_LOCK"]}}  # RDMA pins memory
    return {"spec": {"containers": [container], "volumes": volumes}}


def _literal(value: str) -> str:
    return value.replace("$(", "$$(")


def _replicas(count: int, pod: Mapping[str, Any]) -> dict[str, Any]:
    return {"replicas": count, "restartPolicy": "OnFailure", "template": deepcopy(pod)}
