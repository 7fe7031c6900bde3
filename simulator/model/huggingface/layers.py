"""Turns one name a layer into the fields of a model file: patterns with counts, or lists of dense layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from moesim.simulator.model.block import DENSE, ROUTED
from moesim.simulator.model.huggingface.reader import Reader

_MOST_LISTED = 4
"""Most dense layers that are listed by index."""


def shortest_pattern(names: Sequence[str]) -> list[str]:
    """Shortest list that repeats to `names` a whole number of times, with counts such as `linear*3`."""
    layers = len(names)
    length = next(
        size
        for size in range(1, layers + 1)
        if layers % size == 0 and all(names[i] == names[i - size] for i in range(size, layers))
    )
    runs = [(name, len(list(run))) for name, run in groupby(names[:length])]
    return [name if times == 1 else f"{name}*{times}" for name, times in runs]


def attention_fields(names: Sequence[str], kinds: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Fields of the attention halves: one kind for all layers, or several by name with their pattern.

    `names`: one a layer, from `kinds` or `none`; kinds that no layer has are left out.
    """
    used = dict.fromkeys(names)
    if len(used) == 1 and names[0] in kinds:
        return {"attention": kinds[names[0]]}
    return {
        "attentions": {name: kinds[name] for name in used if name in kinds},
        "attention_layers": shortest_pattern(names),
    }


def ffn_fields(names: Sequence[str], moe: dict[str, Any] | None, dense_ffn: int | None) -> dict[str, Any]:
    """Fields of the feed-forward halves from `moe`, `dense` or `none` for every layer.

    A few dense layers are listed in `moe.dense_layers`, many are written as a pattern.
    """
    routed, dense = ROUTED in names, DENSE in names
    fields: dict[str, Any] = {"moe": moe if routed else None, "dense_ffn": dense_ffn if dense else None}
    indices = [index for index, name in enumerate(names) if name == DENSE]
    if set(names) <= {ROUTED, DENSE} and not (routed and len(indices) > _MOST_LISTED):
        if routed and moe is not None:
            fields["moe"] = moe | {"dense_layers": indices}
        return fields
    return fields | {"ffn_layers": shortest_pattern(names)}


def dense_first(r: Reader, layers: int) -> tuple[str, ...]:
    """Dense FFNs first and experts behind them, by the keys of DeepSeek's files.

    `mlp_layer_types` or a list in `moe_layer_freq` names every layer, and a number there means every n-th.
    """
    listed = r.has("mlp_layer_types") or isinstance(r.config.get("moe_layer_freq"), list)
    first = r.integer(
        "first_k_dense_replace", meaning="first layers that stay dense", least=0,
        **({"absent": None} if listed else {}),
    )  # fmt: skip
    if r.has("mlp_layer_types"):
        legal = {"dense": DENSE, "sparse": ROUTED}
        names = r.per_layer("mlp_layer_types", layers=layers, legal=legal, meaning="feed-forward half")
        r.seen.add("moe_layer_freq")
    elif listed:
        legal_flags = {0: DENSE, 1: ROUTED}
        names = r.per_layer("moe_layer_freq", layers=layers, legal=legal_flags, meaning="1 for experts")
    else:
        every = r.integer("moe_layer_freq", meaning="every n-th layer after them has experts", absent=1)
        return tuple(DENSE if i < first or i % every else ROUTED for i in range(layers))
    if first is not None and any(name == ROUTED for name in names[:first]):
        raise r.error(
            f"{r.prefix}first_k_dense_replace={first} and the list of the layers contradict each other: a "
            "layer before that one has experts; correct one of them"
        )
    return names
