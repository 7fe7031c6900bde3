"""Adds the sums of gradients that PyTorch's autograd runs where several linear layers read one tensor (pure).

The operators of a block join such layers: queries, keys and values, or gate and up. torchtitan has a linear
layer, or a grouped GEMM, for each, and autograd adds their input gradients one by one, with 4 B read and 2 B
written an element. Source: torchtitan 0.2.2 `torchtitan/models/{llama3,qwen3,deepseek_v3}/model/model.py` and
`torchtitan/models/moe/moe.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from moesim.simulator.model.operator import Operator, Phase
from moesim.simulator.model.primitives import BF16, move

SUMS: dict[str, int] = {
    "qkv_proj.dgrad": 2,
    "kv_down.dgrad": 1,  # with the queries' projection
    "ffn.gate_up.dgrad": 1,
    "experts.gate_up.dgrad": 1,
    "shared.gate_up.dgrad": 2,  # with each other, and with the routed rows' gradient
    "gate.dgrad": 1,  # with the routed rows' gradient
}
"""Sums behind an input gradient, by the operator that computes it."""


def summed_gradients(
    operators: Mapping[Phase, tuple[Operator, ...]], joined_experts: bool = False
) -> dict[Phase, tuple[Operator, ...]]:
    """Add a sum behind every input gradient that autograd gets in parts.

    `joined_experts`: gate and up of an expert are one GEMM, as in torchtitan's gpt_oss.
    """
    return {
        phase: tuple(one for op in ops for one in _with_sum(op, joined_experts))
        for phase, ops in operators.items()
    }


def _with_sum(op: Operator, joined_experts: bool) -> tuple[Operator, ...]:
    count = SUMS.get(op.name, 0)
    if not count or op.gemm is None or (joined_experts and op.name.startswith("experts.")):
        return (op,)
    size = count * op.gemm.m * op.gemm.n * BF16
    added = move(
        f"{op.name.removesuffix('.dgrad')}.sum_gradients", "elementwise", "I", 2 * size, size,
        variant="add", launches=count, per_received_row=op.per_received_row,
    )  # fmt: skip
    return op, replace(added, stream=op.stream)
