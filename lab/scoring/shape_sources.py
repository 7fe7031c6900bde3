"""Source of every field of a scoreboard row's model: no row is scored with a guessed shape."""

from __future__ import annotations

from collections.abc import Mapping

from moesim.simulator.scoring.scoreboard.configurations import published_of, settings_of
from moesim.simulator.scoring.scoreboard.rows import OpenRow
from moesim.simulator.scoring.scoreboard.shapes import PLAIN, FamilyFacts, family_of, shape_of


def field_sources(row: OpenRow) -> dict[str, str]:
    """Source of every field of a row's shape; fields of attention and experts come without a prefix.

    Raises InputError as `shape_of` does.
    """
    shape, family, published = shape_of(row), family_of(row), published_of(row)
    parts = [shape, *shape.attention_by_name.values(), *([shape.moe] if shape.moe else [])]
    fields = {name for part in parts for name in type(part).model_fields}
    if family.facts is None:
        sources = dict.fromkeys(fields, shape.source.reference)
    else:
        sources = _fact_sources(row, family.facts)
    stated = {s.field: s.place for s in settings_of(row)}
    settings = {"vocab": "vocab", "mtp": "mtp_layers", "dense_layers": "dense_layers"}
    settings["tied_embeddings"] = "tied_embeddings"
    for setting, field in settings.items():
        if getattr(published, setting) is not None:
            sources[field] = stated[setting]
    return sources


def _fact_sources(row: OpenRow, facts: FamilyFacts) -> dict[str, str]:
    by_fact: Mapping[str, tuple[str, ...]] = {
        "head_dim": ("head_dim",),
        "rotary": ("rotary",),
        "qk_norm": ("qk_norm",),
        "attention_bias": ("qkv_bias", "o_bias"),
        "ffn_gated": ("ffn_gated", "expert_gated"),
        "ffn_bias": ("ffn_bias", "expert_bias"),
        "norm": ("norm",),
        "tied": ("tied_embeddings",),
        "learned_positions": ("learned_positions",),
        "vocab": ("vocab",),
        "dense_layers": ("dense_layers",),
        "shared_experts": ("shared_experts",),
        "scoring": ("scoring",),
        "router_bias": ("router_bias",),
    }
    sources = dict.fromkeys(PLAIN, facts.plain.source)
    for name, fields in by_fact.items():
        fact = getattr(facts, name)
        if fact is not None:
            sources |= dict.fromkeys(fields, fact.source)
    columns = ("n_layers", "hidden", "heads", "kv_heads", "dense_ffn", "expert_ffn", "experts", "top_k")
    sources |= dict.fromkeys((*columns, *(("vocab",) if row.vocab else ())), row.source)
    # What these fields say comes from the others, or from nowhere: they are names, or change no prediction.
    return sources | dict.fromkeys(
        ("name", "source", "kind", "attention", "moe", "numerics", "not_modelled"), row.source
    )
