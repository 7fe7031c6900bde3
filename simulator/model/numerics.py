"""Numbers of a model that a trainer must know but that change neither time nor memory."""

from __future__ import annotations

from typing import Annotated

from pydantic import PositiveFloat, PositiveInt, StringConstraints

from moesim.simulator.model.part import ModelPart


class Numerics(ModelPart):
    """Numbers that a trainer needs beside the shape; none of them changes a prediction."""

    rope_theta: PositiveFloat | None = None
    """Base of the rotary position embedding."""
    norm_epsilon: PositiveFloat | None = None
    """Added to the mean square in RMSNorm."""
    router_scale: PositiveFloat | None = None
    """Factor on the weights of a token's routed experts."""
    context: PositiveInt | None = None
    """Positions, in tokens, for which the model was trained or extended; a scenario may be longer."""
    activation: Annotated[str, StringConstraints(pattern=r"^[a-z0-9_]{1,40}$")] | None = None
    """Nonlinearity of the feed-forward halves where it is not SiLU: gelu, relu2, situ and others."""
