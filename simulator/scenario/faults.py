"""The `faults` section of a scenario: slow GPUs, slow or dead links, lost nodes and jitter."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from moesim.hwmodels.frozen import Section
from moesim.hwmodels.ranges import PartLeft

Gpus = Annotated[int, Field(ge=0)] | tuple[Annotated[int, Field(ge=0)], ...]


class SlowGpu(Section):
    """GPUs whose compute runs at a fraction of its speed (thermal or power throttling)."""

    kind: Literal["slow-gpu"]
    gpu: Gpus
    """Number of a GPU, or a list."""
    speed: PartLeft
    """Share of its speed."""

    def __str__(self) -> str:
        """For tables."""
        return f"slow-gpu {listed(self.gpu)} at {self.speed:.3g} of its speed"


class Jitter(Section):
    """GPUs whose phases vary in length from run to run, beyond `variation.jitter_cv`."""

    kind: Literal["jitter"]
    gpu: Gpus | Literal["all"]
    """Number, list or `all`."""
    cv: Annotated[float, Field(gt=0.0, le=1.0)]
    """Coefficient of variation added to its phases."""

    def __str__(self) -> str:
        """For tables."""
        return f"jitter of {listed(self.gpu)}, cv {self.cv:.3g}"


class SlowLink(Section):
    """A link, NIC, switch or plane at a fraction of its bandwidth; `link` as in docs/scenario.md."""

    kind: Literal["slow-link"]
    link: str
    """Which link; see below."""
    bandwidth: PartLeft
    """Share of its bandwidth."""

    def __str__(self) -> str:
        """For tables."""
        return f"slow-link {self.link} at {self.bandwidth:.3g} of its bandwidth"


class Down(Section):
    """A link, NIC, switch or plane that carries nothing; traffic goes around it where there is a way."""

    kind: Literal["down"]
    link: str
    """Which link; see below."""

    def __str__(self) -> str:
        """For tables."""
        return f"{self.link} down"


class NodeLoss(Section):
    """A node that stopped: the pipelines through it stop, the others do the step without them."""

    kind: Literal["node-loss"]
    node: Annotated[int, Field(ge=0)]
    """Number of the node."""

    def __str__(self) -> str:
        """For tables."""
        return f"node {self.node} lost"


Fault = Annotated[SlowGpu | Jitter | SlowLink | Down | NodeLoss, Field(discriminator="kind")]


def listed(gpu: int | tuple[int, ...] | str) -> str:
    """Format GPU numbers as text."""
    if gpu == "all":
        return "all GPUs"
    numbers = (gpu,) if isinstance(gpu, int) else gpu
    return "GPU " + ", ".join(map(str, numbers))
