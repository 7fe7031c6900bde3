"""Finds the size of the vocabulary, which many launch files state by naming a tokenizer only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.validation import validate_model
from moesim.simulator.model.library import load_model, shipped_models
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.scenario import Scenario
from moesim.simulator.trainers.meaning.given import Given
from moesim.simulator.trainers.meaning.known_models import same_sizes

VOCABULARY = (
    "vocab-size", "padded-vocab-size", "make-vocab-size-divisible-by", "no-pad-vocab-size",
    "disable-pad-vocab-size",
)  # fmt: skip


def read_vocabulary(
    given: Given, model: Mapping[str, Any], base: Scenario, tp: int, stated: int | None
) -> int:
    """Rows of the embedding: padded as stated, else the vocabulary rounded up as Megatron-LM does.

    `model` is the rest of the model; `stated` is a vocabulary that the user gives. The base's vocabulary
    counts where the file has none and the rest is the base's model. Raises InputError with the remedy where
    the size is unknown.
    """
    for name in VOCABULARY:
        if given.has(name):
            given.explain(name, "key", "part of the model (vocab)")
    if given.has("padded-vocab-size"):
        return given.integer("padded-vocab-size", 0)
    if stated is not None:
        given.explain("vocab-size", "key", f"vocab {stated} by --vocab-size of this command")
        return _padded(given, stated, tp)
    if given.has("vocab-size"):
        return _padded(given, given.integer("vocab-size", 0), tp)
    if _is(model, base.shape):
        text = (
            f"vocab = {base.shape.vocab}: the file names only a tokenizer, and the rest is the base's model"
        )
        given.explain("vocab-size", "base", text)
        return base.shape.vocab
    alike = [name for name in shipped_models() if _is(model, load_model(name))]
    hint = f" (the rest is {alike[0]}: --vocab-size {load_model(alike[0]).vocab})" if alike else ""
    raise InputError(
        "the size of the vocabulary is unknown: the file has neither --vocab-size nor --padded-vocab-size, "
        f"and tokenizers are not read; give --vocab-size N{hint}, or a --base with this model"
    )


def _padded(given: Given, size: int, tp: int) -> int:
    if given.flag("no-pad-vocab-size") or given.flag("disable-pad-vocab-size"):
        return size
    multiple = given.integer("make-vocab-size-divisible-by", 128) * tp
    return -(-size // multiple) * multiple


def _is(model: Mapping[str, Any], other: ModelShape) -> bool:
    """Whether the model has the sizes of another one, whose vocabulary it may then have."""
    shape = validate_model(ModelShape, {**model, "vocab": other.vocab}, "the model of the launch file")
    return same_sizes(shape, other, but=("mtp_layers",))
