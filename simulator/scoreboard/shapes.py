"""Model shapes of published measurements: the architecture columns, and what a family leaves unsaid."""

from __future__ import annotations

from typing import Any

from moesim.hwmodels.errors import InputError
from moesim.simulator.model.shape import GQA, MLA, ModelShape, MoE, ShapeSource
from moesim.simulator.scoreboard.rows import OpenRow

TIED = ("gpt", "bloom", "mpt", "mtnlg", "grok")
"""Families whose head is the embedding table (Megatron-LM GPT, BLOOM, MPT, Grok-1)."""
UNGATED = ("gpt3", "gpt-1", "gpt-2", "gpt-3", "gpt-5", "gpt-7", "bloom", "mpt", "mtnlg", "nemotron")
"""Families with an FFN of two matrices: GELU, in Nemotron squared ReLU."""
WITHOUT_ROTARY = ("gpt3", "gpt-1", "gpt-2", "gpt-3", "gpt-5", "gpt-7", "bloom", "mpt", "mtnlg")
"""Families with learned positions (GPT-3, MT-NLG) or ALiBi (BLOOM and its candidates, MPT)."""
HEAD_DIMS = {"qwen3-30b-a3b": 128, "gpt-oss-20b": 64, "gpt-oss-120b": 64, "grok-1": 128}
"""Head widths that are not hidden / heads (the models' config.json)."""
VOCABULARIES = {"gpt3": 51200, "nemotron": 256000}
"""Where a table has no vocabulary: GPT-2's padded one (Megatron-LM), Nemotron's (arXiv 2402.16819)."""


def shape_of(row: OpenRow) -> ModelShape:
    """The model of a row; raises InputError where its columns do not fix a shape."""
    if not (row.layers and row.hidden and row.heads):
        raise InputError(f"{row.id}: layers, hidden or heads are missing")
    common: dict[str, Any] = {
        "name": row.model,
        "source": ShapeSource(kind="published", reference=row.source, date="undated"),
        "n_layers": row.layers,
        "hidden": row.hidden,
        "vocab": row.vocab or _vocabulary(row.model),
    }
    if row.model.startswith("deepseek"):
        return ModelShape(**common, **_deepseek(row), tied_embeddings=False)
    attention = GQA(
        heads=row.heads,
        kv_heads=row.kv_heads or row.heads,
        head_dim=HEAD_DIMS.get(row.model, row.hidden // row.heads),
        qk_norm=row.model.startswith("qwen3"),
        rotary=not row.model.startswith(WITHOUT_ROTARY),
    )
    tied = row.model.startswith(TIED) and not row.model.startswith("gpt-oss")
    if row.arch == "moe":
        moe = MoE(experts=row.n_experts, top_k=row.topk, expert_ffn=row.ffn, scoring="softmax")
        window = ("sliding-window attention of every other layer priced as full",)
        left_out = window if row.model.startswith("gpt-oss") else ()
        return ModelShape(**common, attention=attention, moe=moe, tied_embeddings=tied, not_modelled=left_out)
    return ModelShape(
        **common,
        attention=attention,
        dense_ffn=row.ffn or 4 * row.hidden,
        ffn_gated=not row.model.startswith(UNGATED),
        tied_embeddings=tied,
    )


def _vocabulary(model: str) -> int:
    for family, size in VOCABULARIES.items():
        if model.startswith(family):
            return size
    raise InputError(f"{model}: the vocabulary is missing")


def _deepseek(row: OpenRow) -> dict[str, Any]:
    """MLA and the first dense layers of DeepSeek-V2 and V3 (arXiv 2405.04434, 2412.19437)."""
    third = row.model == "deepseek-v3"
    attention = MLA(
        heads=row.heads, q_lora_rank=1536, kv_lora_rank=512, qk_nope_dim=128, qk_rope_dim=64, v_dim=128
    )
    dense = 1 if row.layers < 10 or not third else 3
    moe = MoE(
        experts=row.n_experts,
        top_k=row.topk,
        expert_ffn=row.ffn,
        shared_experts=1 if third else 2,
        shared_ffn=row.ffn,
        groups=8,
        groups_per_token=4 if third else 3,
        group_score="top2-sum" if third else "best",
        scoring="sigmoid" if third else "softmax",
        score_bias=third,
        dense_layers=tuple(range(dense)),
    )
    return {"attention": attention, "moe": moe, "dense_ffn": 18432 if third else 12288}
