"""What a job file needs and no plan says: the site's partition, image, volumes and paths."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from moesim.hwmodels.frozen import Section
from moesim.hwmodels.validation import validate_model
from moesim.hwmodels.yaml_io import load_mapping

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
