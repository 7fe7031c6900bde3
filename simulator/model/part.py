"""What every part of a model's description has in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class ModelPart(BaseModel):
    """A frozen description whose keys and types are checked strictly: a model file's integer is no text."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
