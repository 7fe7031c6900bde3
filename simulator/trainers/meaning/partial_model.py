"""The base's model with the sizes that a file of another trainer changes."""

from __future__ import annotations

from typing import Any

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.validation import validate_model
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.trainers.meaning.given import Given

PATHS = {
    "num-layers": ("n_layers",),
    "hidden-size": ("hidden",),
    "ffn-hidden-size": ("dense_ffn",),
    "num-attention-heads": ("attention", "heads"),
    "num-query-groups": ("attention", "kv_heads"),
    "kv-channels": ("attention", "head_dim"),
    "num-experts": ("moe", "experts"),
    "moe-router-topk": ("moe", "top_k"),
    "moe-ffn-hidden-size": ("moe", "expert_ffn"),
    "mtp-num-layers": ("mtp_layers",),
    "vocab-size": ("vocab",),
    "padded-vocab-size": ("vocab",),
}
"""Where in a model file the value of an argument is."""


def changed_model(given: Given, base: ModelShape, name: str) -> ModelShape:
    """The base's shape with the stated sizes, and a row for each.

    Raises InputError for a size that the base's model does not have, and for sizes that do not fit together.
    """
    data: dict[str, Any] = base.model_dump(mode="json", exclude_none=True)
    for argument, path in PATHS.items():
        if not given.has(argument):
            continue
        section = data
        if given.integer(argument, 0, least=0) == 0 and path[0] not in data:
            given.explain(argument, "base", f"the base's model {base.name} has no {path[0]} either")
            continue
        for part in path[:-1]:
            if part not in section:
                raise InputError(f"{given.place(argument)}: the base's model {base.name} has no {part}")
            section = section[part]
        if path[-1] not in section:
            text = f"the base's model {base.name} has no {'.'.join(path)}"
            given.explain(argument, "irrelevant", text)
            continue
        section[path[-1]] = given.integer(argument, 0, least=0)
        given.explain(argument, "key", f"model.{'.'.join(path)} = {section[path[-1]]}")
    _shortened(data)
    data |= {
        "name": name,
        "source": {"kind": "derived", "reference": f"{base.name}, changed by {name}"},
    }
    return validate_model(ModelShape, data, "the model of the launch file")


def _shortened(data: dict[str, Any]) -> None:
    """Drop dense layers beyond the last layer of a model that has fewer layers now."""
    if "moe" in data:
        dense = data["moe"].get("dense_layers", ())
        data["moe"]["dense_layers"] = [layer for layer in dense if layer < data["n_layers"]]
