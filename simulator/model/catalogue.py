"""The shipped models as rows of a table, with a search over them (pure)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.files import check_readable, is_there
from moesim.hwmodels.validation import nearest, validate_model
from moesim.hwmodels.yaml_io import EXTENSIONS, load_mapping, parse_mapping
from moesim.simulator.model.counts import parameters_activated, parameters_mtp, parameters_total
from moesim.simulator.model.shape import NONE, ModelShape, in_groups

if TYPE_CHECKING:
    from moesim.simulator.model.huggingface import ImportedModel


@cache
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


MOST_SEARCHED = 200
"""Most characters of a search."""

_SIZE = re.compile(r"(active)?([<>])([0-9]{1,6}(?:\.[0-9]{1,6})?)([mbt])", re.IGNORECASE)
_SCALES = {"m": 1e6, "b": 1e9, "t": 1e12}


class CatalogueRow(Struct, frozen=True):
    """One model in words and numbers, as tables show it."""

    name: str
    parameters_total: int
    """Main model with embedding and head, without MTP modules."""
    parameters_activated: int
    """Those that one token uses, with embedding and head."""
    parameters_mtp: int
    layers: int
    hidden: int
    attention: str
    """Kinds of attention with the number of their layers, such as "36 gated_delta, 12 gqa"."""
    feed_forward: str
    """Feed-forward halves with the number of their layers, such as "3 dense, 58 moe"."""
    experts: str
    """Experts that a token chooses and that there are, or "dense"."""
    context: int | None
    """Positions for which the model was published; None where that is not known."""
    not_modelled: tuple[str, ...]
    source: str


def row_of(shape: ModelShape) -> CatalogueRow:
    """The row of one shape."""
    context = None if shape.numerics is None else shape.numerics.context
    return CatalogueRow(
        name=shape.name,
        parameters_total=parameters_total(shape),
        parameters_activated=parameters_activated(shape, embedding=True),
        parameters_mtp=parameters_mtp(shape),
        layers=shape.n_layers,
        hidden=shape.hidden,
        attention=_counted_kinds(layer.attention.kind for layer in shape.layers if not layer.attention.empty),
        feed_forward=_counted_kinds(half for half, _ in layer_rows(shape) if half != NONE),
        experts=experts_text(shape),
        context=context,
        not_modelled=shape.not_modelled,
        source=shape.source.reference,
    )


@lru_cache(maxsize=1)
def catalogue() -> tuple[CatalogueRow, ...]:
    """The rows of all shipped models, sorted by name."""
    return tuple(row_of(load_model(name)) for name in shipped_models())


def context_text(context: int | None) -> str:
    """Positions of a model in words, such as 128 K; empty where they are not known."""
    if context is None:
        return ""
    return f"{context / 2**20:.4g} M" if context >= 2**20 else f"{context / 2**10:.4g} K"


def layer_rows(shape: ModelShape) -> tuple[tuple[str, str | None], ...]:
    """(feed-forward half, name of the attention) of every layer; the name is None in a model of one kind."""
    rows = (kind.partition("/") for kind in shape.layer_kinds)
    return tuple((half, name or None) for half, _, name in rows)


def experts_text(shape: ModelShape) -> str:
    """Experts of a routed layer in words, such as "8 of 256, 1 shared"."""
    moe = shape.moe
    if moe is None:
        return "dense"
    more = {
        f"{moe.shared_experts} shared": moe.shared_experts,
        f"{moe.zero_experts} without work": moe.zero_experts,
        f"latent {moe.latent}": moe.latent,
    }
    return ", ".join([f"{moe.top_k} of {moe.experts}", *(text for text, there in more.items() if there)])


def search(rows: Sequence[CatalogueRow], text: str) -> tuple[CatalogueRow, ...]:
    """Rows in which every word of `text` occurs, in the name, attention, experts or source, in any case.

    A word such as `<100B`, `>1T` or `active<10B` compares the total or the activated parameters instead.
    Raises InputError for a text of more than `MOST_SEARCHED` characters.
    """
    if len(text) > MOST_SEARCHED:
        raise InputError(f"a search of {len(text)} characters: write at most {MOST_SEARCHED}")
    words = text.lower().split()
    return tuple(row for row in rows if all(_matches(row, word) for word in words))


def pattern_text(shape: ModelShape) -> str:
    """The layers in forward order as runs, such as "3 dense/mla, 58 moe/mla"; repeats are named once."""
    rows = layer_rows(shape)
    return in_groups([f"{half}/{name or shape.attention_by_name[None].kind}" for half, name in rows])


def _matches(row: CatalogueRow, word: str) -> bool:
    size = _SIZE.fullmatch(word)
    if size is None:
        fields = (row.name, row.attention, row.feed_forward, row.experts, row.source)
        return any(word in field.lower() for field in fields)
    count = row.parameters_activated if size[1] else row.parameters_total
    limit = float(size[3]) * _SCALES[size[4]]
    return count < limit if size[2] == "<" else count > limit


def _counted_kinds(kinds: Iterable[str]) -> str:
    counts = Counter(kinds)
    return ", ".join(f"{count} {kind}" for kind, count in counts.items())
