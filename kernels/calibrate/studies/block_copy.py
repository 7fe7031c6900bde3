"""A Triton kernel that copies on as few thread blocks as it is launched with (for between_gemms.py)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def copy(source, target, words, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copy `words` 32-bit words; every thread block takes one block of BLOCK words after the other."""
    first = tl.program_id(0) * BLOCK
    stride = tl.num_programs(0) * BLOCK
    for start in range(first, words, stride):
        at = start + tl.arange(0, BLOCK)
        inside = at < words
        tl.store(target + at, tl.load(source + at, mask=inside), mask=inside)
