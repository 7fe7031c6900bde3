"""Models of several layer and expert kinds as data, for tests; sizes of published configurations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moesim.hwmodels.validation import validate_model
from moesim.hwmodels.yaml_io import dump_mapping
from moesim.simulator.model.catalogue import load_model
from moesim.simulator.model.shape import ModelShape

SOURCE = {"kind": "assumed", "reference": "a test"}


def _shipped(name: str) -> dict[str, Any]:
    data = load_model(name).model_dump(mode="json", exclude_none=True)
    return {k: v for k, v in data.items() if k not in ("numerics", "not_modelled")} | {"source": SOURCE}


GPT_OSS, MAVERICK = _shipped("gpt-oss-20b"), _shipped("llama-4-maverick")
LATENT: dict[str, Any] = {
    "name": "latent",
    "source": SOURCE,
    "n_layers": 8,
    "hidden": 4096,
    "vocab": 131072,
    "attention": {"kind": "gqa", "heads": 32, "kv_heads": 2, "head_dim": 128},
    "moe": {
        "experts": 512, "top_k": 22, "expert_ffn": 2688, "scoring": "sigmoid", "score_bias": True,
        "shared_experts": 1, "shared_ffn": 5376, "expert_gated": False, "latent": 1024,
    },
    "tied_embeddings": False,
}  # fmt: skip
"""Experts of Nemotron 3 Super in plain layers."""
LONGCAT: dict[str, Any] = {
    "name": "longcat",
    "source": SOURCE,
    "n_layers": 8,
    "hidden": 6144,
    "vocab": 131072,
    "attention": {
        "kind": "mla", "heads": 64, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_dim": 128,
        "qk_rope_dim": 64, "v_dim": 128,
    },
    "moe": {"experts": 512, "top_k": 12, "expert_ffn": 2048, "scoring": "softmax", "zero_experts": 256},
    "tied_embeddings": False,
}  # fmt: skip
"""Experts of LongCat-Flash in plain layers."""
EVERY = {"gpt-oss": GPT_OSS, "maverick": MAVERICK, "latent": LATENT, "longcat": LONGCAT}


def shape_of(data: dict[str, Any], **changes: Any) -> ModelShape:
    """The model with some keys changed; keys of `moe` change inside it."""
    experts = {**data["moe"], **changes.pop("moe", {})} if "moe" in data else None
    more = {} if experts is None else {"moe": experts}
    return validate_model(ModelShape, {**data, **changes, **more}, "model.yaml")


def saved(data: dict[str, Any], folder: Path, **changes: Any) -> str:
    """Path of a model file with this model."""
    shape_of(data, **changes)
    experts = {**data["moe"], **changes.pop("moe", {})}
    file = folder / f"{data['name']}-{len(list(folder.iterdir()))}.yaml"
    file.write_text(dump_mapping({**data, **changes, "moe": experts}))
    return str(file)
