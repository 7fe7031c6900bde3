"""Recompute policies, which choose what the backward pass computes again instead of keeping it."""

from __future__ import annotations

from typing import Literal

RecomputePolicy = Literal["none", "attention", "selective", "op", "full", "deepseek-v3"]
"""Tensors that the backward pass computes again.

- none: it computes nothing again.
- attention: it repeats the core attention where the scores go through memory (arXiv 2205.05198, section 5);
  the backward of flash attention computes its scores again under every policy.
- selective: it repeats norms, MLA up-projections and SwiGLU outputs.
- op: it repeats everything but the core attention, the first, third, ... dense GEMM of a layer and the
  all-to-alls (torchtitan's "op"; eq. M7).
- full: it repeats every layer from its input.
- deepseek-v3: as selective, with the attention output kept in the 12-bit format E5M6 (DeepSeek-V3 report,
  sections 3.2.3 and 3.3.3).
"""
