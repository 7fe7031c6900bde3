"""Operators of the router, in the order of DeepSeek's published H800 training profile.

deepseek-ai/profile-data@449602428a1b, train.json.
"""

from __future__ import annotations

from moesim.simulator.model.operator import Operator
from moesim.simulator.model.primitives import FP32, gemm, move
from moesim.simulator.model.work import Work

GATE_FORWARD_LAUNCHES, GATE_BACKWARD_LAUNCHES = 37, 26
"""Numbers of small kernels of the gate in the published profile, forward and backward."""
GATE_FORWARD_PASSES, GATE_BACKWARD_PASSES = 12, 16
"""Reads and writes of a [tokens, experts] FP32 tensor by these kernels, counted in the same profile."""


def router_forward(w: Work, experts: int) -> list[Operator]:
    """GEMM of the router, then scores, group limit, top-k and balance loss as one chain of small kernels."""
    passes = GATE_FORWARD_PASSES * w.norm_tokens * experts * FP32 / 2
    return [
        gemm("gate", "F", w.norm_tokens, experts, w.hidden, "bf16", cls="gate_gemm"),
        move("gate.select", "topk", "F", passes, passes, variant="forward", launches=GATE_FORWARD_LAUNCHES),
    ]


def router_backward(w: Work, experts: int) -> list[Operator]:
    """Backward of the chain of small kernels, then input and weight gradient of the router."""
    passes = GATE_BACKWARD_PASSES * w.norm_tokens * experts * FP32 / 2
    h, t = w.hidden, w.norm_tokens
    return [
        move(
            "gate.select.backward",
            "topk",
            "I",
            passes,
            passes,
            variant="backward",
            launches=GATE_BACKWARD_LAUNCHES,
        ),
        gemm("gate.dgrad", "I", t, h, experts, "bf16", cls="gate_gemm"),
        gemm("gate.wgrad", "W", experts, h, t, "bf16", cls="gate_gemm"),
    ]
