"""What the backward pass computes again instead of keeping."""

from __future__ import annotations

from typing import Literal

RecomputePolicy = Literal["none", "attention", "selective", "op", "full", "deepseek-v3"]
"""What backward computes again.

none: nothing. attention: the core attention where its scores go through memory (arXiv 2205.05198,
section 5; with flash attention nothing more than that does anyway). selective: norms, MLA up-projections
and SwiGLU outputs. op: everything but the core attention, the first, third, ... dense GEMM of a layer
and what came through an all-to-all (torchtitan's "op"; eq. M7). full: every layer from its input.
deepseek-v3: as selective, and the attention output is kept in the 12-bit format E5M6 (DeepSeek-V3 report,
sections 3.2.3 and 3.3.3).
"""
