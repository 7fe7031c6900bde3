"""A Triton kernel that copies on as few thread blocks as it is launched with (for between_gemms.py)."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


@triton.jit
def copy(source: Any, target: Any, words: Any, BLOCK: tl.constexpr) -> None:  # noqa: N803
    """Copy `words` 32-bit words; every thread block takes one block of BLOCK words after the other."""
    first = tl.program_id(0) * BLOCK
    stride = tl.num_programs(0) * BLOCK
    for start in range(first, words, stride):
        at = start + tl.arange(0, BLOCK)
        inside = at < words
        tl.store(target + at, tl.load(source + at, mask=inside), mask=inside)
