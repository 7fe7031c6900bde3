"""Imports Hugging Face `config.json` files from the keys that they state, never from class defaults."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.files import resolved
from moesim.hwmodels.validation import nearest, validate_model
from moesim.hwmodels.yaml_io import dump_mapping, load_mapping
from moesim.simulator.model.counts import parameters_total
from moesim.simulator.model.huggingface.reader import Reader, Understood
from moesim.simulator.model.huggingface.refusals import refuse_other_files, unknown_family
from moesim.simulator.model.huggingface.registry import ARCHITECTURES, FAMILIES, family_of
from moesim.simulator.model.huggingface.towers import tower_notes
from moesim.simulator.model.shape import ModelShape

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,79}")
"""Names that a configuration may give its model; anything else, such as a path, is no name."""

NESTED = ("text_config", "llm_config", "language_config")
"""Keys under which the files of multimodal models describe the language model."""


@dataclass(frozen=True, slots=True)
class ImportedModel:
    """A shape, with the keys of its file that were understood and those that were ignored.

    `shape.not_modelled` names the features that are left out.
    """

    shape: ModelShape
    understood: tuple[Understood, ...]
    ignored: tuple[str, ...]


def import_hf(path: str | Path, name: str | None = None, as_family: str | None = None) -> ImportedModel:
    """Read a Hugging Face config.json of a known family.

    `name`: the model's; None takes it from the file, or else writes the family and the parameters.
    `as_family`: the family whose keys the file has, whatever its `model_type` says; None takes the file's.
    Raises InputError naming file and key for an unknown family (with the nearest and the keys that decide),
    for a file that is no model's configuration, a missing or contradictory key, a value of the wrong type,
    and a feature that would change the shape in a way that is not modelled.
    """
    imported = shape_from_config(load_mapping(path, configuration=True), str(path), as_family)
    if name is None:
        return imported
    if not _NAME.fullmatch(name):
        raise InputError(
            f"name {name[:80]!r}: write 2 to 80 letters, digits, dots, dashes and underscores, beginning "
            "with a letter or digit"
        )
    return replace(imported, shape=imported.shape.model_copy(update={"name": name}))


def shape_from_config(data: dict[str, Any], place: str, as_family: str | None = None) -> ImportedModel:
    """Do as `import_hf` for a mapping that was already read from `place`."""
    refuse_other_files(data, place)
    reader = _language_part(data, place)
    family = _chosen(as_family) if as_family is not None else _family(reader, data)
    fields = FAMILIES[family](reader)
    left_out = list(fields.pop("not_modelled", ()))
    left_out += tower_notes(data)
    if reader.prefix:
        left_out.append(f"everything outside {reader.prefix[:-1]} (the file describes a multimodal model)")
    stated = _stated_name(data, place)
    fields["name"] = stated or family
    fields["source"] = {
        "kind": "published",
        "reference": f"Hugging Face config {Path(place).name} ({family})",
    }
    shape = validate_model(ModelShape, fields | {"not_modelled": left_out}, place)
    if stated is None:
        size = parameters_total(shape)
        counted = f"{size / 1e12:.3g}t" if size >= 1e12 else f"{size / 1e9:.3g}b"
        shape = shape.model_copy(update={"name": f"{family}-{counted}"})
    read = {understood.key for understood in reader.understood}
    outside = [key for key in data if reader.prefix and f"{key}." != reader.prefix and key not in read]
    return ImportedModel(shape, tuple(reader.understood), (*outside, *reader.unread()))


def to_yaml(shape: ModelShape, width: int = 100) -> str:
    """Write a model file from which `load_model` reads an equal shape; absent parts are left out.

    `width`: characters after which lines break at words.
    """
    return dump_mapping(shape.model_dump(mode="json", exclude_none=True), width)


def _language_part(data: dict[str, Any], place: str) -> Reader:
    """Reader of the language model: the file itself, or a part of a multimodal model's file."""
    for key in NESTED:
        if isinstance(inner := data.get(key), dict) and "hidden_size" not in data:
            return Reader(inner, place, f"{key}.", outer=data)
    return Reader(data, place, "")


def _chosen(name: str) -> str:
    family = family_of(name)
    if family is None:
        known = list(FAMILIES)
        raise InputError(
            f"--as {name[:80]!r} is not a family{nearest(name, known)}; known families: "
            f"{', '.join(sorted(known))}"
        )
    return family


def _family(reader: Reader, data: Mapping[str, Any]) -> str:
    """The family that a file names: by its architecture, else by its model type, else by its wrapper's.

    The architecture names the modelling code, which renamed models keep, so it decides where both are known.
    """
    for config in (reader.config, data):
        stated = config.get("model_type")
        if "model_type" in config and not isinstance(stated, str):
            raise reader.error(f"model_type={str(stated)[:80]!r} must be a text (family)")
        by_code, by_type = ARCHITECTURES.get(_architecture(config) or ""), family_of(stated)
        same = by_code and by_type and FAMILIES[by_code] is FAMILIES[by_type]
        family = by_type if same else by_code or by_type
        if family is not None:
            _note_family(reader, config, family)
            return family
    raise unknown_family(
        reader, reader.config.get("model_type", data.get("model_type")) or _architecture(data)
    )


def _note_family(reader: Reader, config: Mapping[str, Any], family: str) -> None:
    prefix = reader.prefix if config is reader.config else ""
    for key in ("architectures", "model_type"):
        if key in config:
            reader.understood.append(Understood(f"{prefix}{key}", config[key], f"family: {family}"))
            if config is reader.config:
                reader.seen.add(key)


def _architecture(data: Mapping[str, Any]) -> str | None:
    stated = data.get("architectures")
    first = stated[0] if isinstance(stated, list) and stated else None
    return first if isinstance(first, str) else None


def _stated_name(data: Mapping[str, Any], place: str) -> str | None:
    """The name of a model: its file's, that in the file, or that of Hugging Face's download folder.

    None where only the name of some folder is known, which need not be the model's.
    """
    path = Path(place)
    if path.stem != "config":
        return path.stem
    written = data.get("_name_or_path")
    last = written.rstrip("/").rpartition("/")[2] if isinstance(written, str) else ""
    if _NAME.fullmatch(last):
        return last
    cached = next((part for part in resolved(path).parts if part.startswith("models--")), "")
    return cached.rpartition("--")[2] or None
