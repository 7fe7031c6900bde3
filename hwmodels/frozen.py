"""Base classes of the descriptions that files hold and of the results that are printed."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    """Data that never changes once it is read; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Section(Frozen):
    """A section of a file whose keys are described by the text below each of them."""

    model_config = ConfigDict(use_attribute_docstrings=True)
