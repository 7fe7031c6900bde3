"""Counts the towers of multimodal models, which are left out, by a plain vision transformer's formula."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moesim.simulator.model.huggingface.reader import MOST
from moesim.simulator.model.layer_pattern import MAX_LAYERS

_TOWERS = ("vision_config", "audio_config", "vision_tower_config", "thinker_config")
_WIDTH = ("hidden_size", "vt_hidden_size", "embed_dim")
_DEPTH = ("depth", "num_hidden_layers", "vt_num_hidden_layers")
_FFN = ("intermediate_size", "vt_intermediate_size")


def tower_notes(data: Mapping[str, Any]) -> list[str]:
    """Towers that are left out of a multimodal model's file, with their sizes where the file has them."""
    notes = []
    for key in _TOWERS:
        config = data.get(key)
        if isinstance(config, dict):
            size = tower_parameters(config)
            about = f"about {size / 1e9:.2g} billion parameters by a plain ViT's formula"
            about = about if size else "its size is not stated"
            notes.append(f"the tower of {key} ({about}) is left out")
    return notes


def tower_parameters(config: Mapping[str, Any]) -> int:
    """Approximate parameters of a vision transformer, or 0 where the keys are not there.

    Attention of four square projections, an FFN of two, and the embedding of patches, without projector.
    """
    width, depth, ffn = (_number(config, keys) for keys in (_WIDTH, _DEPTH, _FFN))
    if not (width and depth and depth <= MAX_LAYERS):
        return 0
    patch = _number(config, ("patch_size",)) or 0
    channels = _number(config, ("in_channels", "num_channels")) or 3
    layer = 4 * width * width + 2 * width * (ffn or 4 * width)
    return depth * layer + channels * patch * patch * width


def _number(config: Mapping[str, Any], keys: tuple[str, ...]) -> int:
    for key in keys:
        value = config.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MOST:
            return value
    return 0
