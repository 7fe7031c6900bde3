"""Adds the copies that pad the rows of every expert to a multiple of 16 or 32 for FP8 GEMMs (pure).

Megatron core pads before the first projection and takes the padding out behind the second; the backward does
the reverse (NVIDIA/Megatron-LM@core_v0.15.0 megatron/core/transformer/moe/experts.py:862 and 958,
NVIDIA/TransformerEngine@001b2b1e8 transformer_engine/pytorch/module/fp8_padding.py). Each reads and writes
all rows in BF16; the rows that are added are left out.
"""

from __future__ import annotations

from collections.abc import Mapping

from moesim.simulator.model.operator import Operator, Phase
from moesim.simulator.model.primitives import BF16, move

_BEFORE = {"experts.gate_up": "experts.pad", "experts.down.dgrad": "experts.pad_gradient"}
_AFTER = {"experts.down": "experts.unpad", "experts.gate_up.dgrad": "experts.unpad_gradient"}


def padded_rows(operators: Mapping[Phase, tuple[Operator, ...]]) -> dict[Phase, tuple[Operator, ...]]:
    """Add one copy of the experts' rows before and after both grouped GEMMs, in either direction."""
    return {phase: tuple(one for op in ops for one in _copied(op)) for phase, ops in operators.items()}


def _copied(op: Operator) -> tuple[Operator, ...]:
    base = op.name.removesuffix(".recompute")
    name = _BEFORE.get(base) or _AFTER.get(base)
    if name is None or op.gemm is None:
        return (op,)
    columns = op.gemm.k if base in _BEFORE else op.gemm.n
    size = op.gemm.m * columns * BF16
    suffix = op.name.removeprefix(base)
    copy = move(name + suffix, "copy", op.direction, size, size, variant="flat", per_received_row=True)
    return (copy, op) if base in _BEFORE else (op, copy)
