"""Base classes of descriptions in files and of printed results."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    """Data that never changes once it is read; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Section(Frozen):
    """A section of a file; the docstring below each field describes its key."""

    model_config = ConfigDict(use_attribute_docstrings=True)
