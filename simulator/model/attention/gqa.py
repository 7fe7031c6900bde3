"""Full causal grouped-query attention: several query heads share one head of keys and values."""

from __future__ import annotations

from typing import Literal

from moesim.simulator.model.attention.grouped_query import GroupedQueryAttention


class GQA(GroupedQueryAttention):
    """Grouped-query attention; with `kv_heads` equal to `heads` it is multi-head attention."""

    kind: Literal["gqa"] = "gqa"

    def megatron_arguments(self) -> dict[str, str | None] | None:
        """Megatron-LM's flags for grouped-query attention; None for a subclass, another attention."""
        if type(self) is not GQA:
            return None
        return {
            "--num-attention-heads": str(self.heads),
            "--group-query-attention": None,
            "--num-query-groups": str(self.kv_heads),
            "--kv-channels": str(self.head_dim),
            **({"--add-qkv-bias": None} if self.qkv_bias else {}),
            **({"--qk-layernorm": None} if self.qk_norm else {}),
        }
