"""The `fleet` section of a scenario, which lists the clusters that share the pipeline of one job."""

from __future__ import annotations

from pydantic import Field, PositiveInt

from moesim.hwmodels.frozen import Section
from moesim.simulator.scenario.outline import AnyCluster


class Pool(Section):
    """A cluster, or some of its nodes; keys that are left out have the values of the scenario.

    A pool holds pipeline ranks in proportion to its GPUs, because every rank of a job has the same number.
    """

    cluster: AnyCluster = Field(description="As the scenario's cluster.")
    nodes: PositiveInt | None = None
    """Nodes of the cluster that the job has; absent: all."""
    profile: str | None = Field(
        None,
        description="Calibration profile. Absent: the scenario's, or where that is left out too the best "
        "shipped one of this pool's accelerator.",
    )
    communication_sms: int | None = Field(
        None, ge=0, description="SMs of the communication kernels. Absent: communication.sms."
    )


class Fleet(Section):
    """Pools in the order of the pipeline: the first ranks are on the first pool."""

    pools: tuple[Pool, ...] = Field(min_length=2)
    """Two or more pools."""
