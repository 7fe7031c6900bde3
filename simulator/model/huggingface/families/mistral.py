"""Mistral, Ministral and Mixtral."""

from __future__ import annotations

from typing import Any

from moesim.simulator.model.huggingface.core import core
from moesim.simulator.model.huggingface.experts import routed
from moesim.simulator.model.huggingface.families.llama import dense_ffn
from moesim.simulator.model.huggingface.grouped_query import gqa, with_windows
from moesim.simulator.model.huggingface.reader import Reader


def mistral(r: Reader) -> dict[str, Any]:
    """Mistral 7B to Large 2, Ministral and Devstral: no biases; some layers may have a window."""
    fields = core(r, tied=False)  # text parts of multimodal files leave the key out (MistralConfig)
    return fields | with_windows(r, gqa(r), fields["n_layers"]) | {"dense_ffn": dense_ffn(r)}


def mixtral(r: Reader) -> dict[str, Any]:
    """Mixtral 8x7B and 8x22B."""
    fields = core(r, tied=False)  # as Mistral's
    moe = routed(r, "softmax", width=("intermediate_size",))
    return fields | with_windows(r, gqa(r), fields["n_layers"]) | {"moe": moe}
