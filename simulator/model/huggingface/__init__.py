"""Imports the configurations of Hugging Face models, family by family."""

from __future__ import annotations

from moesim.simulator.model.huggingface.importer import (
    FAMILIES,
    ImportedModel,
    import_hf,
    shape_from_config,
    to_yaml,
    what_else,
)

__all__ = ["FAMILIES", "ImportedModel", "import_hf", "shape_from_config", "to_yaml", "what_else"]
