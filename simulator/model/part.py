"""What every part of a model's description has in common."""

from __future__ import annotations

from pydantic import ConfigDict

from moesim.hwmodels.frozen import Frozen


class ModelPart(Frozen):
    """A frozen description whose types are checked strictly: a text is no integer, whatever it says."""

    model_config = ConfigDict(strict=True)
