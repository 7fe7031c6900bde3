"""Base class of every part of a model's description."""

from __future__ import annotations

from pydantic import ConfigDict

from moesim.hwmodels.frozen import Frozen


class ModelPart(Frozen):
    """A frozen description with strict types: the text "8", for example, is not accepted as an integer."""

    model_config = ConfigDict(strict=True)
