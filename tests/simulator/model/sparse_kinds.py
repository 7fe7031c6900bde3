"""Kinds of sparse attention of published models, for several tests."""

from __future__ import annotations

from moesim.simulator.model.attention import DSA, BlockSparse, Compressed

V32 = DSA.model_validate(
    {"heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_dim": 128, "qk_rope_dim": 64,
     "v_dim": 128, "indexer": {"heads": 64, "head_dim": 128, "top_k": 2048}}
)  # fmt: skip
GLM5 = DSA.model_validate(
    {"heads": 64, "q_lora_rank": 2048, "kv_lora_rank": 512, "qk_nope_dim": 192, "qk_rope_dim": 64,
     "v_dim": 256, "indexer": {"heads": 32, "head_dim": 128, "top_k": 2048}}
)  # fmt: skip
M3 = BlockSparse(
    heads=64, kv_heads=4, head_dim=128, qk_norm=True, index_heads=4, index_dim=128, block=128, top_k_blocks=16
)


def v4_flash(ratio: int) -> Compressed:
    """Attention of DeepSeek-V4-Flash's layers with this compression."""
    indexer = {"heads": 64, "head_dim": 128, "top_k": 512} if ratio == 4 else None
    return Compressed.model_validate(
        {"heads": 64, "head_dim": 512, "rope_dim": 64, "q_lora_rank": 1024, "o_groups": 8,
         "o_lora_rank": 1024, "window": 128, "ratio": ratio, "indexer": indexer}
    )  # fmt: skip
