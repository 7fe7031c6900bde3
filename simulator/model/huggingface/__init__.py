"""Imports the configurations of Hugging Face models, family by family."""

from __future__ import annotations

from moesim.simulator.model.huggingface.importer import (
    ImportedModel,
    import_hf,
    shape_from_config,
    to_yaml,
    what_else,
)
from moesim.simulator.model.huggingface.reader import FAMILIES

__all__ = ["FAMILIES", "ImportedModel", "import_hf", "shape_from_config", "to_yaml", "what_else"]
