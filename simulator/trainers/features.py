"""Names of what a model may have beyond plain layers, and what a trainer's plan does not say of them.

A trainer's data file lists the features that the exported plan expresses. A plan of a model with any other is
excluded, because the trainer would train another model without a word.
"""

from __future__ import annotations

from collections.abc import Collection

from moesim.simulator.model.shape import ModelShape
from moesim.simulator.trainers.rules import Exclusion

FEATURES = {
    "gqa": "grouped-query attention",
    "mla": "multi-head latent attention",
    "sliding": "attention over sliding windows",
    "chunked": "attention inside chunks",
    "dsa": "sparse attention with an indexer",
    "block_sparse": "block-sparse attention",
    "compressed": "compressed attention",
    "gated_delta": "gated delta networks",
    "kda": "Kimi delta attention",
    "mamba2": "Mamba-2 layers",
    "mamba": "Mamba layers",
    "lightning": "lightning attention",
    "several-attentions": "several kinds of attention in one model",
    "attention-sinks": "attention sinks",
    "attention-output-gate": "gates of the attention's output",
    "attention-without-rotation": "attention without rotary positions",
    "mla-without-rotation": "latent attention without rotary positions",
    "keys-as-values": "keys that are the values too",
    "norm-of-all-heads": "norms over the queries and keys of all heads together",
    "value-head-size": "value heads of another size than key heads",
    "layernorm": "LayerNorm",
    "post-norm": "norms behind the halves of a layer only",
    "sandwich-norms": "norms before and behind the halves of a layer",
    "ffn-bias": "biases of dense FFNs",
    "several-ffn-widths": "dense FFNs of several widths",
    "missing-halves": "layers without attention or without a feed-forward half",
    "mtp-layer": "MTP modules with a layer of their own kind",
    "learned-positions": "learned positions",
    "residual-streams": "several residual streams",
    "router-bias": "biases of the router's projection",
    "ungated-experts": "experts without a gate projection",
    "expert-biases": "biases of experts",
    "latent-experts": "experts on latent rows",
    "zero-experts": "experts without computation",
    "further-expert-norms": "further norms beside experts",
}
"""Words for a feature's name (`ModelShape.features`)."""


def missing_features(shape: ModelShape, expressed: Collection[str]) -> tuple[str, ...]:
    """Words for the features of a model that are not among those that a trainer's plan expresses."""
    return tuple(_words(name) for name in sorted(shape.features - set(expressed)))


def feature_exclusions(expressed: Collection[str]) -> tuple[Exclusion, ...]:
    """Exclusions of plans of models with a feature that is not among these."""
    named = [name for name in FEATURES if name not in expressed]
    return (
        *(Exclusion({"features": name}, _reason(_words(name))) for name in named),
        Exclusion({"features": {"not": [*FEATURES, *expressed]}}, _reason("a part of this model")),
    )


def _words(name: str) -> str:
    return FEATURES.get(name, name.replace("-", " ").replace("_", " "))


def _reason(words: str) -> str:
    return f"moesim knows no setting of it for {words}"
