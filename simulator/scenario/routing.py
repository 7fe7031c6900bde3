"""The `routing` section of a scenario: popularity of the experts, capacity, replicas."""

from __future__ import annotations

from math import exp
from typing import Annotated, Literal

from pydantic import Field, PositiveInt, model_validator

from moesim.hwmodels import ranges
from moesim.hwmodels.frozen import Section
from moesim.hwmodels.provenance import SourcedCount, SourcedFraction

Policy = Literal["hierarchical", "global"]


class UniformLoad(Section):
    """All experts equally popular."""

    kind: Literal["uniform"]
    """All experts equal; as without `routing.load`, but drawn expert by expert."""


class ZipfLoad(Section):
    """The r-th most popular expert has a share proportional to 1 / r^exponent."""

    kind: Literal["zipf"]
    exponent: Annotated[SourcedFraction, ranges.EXPONENT]
    """Exponent of the popularity."""
    shuffle_per_layer: bool = True
    """Every layer has its own order; false: expert 0 is the most popular one in all of them."""


class HistogramLoad(Section):
    """Recorded counts, a row a layer (or one row for all), or that for each of several steps."""

    kind: Literal["histogram"]
    file: str
    """Recorded counts: .csv, .npy or .json."""
    step: int = Field(0, ge=0)
    """Which recorded step is predicted."""


class BiasLoad(Section):
    """Auxiliary-loss-free balancing simulated up to a training step."""

    kind: Literal["bias"]
    affinity_spread: Annotated[SourcedFraction, ranges.LOAD_SPREAD]
    """Standard deviation of the experts' mean affinity, in that of one token's affinity to one expert."""
    drift_steps: SourcedCount
    """Steps over which those means are forgotten."""
    step: PositiveInt
    """Training step that is predicted, counted from unbiased routing at 0."""
    gamma: Annotated[SourcedFraction, ranges.SHARE] = SourcedFraction(
        value=0.001,
        kind="published",
        source="DeepSeek-V3 technical report, arXiv 2412.19437, section 4.2: bias update speed for the first "
        "14.3T tokens (0.0 for the last 500B)",
        date="2024-12",
    )
    """Update speed of the bias."""


class MaxVioLoad(Section):
    """Popularity whose busiest expert has a published excess (MaxVio), which may fall while training."""

    kind: Literal["maxvio"]
    max_vio: Annotated[SourcedFraction, ranges.MAX_VIO]
    """Rows of a layer's busiest expert over the mean, less 1 (arXiv 2408.15664, eq. 4), once training has
    settled."""
    start: Annotated[SourcedFraction, ranges.MAX_VIO] | None = None
    """The same at step 0; absent: it does not change."""
    settling_steps: SourcedCount | None = None
    """Steps after which the difference between `start` and `max_vio` has fallen to 1/e."""
    step: int = Field(0, ge=0, le=1_000_000_000)
    """Training step that is predicted."""

    @model_validator(mode="after")
    def _both_or_none(self) -> MaxVioLoad:
        if (self.start is None) != (self.settling_steps is None):
            raise ValueError("start and settling_steps belong together: give both, or neither")
        if self.step and self.start is None:
            raise ValueError(f"step={self.step} makes no difference without start and settling_steps")
        return self

    @property
    def now(self) -> float:
        """MaxVio at the step that is predicted (docs/model.md, eq. R10)."""
        if self.start is None or self.settling_steps is None:
            return self.max_vio.value
        left = exp(-self.step / self.settling_steps.value)
        return self.max_vio.value + (self.start.value - self.max_vio.value) * left


Load = Annotated[UniformLoad | ZipfLoad | HistogramLoad | BiasLoad | MaxVioLoad, Field(discriminator="kind")]


class Capacity(Section):
    """Rows above `factor` times the mean of an expert (or of a rank's experts together) are dropped."""

    factor: Annotated[SourcedFraction, ranges.CAPACITY]
    """Rows above this multiple of the mean are dropped; the share dropped is a warning of the result."""
    per: Literal["expert", "rank"] = "expert"
    """Whether the rows of an expert or those of a rank are counted."""


class Eplb(Section):
    """Expert-parallel load balancing: how many replicas, and how they are placed."""

    redundant_experts: int = Field(ge=0)
    """Replicas beyond one an expert, over one expert-parallel group; a multiple of `parallel.ep`."""
    policy: Policy = "hierarchical"
    """Groups of experts stay on one node, or all experts go anywhere."""
    groups: PositiveInt | None = None
    """Groups of experts that stay on one node (hierarchical); absent: those of the model's gate."""
