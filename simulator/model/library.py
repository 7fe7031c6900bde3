"""Loads model shapes by shipped name, from a model file, or from a Hugging Face configuration."""

from __future__ import annotations

from functools import lru_cache
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.files import check_readable, is_there
from moesim.hwmodels.validation import nearest, validate_model
from moesim.hwmodels.yaml_io import EXTENSIONS, load_mapping, parse_mapping
from moesim.simulator.model.shape import ModelShape

if TYPE_CHECKING:
    from moesim.simulator.model.huggingface import ImportedModel


def shipped_models() -> tuple[str, ...]:
    """Names of the model files that come with the package, sorted."""
    names = (entry.name for entry in _folder().iterdir())
    return tuple(sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml")))


def load_model(name_or_path: str | Path) -> ModelShape:
    """Load the shape of a shipped name, of a model file or of a Hugging Face config.json.

    A file with the key `model_type` or `architectures` is read as a Hugging Face configuration, and one that
    lies beside such a configuration, such as a tokenizer's, is refused with what it is. Raises
    InputError for an unknown name (with the nearest), an unreadable file, and missing, unknown or
    inconsistent keys.
    """
    text = str(name_or_path)
    if text in shipped_models():
        return _shipped(text)
    path = Path(name_or_path)
    if path.name != text:  # a bare word may be a misspelt name, which is reported below
        check_readable(path)
    if path.suffix.lower() not in EXTENSIONS and not is_there(path):
        known = list(shipped_models())
        raise InputError(
            f"unknown model {text!r}{nearest(text, known)}; `moesim models` lists the {len(known)} shipped "
            "ones; or give the path of a model file or of a Hugging Face config.json"
        )
    return read_model(path).shape


def read_model(path: Path) -> ImportedModel:
    """Read a model file or a Hugging Face config.json, with the keys of the latter that were understood.

    Raises InputError as `load_model` does.
    """
    from moesim.simulator.model.huggingface import ImportedModel, shape_from_config, what_else

    data = load_mapping(path, configuration=True)
    if "model_type" in data or "architectures" in data or what_else(data) is not None:
        return shape_from_config(data, str(path))
    return ImportedModel(validate_model(ModelShape, data, str(path)), (), ())


@lru_cache(maxsize=128)
def _shipped(name: str) -> ModelShape:
    data = parse_mapping((_folder() / f"{name}.yaml").read_text(encoding="utf-8"), f"{name}.yaml")
    return validate_model(ModelShape, data, f"{name}.yaml")


def _folder() -> Traversable:
    return resources.files("moesim.simulator") / "data" / "models"
