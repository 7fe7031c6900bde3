"""Takes out the kernels that a fused grouped MLP of experts runs inside its grouped GEMMs (pure).

Transformer Engine's fused grouped MLP writes activations and their gradients from the epilogue of the GEMM
before them: the activation times the routing weight, quantised by rows and by columns, behind the first
projection, and its backward, with the gradient of the weight, behind the input gradient of the second
(NVIDIA/TransformerEngine@d0067d0da transformer_engine/pytorch/ops/fused/grouped_mlp.py). The epilogue's bytes
move while tensor cores compute and add no time here; pre-activations stay in BF16.
"""

from __future__ import annotations

from collections.abc import Mapping

from moesim.simulator.model.operator import Operator, Phase

EPILOGUES = frozenset(
    {
        "experts.scale_weights",
        "experts.swiglu",
        "experts.down.cast",
        "experts.down.scales",
        "experts.cache",
        "experts.restore",
        "experts.swiglu.backward",
        "experts.weight_gradient",
        "experts.scale_weights.backward",
        "experts.down.input_cast_channel",
        "experts.gate_up.cast_gradient",
        "experts.gate_up.scales",
        "experts.gate_up.gradient_cast_channel",
    }
)
"""Operators that run in the epilogue of a grouped GEMM, or whose output it has written already."""


def fused_experts(operators: Mapping[Phase, tuple[Operator, ...]]) -> dict[Phase, tuple[Operator, ...]]:
    """The operators of a block without the kernels between its grouped GEMMs; recomputed ones stay."""
    return {
        phase: tuple(op for op in ops if op.recompute or op.name not in EPILOGUES)
        for phase, ops in operators.items()
    }
